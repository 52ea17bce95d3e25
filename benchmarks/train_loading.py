"""Time training steps with the loading of their images: batch after batch, and loaded ahead by threads.

    python -m benchmarks.train_loading --save              # about four minutes on 2 cores

Every candidate runs the same steps (forward and backward, in the precision of `vitral train`) on the same batches,
which are compared first. They take turns, a few steps each. The table has the speed relative to loading in the
training thread ("0"); "A/A" is that again.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import count
from random import Random
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import vitral
from benchmarks.loader import SETS, make_photos
from benchmarks.timing import describe_machine, save
from vitral.data.augment import Augment
from vitral.data.batches import Batch, BatchLoader, ImageDataset
from vitral.data.dataset import Item
from vitral.data.headers import Pixels
from vitral.devices import keep_freed_memory
from vitral.preprocess import Preprocess
from vitral.training.auto import training_precision

CASES = [("vit-ti16", "500 x 375", 16), ("vit-ti16", "2000 x 1500", 16), ("vit-pico4", "32 x 32, cached", 128)]
THREADS = {"0": 0, "A/A": 0, "1": 1, "2": 2}
STEPS = 3


class Memory:
    """An image in memory."""

    def __init__(self, content: bytes | Pixels):
        self.content = content

    def read(self) -> bytes | Pixels:
        return self.content


def make_items(size: str, number: int) -> list[Item]:
    if "cached" in size:
        pixels = np.random.default_rng(0).integers(0, 256, (number, 32, 32, 3), np.uint8)
        contents: list[Any] = list(pixels)
    else:
        name = next(name for name, (width, height) in SETS.items() if size == f"{width} x {height}")
        photos = make_photos(SETS[name], 24)
        contents = [photos[index % len(photos)] for index in range(number)]
    return [Item(key=str(index), label=index % 10, source=Memory(content)) for index, content in enumerate(contents)]


def make_loader(model: vitral.ViT, items: list[Item], batch: int, threads: int) -> BatchLoader:
    height, width = model.config.image_hw
    crop = Augment(crop="resized", flip=0.5) if height > 64 else Augment(crop="shift", flip=0.5, randaugment=1)
    images = ImageDataset(items, Preprocess(size=(height, width)), augment=crop)
    return BatchLoader(images=images, batch_size=batch, classes=10, shuffle=True, threads=threads)


def endless(loader: BatchLoader) -> Iterator[Batch]:
    return (batch for epoch in count() for batch in loader.epoch(epoch))


def make_turn(model: vitral.ViT, batches: Iterator[Batch]) -> Callable[[], float]:
    """Return a function that trains for a few steps and returns the seconds per step."""

    def turn() -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            batch = next(batches)
            assert isinstance(batch.images, Tensor)
            train(model, batch.images, batch.labels)
        return (time.perf_counter() - start) / STEPS

    return turn


def train(model: vitral.ViT, images: Tensor, labels: Tensor) -> None:
    precision, _ = training_precision("cpu", model.config)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
        logits = model(images.float() / 255)
    loss = nn.functional.cross_entropy(logits.float(), labels)
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None


def measure(name: str, size: str, batch: int, runs: int) -> dict[str, Any]:
    model = vitral.create(name, num_classes=10, image_size=32 if "cached" in size else 224)
    assert isinstance(model, vitral.ViT)
    items = make_items(size, 40 * batch)
    loaders = {title: make_loader(model, items, batch, threads) for title, threads in THREADS.items()}
    first = {title: next(iter(loader.epoch(0))) for title, loader in loaders.items()}
    for other in first.values():
        assert torch.equal(torch.as_tensor(other.images), torch.as_tensor(first["0"].images))
    turns = {title: make_turn(model, endless(loader)) for title, loader in loaders.items()}
    times: dict[str, list[float]] = {title: [] for title in turns}
    order, shuffle = list(turns), Random(0)
    for run in range(runs + 1):
        shuffle.shuffle(order)
        for title in order:
            seconds = turns[title]()
            if run:  # the first one fills the cache and the queue
                times[title].append(seconds)
    ratios = {
        title: median(plain / ours for plain, ours in zip(times["0"], seconds, strict=True))
        for title, seconds in times.items()
    }
    return {"model": name, "images": size, "batch": batch, "milliseconds": min(times["0"]) * 1e3, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    keep_freed_memory()
    shown = list(THREADS)[1:]
    print(f"| model | images | batch | ms per step | {' | '.join(shown)} |\n{'|---' * (len(shown) + 4)}|", flush=True)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        rows.append(measure(*case, options.runs))
        ratios = " | ".join(f"{rows[-1]['ratios'][title]:.2f} x" for title in shown)
        print(f"| {' | '.join(map(str, case))} | {rows[-1]['milliseconds']:.0f} | {ratios} |", flush=True)
    if options.save:
        save("train-loading", describe_machine("simplejpeg"), rows)


if __name__ == "__main__":
    main()
