"""Measure which copies of photos are found as near-duplicates, and how many pairs of different photos are.

    python -m benchmarks.near_duplicates DATA WEIGHTS [--images 5000] [--size 98] --save

Every 20th training image is copied in five ways. DATA is any dataset, WEIGHTS any checkpoint. The pairs among the
images themselves may be true near-duplicates; look at them with `vitral data DATA --from WEIGHTS`.
"""

import argparse
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance
from torch import Tensor

from benchmarks.label_errors import collect_features, load_features
from benchmarks.timing import describe_machine, save
from vitral.data.dataset import Item
from vitral.data.sources import open_dataset
from vitral.evaluation.near_duplicates import find_near_duplicates
from vitral.evaluation.suspects import load_for_features

EVERY = 20


def crop(image: Image.Image, border: float) -> Image.Image:
    width, height = image.size
    return image.crop(
        (int(border * width), int(border * height), int(width - border * width), int(height - border * height))
    )


COPIES: dict[str, tuple[Callable[[Image.Image], Image.Image], int]] = {
    "JPEG quality 50": (lambda image: image, 50),
    "half the size": (lambda image: image.resize((image.width // 2, image.height // 2)), 90),
    "5 % cropped from each side": (lambda image: crop(image, 0.05), 90),
    "10 % cropped from each side": (lambda image: crop(image, 0.1), 90),
    "20 % brighter": (lambda image: ImageEnhance.Brightness(image).enhance(1.2), 90),
}


@dataclass(frozen=True, slots=True)
class CopySource:
    """A changed copy of an image."""

    original: Item
    name: str

    def read(self) -> bytes:
        content = self.original.source.read()
        assert isinstance(content, bytes)
        change, quality = COPIES[self.name]
        stream = io.BytesIO()
        change(Image.open(io.BytesIO(content)).convert("RGB")).save(stream, "JPEG", quality=quality)
        return stream.getvalue()


def count_found(features: Tensor, copies: Tensor) -> int:
    """Return how many copies are found when each set of copies is added to the images."""
    pairs = {(pair.first, pair.second) for pair in find_near_duplicates(torch.cat([features, copies]))}
    return sum((EVERY * index, len(features) + index) in pairs for index in range(len(copies)))


def count_found_by_cosine(features: Tensor, copies: Tensor, different_pairs: int) -> int:
    """Return how many copies the plain cosine finds at the threshold with as many pairs among the images."""
    directions = F.normalize(features, dim=1)
    similarity = (directions @ directions.T).triu(1).flatten()
    threshold = similarity.topk(different_pairs + 1).values[-1]
    return int(((F.normalize(copies, dim=1) * directions[::EVERY]).sum(1) > threshold).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("weights")
    parser.add_argument("--images", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    data = open_dataset(options.data)
    features, _ = load_features(data, options.weights, options.images, options.size)
    originals = data.splits["train"][: options.images][::EVERY]
    assert len(originals) == len(features[::EVERY]), "every image must be readable"
    different = len(find_near_duplicates(features))
    model = load_for_features(options.weights, image_size=options.size)
    print(f"{data.name}: {len(features):,} images, {different} pairs among them, {describe_machine()['cpu']}")
    rows: list[dict[str, Any]] = []
    for name in COPIES:
        items = [replace(item, source=CopySource(item, name)) for item in originals]
        copies = collect_features(model, items).outputs
        found, by_cosine = count_found(features, copies), count_found_by_cosine(features, copies, different)
        rows.append({"data": data.name, "weights": Path(options.weights).stem, "copy": name, "copies": len(copies)})
        rows[-1] |= {"found": found, "by_cosine": by_cosine, "different_pairs": different}
        print(f"| {name} | {found / len(copies):.0%} | {by_cosine / len(copies):.0%} |", flush=True)
    if options.save:
        save("near_duplicates", describe_machine(), rows, key=("data", "weights", "copy"))


if __name__ == "__main__":
    main()
