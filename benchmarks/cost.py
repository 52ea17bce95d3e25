"""Measure how the time of a forward pass grows with tokens, batch and threads, and its share of the matmul limit.

    python -m benchmarks.cost --save                       # ViT-S/16: about four minutes on 2 cores

The exponent k of time ~ x^k is fitted to the fastest turns. The limit of a precision is the speed of the fastest
product of large matrices, in torch or OpenVINO. The share is the speed of a forward pass of eight images, in
operations per second, divided by the limit. `--only limits` measures one of the parts again.
"""

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import vitral
from benchmarks.engines import build_engines
from benchmarks.peers import randomize
from benchmarks.timing import describe_machine, fastest_turns, save
from vitral.devices import choose_precision
from vitral.inference.engines import Engine
from vitral.inference.engines.choosing import Subject, build_engine, example_images
from vitral.inference.engines.openvino import import_openvino
from vitral.inference.engines.quantization import import_nncf
from vitral.model.cost import count_cost
from vitral.preprocess import Preprocess

SIDES = (96, 160, 224, 320, 448)
BATCHES = (1, 2, 4, 8, 16)
SIDES_OF_PRODUCTS = (512, 1024, 2048)
"""Sides of the square matrices whose fastest product is the limit."""
Turns = dict[str, Callable[[], Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit-s16")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", choices=("tokens", "batches", "threads", "limits"))
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    parts = {"tokens": measure_tokens, "batches": measure_batches, "threads": measure_threads, "limits": measure_limits}
    for measure in parts.values() if options.only is None else [parts[options.only]]:
        measured = measure(options.model, options.rounds)
        rows += measured
        print(*measured, sep="\n", flush=True)
    if options.save:
        keyed = [{"engine": "", **row} for row in rows]
        save("cost", describe_machine("openvino", "nncf"), keyed, key=("what", "engine"))


def make_subject(name: str, side: int = 224) -> Subject:
    model = randomize(vitral.create(name, image_size=side, activation="gelu")).eval()
    assert isinstance(model, vitral.ViT)
    preprocess = Preprocess(size=(side, side))
    return Subject(model=model, preprocess=preprocess, device=torch.device("cpu"), multi_label=False)


def run(engine: Engine, images: np.ndarray) -> Callable[[], Any]:
    return lambda: engine.logits(images)


def measure_tokens(name: str, rounds: int) -> list[dict[str, Any]]:
    turns: Turns = {}
    tokens: list[int] = []
    for side in SIDES:
        subject = make_subject(name, side)
        images = example_images(subject.preprocess, 2)
        for engine in ("torch", "openvino"):
            turns[f"{engine} {side}"] = run(build_engine(subject, engine, "float32", batch=2), images)
        tokens.append(count_cost(subject.model.config).tokens)
    return [fit("tokens", name, tokens, turns, SIDES, rounds)]


def measure_batches(name: str, rounds: int) -> list[dict[str, Any]]:
    subject, turns = make_subject(name), Turns()
    for engine in ("torch", "openvino"):
        built = build_engine(subject, engine, "float32", batch=1)
        turns |= {f"{engine} {batch}": run(built, example_images(subject.preprocess, batch)) for batch in BATCHES}
    return [fit("images per batch", name, BATCHES, turns, BATCHES, rounds)]


def measure_threads(name: str, rounds: int) -> list[dict[str, Any]]:
    subject, default = make_subject(name), torch.get_num_threads()
    counts = sorted({1, max(1, default // 2), default})
    images = {batch: example_images(subject.preprocess, batch) for batch in (1, 8)}

    def bind(threads: int, batch: int) -> Callable[[], Any]:
        def turn() -> None:
            torch.set_num_threads(threads)
            subject.reference.logits(images[batch])

        return turn

    turns: Turns = {f"batch-{batch} {threads}": bind(threads, batch) for batch in images for threads in counts}
    row = fit("threads", name, counts, turns, counts, rounds)
    torch.set_num_threads(default)
    return [row]


def fit(what: str, name: str, x: Any, turns: Turns, keys: Any, rounds: int) -> dict[str, Any]:
    """Return the milliseconds and the exponent of each group of turns, whose titles are "group key"."""
    fastest_turns(turns, rounds=1)  # warms up
    seconds = fastest_turns(turns, rounds)
    groups = dict.fromkeys(title.split()[0] for title in turns)
    times = {group: [seconds[f"{group} {key}"] * 1e3 for key in keys] for group in groups}
    exponents = {
        group: float(np.polyfit(np.log(x), np.log(values), 1)[0]) if len(x) > 1 else None
        for group, values in times.items()
    }
    return {"model": name, "what": what, "x": list(x), "milliseconds": times, "exponents": exponents}


def measure_limits(name: str, rounds: int) -> list[dict[str, Any]]:
    """Return the share of each engine and precision in the speed of a large matrix product."""
    subject, batch = make_subject(name), 8
    images = example_images(subject.preprocess, batch)
    engines = build_engines(subject, ["torch", "onnxruntime", "openvino"])
    products = matrix_products()
    seconds = fastest_turns(products | {title: run(engine, images) for title, engine in engines.items()}, rounds)
    speeds = {title: 2 * int(title.split()[2]) ** 3 / seconds[title] for title in products}
    operations = batch * count_cost(subject.model.config).forward_flops
    rows: list[dict[str, Any]] = []
    for title in engines:
        precision = title.split()[1]
        limit = max(speed for product, speed in speeds.items() if product.split()[1] == precision)
        speed = operations / seconds[title]
        values = {"gigaflops": speed / 1e9, "limit_gigaflops": limit / 1e9, "share": speed / limit}
        rows.append({"model": name, "what": "limit", "engine": title, "batch": batch, **values})
    return rows


def matrix_products() -> Turns:
    """Return products of square matrices by precision and side, in torch and in OpenVINO."""
    native = choose_precision("cpu").value
    turns: Turns = {}
    for side in SIDES_OF_PRODUCTS:
        left, right = torch.randn(side, side), torch.randn(side, side)
        turns[f"torch float32 {side}"] = bind_product(left, right)
        for precision in dict.fromkeys(("float32", native, "int8")):
            turns[f"openvino {precision} {side}"] = openvino_product(left, precision)
        if native == "bfloat16":
            turns[f"torch bfloat16 {side}"] = bind_product(left.bfloat16(), right.bfloat16())
    return turns


def bind_product(left: torch.Tensor, right: torch.Tensor) -> Callable[[], Any]:
    return lambda: left @ right


def openvino_product(left: torch.Tensor, precision: str) -> Callable[[], Any]:
    """Return a matrix product that OpenVINO computes in a precision."""
    openvino, nncf = import_openvino(), import_nncf()
    layer = torch.nn.Linear(len(left), len(left), bias=False).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = openvino.convert_model(torch.export.export(layer, (left,)))
    if precision == "int8":
        model = nncf.quantize(model, nncf.Dataset([left.numpy()]), subset_size=1)
    hint = "bf16" if precision == "bfloat16" else "f32"
    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": hint}
    compiled = openvino.Core().compile_model(model, "CPU", options)
    return lambda: compiled(left.numpy())


if __name__ == "__main__":
    main()
