"""Fine-tune a checkpoint on small datasets within a time budget: vitral's default against its own ways alone, logistic
regression on frozen features, and the usual fine-tuning script.

    python -m benchmarks.small_data WEIGHTS --flowers FOLDER --cifar10 SHARDS --out DIR --minutes 1 3 --seeds 0 1 2

DIR collects a JSON file per cell, and a finished cell is not repeated, so the command can be stopped and started again.
It prints a table of everything that is there. Each seed draws other training images: of flowers four fifths, of
CIFAR-10 500 or 5,000. All ways see the same images and the same test images (all of flowers, 2,000 of CIFAR-10).
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegressionCV

import vitral
from benchmarks.timing import describe_machine
from vitral.data import Augment, loader
from vitral.data.dataset import Item
from vitral.data.sources import open_dataset
from vitral.data.splits import sample_items
from vitral.evaluation.metrics import wilson
from vitral.inference.loaded_model import LoadedModel, load_model
from vitral.inference.pipeline import ModelOutputs, make_loader, run_model

TUNED = ("probe", "head", "last-blocks", "lora", "all")
WAYS = ("vitral", "scikit-learn", "script", *TUNED)
DATASETS = {"flowers": 816, "cifar10-500": 500, "cifar10-5000": 5000}
"""Training images per dataset."""
TEST_IMAGES = 2000
SCRIPT_LR, SCRIPT_BATCH, SCRIPT_SIZE = 5e-5, 8, 224
"""As in the image-classification example of transformers."""


def write_subset(source: str, folder: Path, images: int, seed: int) -> Path:
    """Write a seeded sample of the training images, an equal share of each class, and the test images."""
    if (folder / "complete").is_file():
        return folder / "data"
    data = open_dataset(source)
    random = torch.Generator().manual_seed(seed)
    shuffled = [data.splits["train"][int(i)] for i in torch.randperm(len(data.splits["train"]), generator=random)]
    per_class, counts = math.ceil(images / len(data.classes)), dict.fromkeys(range(len(data.classes)), 0)
    for item in shuffled:
        assert isinstance(item.label, int)
        if counts[item.label] < per_class and sum(counts.values()) < images:
            counts[item.label] += 1
            _write_image(item, folder / "data" / "train", data.classes)
    for item in sample_items(data.splits["test"], TEST_IMAGES):
        _write_image(item, folder / "data" / "test", data.classes)
    (folder / "complete").touch()
    return folder / "data"


def _write_image(item: Item, folder: Path, classes: tuple[str, ...]) -> None:
    content = item.source.read()
    assert isinstance(item.label, int)
    assert isinstance(content, bytes)
    target = folder / classes[item.label] / item.key.replace("/", "-")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_suffix(target.suffix or ".png").write_bytes(content)


# ---- ways ----


def run_vitral(way: str, data: Path, weights: str, out: Path, minutes: float) -> dict[str, Any]:
    tune: dict[str, Any] = {} if way == "vitral" else {"tune": way}
    run = vitral.train(data, from_=weights, minutes=minutes, out=out, progress=False, **tune)
    scores = run.test
    return {"top1": scores.top1, "images": scores.images, "candidates": run.read_report()["candidates"]}


def run_scikit_learn(data: Path, weights: str) -> dict[str, Any]:
    """Fit LogisticRegressionCV to class tokens at 224 pixels: the ten lines that people write."""
    model, dataset = load_model(weights, image_size=(224, 224)), open_dataset(data)
    train, test = (features_of(model, dataset.splits[split]) for split in ("train", "test"))
    probe = LogisticRegressionCV(Cs=9, cv=3, max_iter=300, n_jobs=2).fit(train.outputs.numpy(), train.labels.numpy())
    top1 = float((probe.predict(test.outputs.numpy()) == test.labels.numpy()).mean())
    return {"top1": top1, "images": len(test.labels)}


def features_of(model: LoadedModel, items: Sequence[Item]) -> ModelOutputs:
    running = run_model(make_loader(model, items), model.features)
    while True:
        try:
            next(running)
        except StopIteration as end:
            return end.value


def run_script(data: Path, weights: str, minutes: float) -> dict[str, Any]:
    """Fine-tune all weights from a head of zeros with AdamW at 5e-5, linear decay, until the time is over."""
    dataset, start = open_dataset(data), time.perf_counter()
    checkpoint = vitral.load(weights, image_size=SCRIPT_SIZE, num_classes=len(dataset.classes))
    model = checkpoint.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=SCRIPT_LR, weight_decay=0.0)
    options: dict[str, Any] = dict(preprocess=checkpoint.preprocess, batch_size=SCRIPT_BATCH)
    batches = (
        batch
        for epoch in itertools.count()
        for batch in loader(data, "train", augment=Augment(flip=0.5), seed=epoch, **options)
    )
    end = start + 0.8 * 60 * minutes  # the test takes the rest
    for images, labels in batches:
        left = (end - time.perf_counter()) / (end - start)
        if left <= 0:
            break
        optimizer.param_groups[0]["lr"] = SCRIPT_LR * left
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    model.eval()
    hits: list[bool] = []
    with torch.inference_mode():
        for images, labels in loader(data, "test", **options):
            hits += (model(images).argmax(1) == labels).tolist()
    return {"top1": mean(hits), "images": len(hits)}


# ---- table ----


def print_table(folder: Path) -> None:
    """Print the mean accuracy of each way over the seeds, with the interval of all its test images together."""
    cells = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    print("| data | minutes | " + " | ".join(WAYS) + " |\n|---|---|" + "---|" * len(WAYS))
    for data, minutes in sorted({(cell["data"], cell["minutes"]) for cell in cells}):
        row = []
        for way in WAYS:
            same = [c for c in cells if (c["data"], c["minutes"], c["way"]) == (data, minutes, way)]
            if not same:
                row.append("")
                continue
            images = sum(cell["images"] for cell in same)
            low, high = wilson(sum(cell["top1"] * cell["images"] for cell in same), images)
            seconds = mean(cell["seconds"] for cell in same)
            row.append(f"{mean(c['top1'] for c in same):.1%} ({low:.1%} to {high:.1%}), {seconds:.0f} s, {len(same)}x")
        print(f"| {data} | {minutes:g} | " + " | ".join(row) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("--flowers")
    parser.add_argument("--cifar10")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, nargs="+", default=[1, 3, 10])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=list(DATASETS))
    options = parser.parse_args()
    sources = {name: options.flowers if name == "flowers" else options.cifar10 for name in options.datasets}
    for seed, name, minutes, way in itertools.product(options.seeds, sources, options.minutes, options.ways):
        cell = options.out / f"{name}-{minutes:g}-{way}-{seed}.json"
        if sources[name] is None or cell.is_file():
            continue
        data = write_subset(sources[name], options.out / f"{name}-{seed}", DATASETS[name], seed)
        start = time.perf_counter()
        if way == "scikit-learn":
            result = run_scikit_learn(data, options.weights)
        elif way == "script":
            result = run_script(data, options.weights, minutes)
        else:
            out = options.out / "runs" / f"{cell.stem}-{time.time_ns()}"
            result = run_vitral(way, data, options.weights, out, minutes)
        result |= {"data": name, "minutes": minutes, "way": way, "seed": seed, "machine": describe_machine()}
        cell.write_text(json.dumps(result | {"seconds": time.perf_counter() - start}, indent=2))
        print(f"{cell.stem}: {result['top1']:.1%}", flush=True)
    print_table(options.out)


if __name__ == "__main__":
    main()
