"""A small model trained on three colors, and its dataset."""

from pathlib import Path
from typing import Any

import pytest

import vitral
from tests.data.images import class_folders

TINY: dict[str, Any] = dict(
    model="vit-pico4",
    network=dict(width=48, depth=2, heads=3),
    image_size=16,
    batch_size=8,
    epochs=6,
    device="cpu",
    optim=dict(name="adamw", lr=3e-3),
    progress=False,
)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "photos"
    class_folders(folder, {"red": 24, "green": 24, "blue": 24}, size=(20, 16), split="train")
    return class_folders(folder, {"red": 7, "green": 7, "blue": 7}, size=(20, 16), split="test")


@pytest.fixture(scope="session")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    vitral.train(photos, out=folder, **TINY)
    return folder
