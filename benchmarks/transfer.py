"""Transfer of really pretrained weights to few pictures: nearest neighbours, few-shot regression, and training of the
head, by LoRA, and of everything, on 500 pictures of CIFAR-10 (50 a class).

    python -m benchmarks.transfer SHARDS WEIGHTS --save      # about 12 minutes on 2 cores

SHARDS is CIFAR-10 as tar shards, WEIGHTS any checkpoint that vitral reads. Training takes what ``vitral train --from``
decides, but 300 steps. Every row is measured on the same 2,000 test
pictures (200 a class), which nothing else has seen.
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
from vitral.training.events import Baseline, Finished

STEPS = 300
SHOTS = (1, 5, 10, 25, 50)
WAYS: dict[str, dict[str, Any]] = {
    "head": {"tune.what": "head"},
    "LoRA": {"tune.what": "lora"},
    "all": {"tune.what": "all"},
}


def write_part(shards: str, folder: Path, train: int, test: int) -> Path:
    """The first few pictures of each class, as class folders."""
    data = open_dataset(shards)
    for split, each in (("train", train), ("test", test)):
        taken = dict.fromkeys(range(len(data.classes)), 0)
        for item in data.splits[split]:
            _take(item, folder / split, data.classes, taken, each)
    return folder


def _take(item: Item, folder: Path, classes: tuple[str, ...], taken: dict[int, int], most: int) -> None:
    assert isinstance(item.label, int)
    if taken[item.label] < most:
        place = folder / classes[item.label]
        place.mkdir(parents=True, exist_ok=True)
        content = item.source.read()
        assert isinstance(content, bytes)
        (place / f"{taken[item.label]:04d}.png").write_bytes(content)
        taken[item.label] += 1


def train_one(data: Path, weights: str, out: Path, size: int, **settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    given = {"from_weights": weights, "image_size": size, "steps": STEPS, **settings}
    for event in vitral.train_events(data, out=out, **given):  # type: ignore[operator]
        if isinstance(event, Baseline):
            print(f"before training: kNN {event.knn:.1%}, few-shot {event.few_shot:.1%} of the validation", flush=True)
        if isinstance(event, Finished):
            held = event.test
            found = {name: held[name] for name in ("top1", "top1_low", "top1_high")}
            found["seconds"] = event.train_seconds
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("weights")
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--save", action="store_true", help="write a dated JSON into benchmarks/results")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def add(way: str, found: dict[str, Any]) -> None:
        rows.append({"way": way, **found})
        interval = f"{found['top1_low']:.1%} to {found['top1_high']:.1%}"
        print(f"| {way} | {found['top1']:.1%} | {interval} | {found['seconds']:.0f} s |", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        data = write_part(options.shards, Path(folder) / "cifar10-500", train=50, test=200)
        start = vitral.load(options.weights, image_size=options.size)
        found = vitral.evaluate(start, data, cache=False, knn=10, few_shot=SHOTS)
        assert found.images_per_second is not None
        assert found.knn is not None
        assert found.few_shot is not None
        scores = {"10 nearest neighbours": found.knn["top1"]}
        scores |= {f"few-shot, {one['shots']} a class": one["top1"] for one in found.few_shot["each"]}
        for way, top1 in scores.items():
            low, high = wilson(top1 * 2000, 2000)
            add(way, {"top1": top1, "top1_low": low, "top1_high": high, "seconds": 2500 / found.images_per_second})
        for way in options.ways:
            add(way, train_one(data, options.weights, Path(folder) / way, options.size, **WAYS[way]))
    if options.save:
        save("transfer", describe_machine(), rows)


if __name__ == "__main__":
    main()
