"""Time every installed engine and precision against timm, transformers and each other.

    python -m benchmarks.engines                                   # S/16 and B/16, batch 1, 8 and 32
    python -m benchmarks.engines --models vit-s16 --batches 8 --runs 3 --save

Outputs are compared with float32 torch before anything is timed. All candidates take turns; a ratio is the time of timm
in eager float32 divided by that of the candidate, in the median over the runs, so above 1 the candidate is faster.
"A/A" is timm against itself. int8 is calibrated on noise here, so its column shows speed, not accuracy:
`vitral export --precision int8` measures the accuracy. bfloat16 is timed everywhere and fast only where the CPU has it.
"""

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

import vitral
from benchmarks.peers import in_timm, in_transformers, randomize
from benchmarks.timing import describe_machine, fastest_turns, save
from vitral.exporting.quantization import import_nncf, run_nncf
from vitral.inference.engines import compare_outputs
from vitral.inference.engines.choosing import SUPPORTED, Subject, build_engine, example_images
from vitral.inference.engines.fingerprint import describe_cpu
from vitral.inference.engines.graph import PixelModel, trace
from vitral.inference.engines.openvino import compile_model, convert_program
from vitral.preprocess import Preprocess

Turn = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit-s16", "vit-b16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--engines", nargs="+", default=["torch", "compiled", "onnxruntime", "openvino"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--turn-seconds", type=float, default=4.0, help="seconds for all turns of a candidate in a run")
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    machine = describe_machine("timm", "transformers", "onnxruntime", "openvino", "nncf") | describe_cpu()
    print(machine, flush=True)
    rows: list[dict[str, Any]] = []
    for name in options.models:
        for batch in options.batches:
            rows.append(measure(name, batch, options.engines, options.runs, options.turn_seconds))
            print(as_lines(rows[-1]), flush=True)
            if options.save:
                save("engines", machine, rows, key=("model", "batch"))


def measure(name: str, batch: int, engines: list[str], runs: int, turn_seconds: float) -> dict[str, Any]:
    model = randomize(vitral.create(name, activation="gelu")).eval()
    assert isinstance(model, vitral.ViT)
    preprocess = Preprocess(size=model.config.image_hw)
    subject = Subject(model=model, preprocess=preprocess, device=torch.device("cpu"), multi_label=False)
    images = example_images(preprocess, batch)
    turns, agreements = build_turns(subject, images, engines)
    turns |= peers(model, subject, images, agreements)
    once = fastest_turns(turns, rounds=1)
    rounds = max(1, min(80, round(turn_seconds / once["timm float32"])))
    times = [fastest_turns(turns, rounds, seed=run) for run in range(runs)]
    ratios = {turn: median(run["timm float32"] / run[turn] for run in times) for turn in turns}
    return {
        "model": name,
        "batch": batch,
        "timm_milliseconds": min(run["timm float32"] for run in times) * 1e3,
        "ratios": ratios,
        "runs": {turn: [run["timm float32"] / run[turn] for run in times] for turn in turns},
        "agreement": agreements,
        "rounds": rounds,
    }


def build_turns(
    subject: Subject, images: np.ndarray, engines: list[str]
) -> tuple[dict[str, Turn], dict[str, dict[str, float]]]:
    """Return what each engine runs, and how far its outputs are from float32 torch."""
    turns: dict[str, Turn] = {}
    agreements: dict[str, dict[str, float]] = {}
    expected = subject.reference.logits(images)
    built = {
        f"{engine} {precision}": build_engine(subject, engine, precision, batch=len(images))
        for engine in engines
        for precision in SUPPORTED[engine]
        if precision != "float16"
    }
    if "openvino" in engines:
        built["openvino int8"] = quantized(subject)
    for title, engine in built.items():
        agreement = compare_outputs(engine.logits(images), expected, kind="logits")
        agreements[title] = {"difference": agreement.difference, "top1": agreement.top1}
        if engine.precision == "float32" and not agreement.difference < 1e-3:
            raise SystemExit(f"{title} disagrees with torch: {agreement}")
        turns[title] = bind(engine.logits, images)
    return turns, agreements


def quantized(subject: Subject) -> Any:
    """Return int8, calibrated on waves and noise: good enough to be timed."""
    network = PixelModel(subject.model, subject.preprocess).eval()
    program = trace(network, torch.from_numpy(example_images(subject.preprocess, 3)))
    model = convert_program(program, subject.preprocess, ["logits"])
    return compile_model(run_nncf(import_nncf(), model, example_images(subject.preprocess, 16), ()), precision="int8")


def peers(
    model: vitral.ViT, subject: Subject, images: np.ndarray, agreements: dict[str, dict[str, float]]
) -> dict[str, Turn]:
    """Return timm (twice, for A/A) and transformers in eager float32, with our weights."""
    turns: dict[str, Turn] = {}
    expected = subject.reference.logits(images)
    scaled = (torch.from_numpy(images).float() / 255 - 0.5) / 0.5
    for title, build in (("timm float32", in_timm), ("timm float32 (A/A)", in_timm), ("transformers", in_transformers)):
        network = build(model).eval()

        def run(network: torch.nn.Module = network) -> np.ndarray:
            with torch.inference_mode():
                return network(scaled).numpy()

        difference = float(np.abs(run() - expected).max())
        if not difference < 1e-3:
            raise SystemExit(f"{title} differs by {difference:.1e}")
        agreements[title] = {"difference": difference, "top1": 1.0}
        turns[title] = run
    return turns


def bind(function: Callable[[np.ndarray], Any], images: np.ndarray) -> Turn:
    return lambda: function(images)


def as_lines(row: dict[str, Any]) -> str:
    head = f"{row['model']}, batch {row['batch']}: timm eager float32 takes {row['timm_milliseconds']:.1f} ms"
    ordered = sorted(row["ratios"].items(), key=lambda pair: -pair[1])
    lines = [f"  {title:24} {ratio:5.2f} x   difference {difference(row, title)}" for title, ratio in ordered]
    return "\n".join([head, *lines])


def difference(row: dict[str, Any], title: str) -> str:
    return f"{row['agreement'][title]['difference']:.1e}"


if __name__ == "__main__":
    main()
