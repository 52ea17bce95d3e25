"""A small trained model and its dataset, for the tests that only run the model."""

from pathlib import Path
from typing import Any

import pytest

import vitral
from tests.data.images import class_folders

TINY: dict[str, Any] = dict(
    model="vit-pico4",
    network=dict(width=48, depth=1, heads=3),
    image_size=16,
    batch_size=8,
    epochs=4,
    device="cpu",
    optim=dict(name="adamw", lr=3e-3),
)


@pytest.fixture(scope="package")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("data") / "photos", {"red": 30, "green": 30}, size=(16, 16))


@pytest.fixture(scope="package")
def model(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "run"
    vitral.train(photos, out=folder, progress=False, **TINY)
    return str(folder)
