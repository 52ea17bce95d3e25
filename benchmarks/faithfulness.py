"""Measure whether deleting the patches that rollout and relevance rank highest lowers the predicted probability.

    python benchmarks/faithfulness.py CIFAR10_SHARDS

Uses the shipped model on images of the CIFAR-10 test split, and writes benchmarks/results/faithfulness-DATE.json.
"""

import argparse
import json
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch

import vitral
from vitral.data.sources import open_dataset
from vitral.data.transforms import normalize, preprocess_image
from vitral.inspection import faithfulness, relevance, rollout

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the faithfulness of rollout and relevance.")
    parser.add_argument("data", help="CIFAR-10: a folder of class folders or of tar shards, with a test split")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--out", type=Path, default=RESULTS / f"faithfulness-{date.today()}.json")
    arguments = parser.parse_args()
    checkpoint = vitral.load("vit-cifar10")
    model = checkpoint.model.float().eval()
    items = open_dataset(arguments.data).splits["test"]
    items = items[:: max(1, len(items) // arguments.images)][: arguments.images]
    contents = [preprocess_image(item.source.read(), checkpoint.preprocess) for item in items]
    images = torch.stack([normalize(content, checkpoint.preprocess) for content in contents])
    results = {
        name: asdict(faithfulness(model, images, compute(model, images)))
        for name, compute in (("rollout", rollout), ("relevance", relevance))
    }
    for name, result in results.items():
        interval = f"{result['low']:+.4f} to {result['high']:+.4f}"
        print(f"{name}: {result['score']:+.4f}, 95% CI {interval}, {result['images']} images")
    content = {"model": "vit-cifar10", "data": "CIFAR-10 test split", "date": str(date.today()), **results}
    arguments.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
