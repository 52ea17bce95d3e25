"""CIFAR-10 from scratch in a fixed time on this machine: ours by its recipe, and timm's ViT with plain AdamW beside it.

    python -m benchmarks.cifar10 SHARDS --save      # about 25 minutes on 2 cores

SHARDS is CIFAR-10 as tar shards (train-*.tar, test-*.tar, classes.txt). Ours is ``recipes/cifar10-10min.toml``, whose
steps are fixed. timm's network at patch 4, width 96, depth 5 (its best of those that were tried) then gets the same
time, float32, AdamW, cosine, flip and shift, on the same machine.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.peers import mend_torchvision
from benchmarks.timing import describe_machine, save
from vitral.data.augment import Augment
from vitral.data.batches import BatchLoader, ImageDataset
from vitral.data.sources import open_dataset
from vitral.data.transforms import normalize
from vitral.preprocess import Preprocess
from vitral.training.config import read_toml, recipe_path, with_settings
from vitral.training.entry import start_run
from vitral.training.events import Finished, Stepped


def ours(data: str, seed: int) -> dict[str, Any]:
    config = with_settings(None, {"data": data, **read_toml(recipe_path("cifar10-10min")), "seed": seed}, "benchmark")
    with tempfile.TemporaryDirectory() as folder:
        for event in start_run(config, out=Path(folder) / "run"):
            if isinstance(event, Stepped) and event.step % 200 == 0:
                print(f"vitral step {event.step}/{event.steps} loss {event.loss:.3f}", flush=True)
            if isinstance(event, Finished):
                return {"who": "vitral", "seconds": event.train_seconds, "top1": event.test["top1"]}
    raise RuntimeError("the run did not finish")


def theirs(data: str, seconds: float, width: int, depth: int, seed: int) -> dict[str, Any]:
    mend_torchvision()
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(seed)
    dataset = open_dataset(data)
    preprocess = Preprocess(size=(32, 32))
    how = Augment(crop="shift", flip=0.5)
    loader = BatchLoader(
        pictures=ImageDataset(dataset.splits["train"], preprocess, how=how, seed=seed),
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
            part = min(1.0, (time.perf_counter() - start) / seconds)
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1.0, part * 20) * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * part)).item())
            assert isinstance(batch.images, torch.Tensor)
            nn.functional.cross_entropy(model(normalize(batch.images, preprocess)), batch.labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            images += len(batch.items)
            if time.perf_counter() - start > seconds:
                break
        epoch += 1
    right = 0
    held = BatchLoader(pictures=ImageDataset(dataset.splits["test"], preprocess), batch_size=250, classes=10)
    model.eval()
    with torch.inference_mode():
        for batch in held.epoch():
            assert isinstance(batch.images, torch.Tensor)
            right += (model(normalize(batch.images, preprocess)).argmax(1) == batch.labels).sum().item()
    return {"who": f"timm {width} x {depth}", "seconds": seconds, "top1": right / len(held.pictures), "images": images}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write a dated JSON into benchmarks/results")
    options = parser.parse_args()
    rows = [ours(options.data, options.seed)]
    rows.append(theirs(options.data, rows[0]["seconds"], 96, 5, options.seed))
    for row in rows:
        print(f"{row['who']}: {row['top1']:.2%} of the test pictures after {row['seconds']:.0f} s", flush=True)
    if options.save:
        save("cifar10", describe_machine("timm"), rows)


if __name__ == "__main__":
    main()
