"""Measure token merging: speed against accuracy, without any training.

    python -m benchmarks.merging --model vit-cifar10 --data cifar10/ --save
    python -m benchmarks.merging --model S14.safetensors --data flowers/ --merge 0 4 8 12 16 --batch 8 --save

A model with a head is scored on the test split. Features of a model without one are scored by a ridge regression that
is fitted to training features without merging, as a probe that was trained before. All forward passes take turns; the
speed is relative to the fastest turn without merging. "agreement" is the share of images with the label of merge 0.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import describe_machine, fastest_turns, save
from vitral.data.sources import open_dataset
from vitral.evaluation.frozen_features import fit_ridge, one_hot_targets, whiten
from vitral.evaluation.metrics import wilson
from vitral.inference.loaded_model import LoadedModel, load_model
from vitral.inference.pipeline import make_loader, run_model
from vitral.model.config import ViTConfig
from vitral.model.cost import count_cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="a dataset with a test split, and a train split for a probe")
    parser.add_argument("--merge", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--images", type=int, default=10_000, help="images of each split, spread over it")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    counts = [0, *(count for count in options.merge if count)]
    models = {count: load_model(options.model, merge=count) for count in counts}
    images = torch.randint(256, (options.batch, 3, *models[0].model.config.image_hw), dtype=torch.uint8)
    times = fastest_turns({str(count): bind(models[count], images) for count in counts}, options.rounds)
    classify = fit_classifier(models[0], options.data, options.images)
    rows: list[dict[str, Any]] = []
    plain: Tensor | None = None
    operations = count_cost(models[0].model.config).forward_flops
    print("| merge | tokens left | operations | speed | top-1 | agreement |\n|---|---|---|---|---|---|")
    for count, model in models.items():
        logits, labels = run_split(model, options.data, "test", options.images)
        predicted = classify(logits).argmax(1)
        plain = predicted if plain is None else plain
        correct = int((predicted == labels).sum())
        low, high = wilson(correct, len(labels))
        rows.append(
            {
                "model": options.model,
                "batch": options.batch,
                "merge": count,
                "tokens_left": tokens_left(model),
                "operations": count_cost(model.model.config).forward_flops / operations,
                "speed": times["0"] / times[str(count)],
                "top1": correct / len(labels),
                "interval": [low, high],
                "agreement": (predicted == plain).double().mean().item(),
                "images": len(labels),
            }
        )
        print(as_line(rows[-1]), flush=True)
    if options.save:
        save("merging", describe_machine(), rows, key=("model", "batch", "merge"))


def bind(model: LoadedModel, images: Tensor) -> Callable[[], Tensor]:
    return lambda: model.features(images)


def tokens_left(model: LoadedModel) -> int:
    """Return the tokens after the last block."""
    config = model.model.config
    assert isinstance(config, ViTConfig)
    rows, columns = config.grid(*config.image_hw)
    patches = rows * columns
    for _ in range(config.blocks):
        patches -= min(config.merge, patches // 2)
    return config.extra_tokens + patches


def fit_classifier(model: LoadedModel, data: str, images: int) -> Callable[[Tensor], Tensor]:
    """Return what makes logits of the outputs of `run_split`: nothing to do, or a probe of features without merging."""
    if model.model.config.num_classes:
        return lambda logits: logits
    train, labels = run_split(model, data, "train", images)
    weights = fit_ridge(whiten(train, train), one_hot_targets(labels, int(labels.max()) + 1))
    return lambda features: whiten(features, train) @ weights


def run_split(model: LoadedModel, data: str, split: str, images: int) -> tuple[Tensor, Tensor]:
    """Return logits, or features of a model without a head, and labels."""
    items = open_dataset(data).splits[split]
    items = items[:: max(1, len(items) // images)][:images]
    compute = model.logits if model.model.config.num_classes else model.features
    run = run_model(make_loader(model, items, batch_size=64), compute)
    while True:
        try:
            next(run)
        except StopIteration as finished:
            return finished.value.outputs, finished.value.labels


def as_line(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return (
        f"| {row['merge']} | {row['tokens_left']} | {row['operations']:.0%} | {row['speed']:.2f} x | "
        f"{row['top1']:.2%} ({low:.1%} to {high:.1%}) | {row['agreement']:.1%} |"
    )


if __name__ == "__main__":
    main()
