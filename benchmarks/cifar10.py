"""Train on CIFAR-10 from scratch in equal time on this machine: vitral with its recipe, timm's ViT with AdamW.

    python -m benchmarks.cifar10 SHARDS --save      # about 25 minutes on 2 cores

SHARDS is CIFAR-10 as tar shards (train-*.tar, test-*.tar, classes.txt). vitral uses ``recipes/cifar10-10min.toml``,
which has a fixed number of steps. timm's network with patch 4, width 96 and depth 5 (the best of those tried) then gets
the same time, in float32 with AdamW, cosine schedule, flip and shift.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.peers import repair_torchvision
from benchmarks.timing import describe_machine, save
from vitral.data.augment import Augment
from vitral.data.batches import BatchLoader, ImageDataset
from vitral.data.sources import open_dataset
from vitral.data.transforms import normalize
from vitral.preprocess import Preprocess
from vitral.training.entry import train_events
from vitral.training.events import Finished, Stepped


def train_vitral(data: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        for event in train_events(data, out=Path(folder) / "run", recipe="cifar10-10min", seed=seed):
            if isinstance(event, Stepped) and event.step % 200 == 0:
                print(f"vitral step {event.step}/{event.steps} loss {event.loss:.3f}", flush=True)
            if isinstance(event, Finished):
                return {"who": "vitral", "seconds": event.train_seconds, "top1": event.test["top1"]}
    raise RuntimeError("The run did not finish.")


def train_timm(data: str, seconds: float, width: int, depth: int, seed: int) -> dict[str, Any]:
    repair_torchvision()
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(seed)
    dataset = open_dataset(data)
    preprocess = Preprocess(size=(32, 32))
    how = Augment(crop="shift", flip=0.5)
    loader = BatchLoader(
        images=ImageDataset(dataset.splits["train"], preprocess, augment=how, seed=seed),
        batch_size=128,
        classes=10,
        shuffle=True,
    )
    model = VisionTransformer(
        img_size=32, patch_size=4, embed_dim=width, depth=depth, num_heads=width // 32, num_classes=10
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    start = time.perf_counter()
    epoch = images = 0
    while time.perf_counter() - start < seconds:
        for batch in loader.epoch(epoch):
            progress = min(1.0, (time.perf_counter() - start) / seconds)
            for group in optimizer.param_groups:
                cosine = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * progress)).item())
                group["lr"] = 1e-3 * min(1.0, progress * 20) * cosine
            assert isinstance(batch.images, torch.Tensor)
            nn.functional.cross_entropy(model(normalize(batch.images, preprocess)), batch.labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            images += len(batch.items)
            if time.perf_counter() - start > seconds:
                break
        epoch += 1
    correct = 0
    test = BatchLoader(images=ImageDataset(dataset.splits["test"], preprocess), batch_size=250, classes=10)
    model.eval()
    with torch.inference_mode():
        for batch in test.epoch():
            assert isinstance(batch.images, torch.Tensor)
            correct += (model(normalize(batch.images, preprocess)).argmax(1) == batch.labels).sum().item()
    return {"who": f"timm {width} x {depth}", "seconds": seconds, "top1": correct / len(test.images), "images": images}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    rows = [train_vitral(options.data, options.seed)]
    rows.append(train_timm(options.data, rows[0]["seconds"], 96, 5, options.seed))
    for row in rows:
        print(f"{row['who']}: {row['top1']:.2%} test accuracy after {row['seconds']:.0f} s", flush=True)
    if options.save:
        save("cifar10", describe_machine("timm"), rows)


if __name__ == "__main__":
    main()
