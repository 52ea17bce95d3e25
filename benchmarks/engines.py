"""Time every installed engine and precision against timm, transformers and each other.

    python -m benchmarks.engines --models vit-s16 --save           # batches of 1, 8 and 32: seven minutes on 2 cores
    python -m benchmarks.engines --models vit-b16 --save           # eleven minutes
    python -m benchmarks.engines --models vit-s16 --batches 8 --runs 3 --turn-seconds 5

Outputs are compared with float32 torch before anything is timed. All candidates take turns; a ratio is the time of timm
in eager float32 divided by that of the candidate, in the median over the runs, so above 1 the candidate is faster.
"A/A" is timm against itself. "auto" is what `vitral predict` chooses for a long run. bfloat16 is timed only where the
CPU computes it. int8 is calibrated on noise here, so its row shows speed, not accuracy: `benchmarks.merging` and
`vitral export --precision int8` measure the accuracy. torch.compile takes up to a minute per row: --engines adds it.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import vitral
from benchmarks.peers import in_timm, in_transformers, randomize
from benchmarks.timing import describe_machine, fastest_turns, save
from vitral.data.transforms import normalize
from vitral.devices import choose_precision
from vitral.inference.engines import Engine, Gate, compare_outputs, describe_engine
from vitral.inference.engines.choosing import (
    SUPPORTED,
    Subject,
    build_engine,
    choose_engine,
    example_images,
    time_per_image,
)
from vitral.inference.engines.graph import PixelModel, trace
from vitral.inference.engines.openvino import compile_model, convert_program
from vitral.inference.engines.quantization import import_nncf, run_nncf
from vitral.preprocess import Preprocess

Turn = Callable[[], Any]
AUTO_SECONDS = 100.0
"""Length of the run that "auto" chooses for, if torch computed it: long enough for all engines but torch.compile."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit-s16", "vit-b16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--engines", nargs="+", default=["torch", "onnxruntime", "openvino"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--turn-seconds", type=float, default=2.0, help="seconds for all turns of a candidate in a run")
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    machine = describe_machine("timm", "transformers", "onnxruntime", "openvino", "nncf")
    print(machine, flush=True)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        os.environ["VITRAL_CACHE"] = folder  # auto measures, instead of reading what it measured before
        for name in options.models:
            for row in measure_model(name, options.batches, options.engines, options.runs, options.turn_seconds):
                rows.append(row)
                print(as_lines(row), flush=True)
                if options.save:
                    save("engines", machine, rows, key=("model", "batch"))


def measure_model(
    name: str, batches: list[int], engines: list[str], runs: int, turn_seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield the ratios of a model, per batch size."""
    model = randomize(vitral.create(name, activation="gelu")).eval()
    assert isinstance(model, vitral.ViT)
    preprocess = Preprocess(size=model.config.image_hw)
    subject = Subject(model=model, preprocess=preprocess, device=torch.device("cpu"), multi_label=False)
    built = build_engines(subject, [engine for engine in engines if engine != "compiled"])
    networks = build_peers(model)
    for batch in batches:
        images = example_images(preprocess, batch)
        candidates = built | (build_engines(subject, ["compiled"], batch) if "compiled" in engines else {})
        chosen, reason = choose_auto(subject, images)
        turns = {title: bind(engine.logits, images) for title, engine in candidates.items()}
        turns |= {title: bind(compute, images) for title, compute in networks.items()}
        turns["auto"] = bind((chosen or subject.reference).logits, images)
        agreement = compare(turns, subject.reference.logits(images))
        once = fastest_turns(turns, rounds=1)
        rounds = max(1, min(80, round(turn_seconds / once["timm float32"])))
        times = [fastest_turns(turns, rounds, seed=run) for run in range(runs)]
        ratios = {turn: median(run["timm float32"] / run[turn] for run in times) for turn in turns}
        yield {
            "model": name,
            "batch": batch,
            "timm_milliseconds": min(run["timm float32"] for run in times) * 1e3,
            "ratios": ratios,
            "runs": {turn: [run["timm float32"] / run[turn] for run in times] for turn in turns},
            "agreement": agreement,
            "auto": describe_engine(chosen or subject.reference),
            "reason": reason,
            "rounds": rounds,
        }


def precisions(engine: str) -> list[str]:
    """Return float32, and bfloat16 if the CPU computes it."""
    native = choose_precision("cpu").value
    return [precision for precision in dict.fromkeys(("float32", native)) if precision in SUPPORTED[engine]]


def build_engines(subject: Subject, engines: list[str], batch: int = 1) -> dict[str, Engine]:
    built = {
        f"{engine} {precision}": build_engine(subject, engine, precision, batch=batch)
        for engine in engines
        for precision in precisions(engine)
    }
    return built | ({"openvino int8": quantized(subject)} if "openvino" in engines else {})


def choose_auto(subject: Subject, images: np.ndarray) -> tuple[Engine | None, str]:
    """Return the engine that auto chooses, or None for eager torch, and its reason."""
    seconds = time_per_image(subject.reference.logits, images, turns=1)
    chosen = choose_engine(subject, images, total=round(AUTO_SECONDS / seconds), gate=Gate())
    return chosen.engine, chosen.reason


def compare(turns: dict[str, Turn], expected: np.ndarray) -> dict[str, dict[str, float]]:
    """Return how far the outputs of all candidates are from float32 torch. Stop if those in float32 differ."""
    agreements: dict[str, dict[str, float]] = {}
    for title, turn in turns.items():
        outputs: np.ndarray = turn()
        agreement = compare_outputs(outputs, expected, kind="logits")
        agreements[title] = {"difference": agreement.difference, "top1": agreement.top1}
        if not ("16" in title or "int8" in title or title == "auto" or agreement.difference < 1e-3):
            raise SystemExit(f"{title} disagrees with torch: {agreement}")
    return agreements


def quantized(subject: Subject) -> Any:
    """Return int8, calibrated on waves and noise: good enough to be timed."""
    network = PixelModel(subject.model, subject.preprocess).eval()
    program = trace(network, torch.from_numpy(example_images(subject.preprocess, 3)))
    model = convert_program(program, subject.preprocess, ["logits"])
    return compile_model(run_nncf(import_nncf(), model, example_images(subject.preprocess, 16), ()), precision="int8")


def build_peers(model: vitral.ViT) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Return timm (twice, for A/A) and transformers, with our weights; timm also in bfloat16 if the CPU computes it."""
    networks = {
        "timm float32": in_timm(model),
        "timm float32 (A/A)": in_timm(model),
        "transformers float32": in_transformers(model),
    }
    if choose_precision("cpu").value == "bfloat16":
        networks["timm bfloat16"] = in_timm(model).bfloat16()
    return {
        title: run_peer(network.eval(), Preprocess(size=model.config.image_hw)) for title, network in networks.items()
    }


def run_peer(network: torch.nn.Module, preprocess: Preprocess) -> Callable[[np.ndarray], np.ndarray]:
    dtype = next(network.parameters()).dtype

    def run(images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return network(normalize(torch.from_numpy(images), preprocess).to(dtype)).float().numpy()

    return run


def bind(function: Callable[[np.ndarray], Any], images: np.ndarray) -> Turn:
    return lambda: function(images)


def as_lines(row: dict[str, Any]) -> str:
    head = f"{row['model']}, batch {row['batch']}: timm eager float32 takes {row['timm_milliseconds']:.1f} ms"
    ordered = sorted(row["ratios"].items(), key=lambda pair: -pair[1])
    lines = [
        f"  {title:24} {ratio:5.2f} x   difference {row['agreement'][title]['difference']:.1e}"
        for title, ratio in ordered
    ]
    return "\n".join([head, *lines, f"  auto: {row['auto']} ({row['reason']})"])


if __name__ == "__main__":
    main()
