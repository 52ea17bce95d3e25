"""Flip 5 % of the labels of a dataset on purpose and measure which of them are found.

    python -m benchmarks.label_errors DATA WEIGHTS [--images 5000] [--size 98] --save

DATA is any dataset with one label per image, of which the first images of the train split are used; WEIGHTS is any
checkpoint. A flipped label becomes any other class ("random") or the class that the probe confuses most with it
("similar"). Errors that the dataset had before count as false alarms. The rows of cleanlab use the same out-of-fold
probabilities. It is not a dependency of vitral: install it into an environment of your own.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import describe_machine, save
from vitral.data.dataset import DatasetIndex, Item
from vitral.data.sources import open_dataset
from vitral.evaluation.label_errors import find_label_errors
from vitral.evaluation.linear_probe import choose_folds, cross_validate
from vitral.evaluation.suspects import compute_features, load_for_features
from vitral.inference.loaded_model import LoadedModel
from vitral.inference.pipeline import ModelOutputs

FRACTION = 0.05
SEEDS = (0, 1, 2)
try:
    from cleanlab.filter import find_label_issues  # pyright: ignore[reportMissingImports]
except ImportError:
    find_label_issues = None


def flip_labels(labels: Tensor, similar: Tensor | None, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the labels with some flipped, and (N,) booleans: which of them. `similar` is a class for each class."""
    random = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(labels), generator=random)[: round(FRACTION * len(labels))]
    flipped = labels.clone()
    steps = torch.randint(1, classes, (len(chosen),), generator=random)
    flipped[chosen] = (labels[chosen] + steps) % classes if similar is None else similar[labels[chosen]]
    return flipped, torch.zeros_like(labels, dtype=torch.bool).index_fill_(0, chosen, True)


def most_similar_classes(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return (K,): the class that takes most of the probability of each class."""
    probe = cross_validate(features, labels, classes=classes, folds=choose_folds(labels)).fit()
    table = torch.zeros(classes, classes).index_add_(0, labels, probe.out_of_fold.softmax(1))
    return table.fill_diagonal_(0).argmax(1)


def choose_suspects(logits: Tensor, labels: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each method with (N,) booleans: the suspects."""
    nothing = torch.zeros_like(labels, dtype=torch.bool)
    found = torch.tensor([error.index for error in find_label_errors(logits, labels)], dtype=torch.long)
    yield "vitral", nothing.index_fill(0, found, True)
    yield "the probe predicts another class", logits.argmax(1) != labels
    if find_label_issues is not None:
        probabilities = logits.double().softmax(1).numpy()
        for method in ("prune_by_noise_rate", "confident_learning", "low_self_confidence"):
            issues = find_label_issues(labels.numpy(), probabilities, filter_by=method, n_jobs=1)
            yield f"cleanlab, {method}", torch.from_numpy(issues)


def measure(features: Tensor, labels: Tensor, classes: int, kind: str) -> list[dict[str, Any]]:
    """Return the precision and recall of each method, as means over the seeds."""
    similar = most_similar_classes(features, labels, classes) if kind == "similar" else None
    results: dict[str, list[tuple[float, float, float]]] = {}
    for seed in SEEDS:
        given, flipped = flip_labels(labels, similar, classes, seed)
        probe = cross_validate(features, given, classes=classes, folds=choose_folds(given, seed=seed)).fit()
        for method, suspects in choose_suspects(probe.out_of_fold, given):
            hits, count = int((suspects & flipped).sum()), int(suspects.sum())
            results.setdefault(method, []).append((hits / max(1, count), hits / int(flipped.sum()), count))
    rows = []
    for method, values in results.items():
        precision, recall, suspects = torch.tensor(values).mean(0).tolist()
        rows.append({"flips": kind, "method": method, "precision": precision, "recall": recall, "suspects": suspects})
    return rows


def load_features(
    data: DatasetIndex, weights: str, images: int | None, size: int | None, split: str = "train"
) -> tuple[Tensor, Tensor]:
    """Return the features and labels of the first images of a split."""
    items = data.splits[split][:images]
    features = collect_features(load_for_features(weights, image_size=size), items)
    return features.outputs, torch.tensor([items[index].label for index in features.indices.tolist()])


def collect_features(model: LoadedModel, items: Sequence[Item]) -> ModelOutputs:
    """Return the features of images, from the cache if they are there."""
    computing = compute_features(model, items, batch_size=64)
    while True:
        try:
            next(computing)
        except StopIteration as end:
            return end.value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("weights")
    parser.add_argument("--images", type=int)
    parser.add_argument("--size", type=int, default=98)
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    data = open_dataset(options.data)
    features, labels = load_features(data, options.weights, options.images, options.size)
    print(f"{data.name}: {len(labels):,} images, {len(data.classes)} classes, {describe_machine()['cpu']}")
    rows: list[dict[str, Any]] = []
    for kind in ("random", "similar"):
        for row in measure(features, labels, len(data.classes), kind):
            rows.append({"data": data.name, "images": len(labels), **row})
            print(
                f"| {kind} | {row['method']} | {row['precision']:.2f} | {row['recall']:.2f} | {row['suspects']:.0f} |"
            )
    if find_label_issues is None:
        print("cleanlab is not installed, so its rows are left out.")
    if options.save:
        save("label_errors", describe_machine(), rows, key=("data", "flips", "method"))


if __name__ == "__main__":
    main()
