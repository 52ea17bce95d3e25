"""Transfer pretrained weights to 500 images of CIFAR-10 (50 per class): nearest neighbors, few-shot regression, a
linear probe, and training of the head, of LoRA weights, or of everything from a head of zeros.

    python -m benchmarks.transfer SHARDS WEIGHTS --save      # about 12 minutes on 2 cores

SHARDS is CIFAR-10 as tar shards, WEIGHTS any checkpoint that vitral reads. Training uses the settings that
``vitral train --from`` chooses, but 300 steps. Every row is evaluated on the same 2,000 test images (200 per class).
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import vitral
from benchmarks.timing import describe_machine, save
from vitral.data.dataset import Item
from vitral.data.sources import open_dataset
from vitral.evaluation.metrics import wilson
from vitral.training.events import Finished

STEPS = 300
SHOTS = (1, 5, 10, 25, 50)
METHODS: dict[str, dict[str, Any]] = {
    "probe": {"tune.what": "probe"},
    "head": {"tune.what": "head", "tune.probe": False, "steps": STEPS},
    "LoRA": {"tune.what": "lora", "tune.probe": False, "steps": STEPS},
    "all": {"tune.what": "all", "tune.probe": False, "steps": STEPS},
}


def write_subset(shards: str, folder: Path, train: int, test: int) -> Path:
    """Write the first images of each class as class folders."""
    data = open_dataset(shards)
    for split, each in (("train", train), ("test", test)):
        written = dict.fromkeys(range(len(data.classes)), 0)
        for item in data.splits[split]:
            _write_image(item, folder / split, data.classes, written, each)
    return folder


def _write_image(item: Item, folder: Path, classes: tuple[str, ...], written: dict[int, int], limit: int) -> None:
    assert isinstance(item.label, int)
    if written[item.label] < limit:
        class_folder = folder / classes[item.label]
        class_folder.mkdir(parents=True, exist_ok=True)
        content = item.source.read()
        assert isinstance(content, bytes)
        (class_folder / f"{written[item.label]:04d}.png").write_bytes(content)
        written[item.label] += 1


def train_one(data: Path, weights: str, out: Path, size: int, **settings: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for event in vitral.train_events(data, from_=weights, out=out, image_size=size, **settings):
        if isinstance(event, Finished):
            result = {name: event.test[name] for name in ("top1", "top1_low", "top1_high")}
            result["seconds"] = event.train_seconds
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("weights")
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def add(method: str, result: dict[str, Any]) -> None:
        rows.append({"method": method, **result})
        interval = f"{result['top1_low']:.1%} to {result['top1_high']:.1%}"
        print(f"| {method} | {result['top1']:.1%} | {interval} | {result['seconds']:.0f} s |", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        data = write_subset(options.shards, Path(folder) / "cifar10-500", train=50, test=200)
        start = vitral.load(options.weights, image_size=options.size)
        features = vitral.evaluate(start, data, cache=False, knn=10, few_shot=SHOTS)
        assert features.images_per_second is not None
        assert features.knn is not None
        assert features.few_shot is not None
        scores = {"10 nearest neighbors": features.knn["top1"]}
        scores |= {f"few-shot, {result['shots']} per class": result["top1"] for result in features.few_shot["each"]}
        seconds = 2500 / features.images_per_second
        for method, top1 in scores.items():
            low, high = wilson(top1 * 2000, 2000)
            add(method, {"top1": top1, "top1_low": low, "top1_high": high, "seconds": seconds})
        for method in options.methods:
            add(method, train_one(data, options.weights, Path(folder) / method, options.size, **METHODS[method]))
    if options.save:
        save("transfer", describe_machine(), rows)


if __name__ == "__main__":
    main()
