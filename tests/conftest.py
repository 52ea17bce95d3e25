"""Build small networks for the tests, with random parameters so that no error hides behind a zero."""

import atexit
import os
import shutil
import tempfile
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.peers import randomize
from vitral import ViT, ViTConfig
from vitral.data import sources

SMALL: dict[str, Any] = dict(
    width=48, depth=2, heads=3, mlp_width=80, patch_size=4, image_size=16, num_classes=7, activation="gelu"
)


def small_config(**overrides: Any) -> ViTConfig:
    return ViTConfig(**{**SMALL, **overrides})


def small_model(**overrides: Any) -> ViT:
    model = randomize(ViT(small_config(**overrides))).eval()
    assert isinstance(model, ViT)
    return model


torch.set_num_threads(1)  # the tests run in parallel,
os.environ["OMP_NUM_THREADS"] = "1"  # and so do the commands that they run
os.environ["VITRAL_CACHE"] = tempfile.mkdtemp(prefix="vitral-tests-")  # never the user's cache
atexit.register(shutil.rmtree, os.environ["VITRAL_CACHE"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce builtin:digits to every tenth image, 40 and 10 of each class, for tests that do not need more."""
    digits = sources.open_builtin("digits")
    splits = {split: items[::10] for split, items in digits.splits.items()}
    monkeypatch.setattr(sources, "open_builtin", lambda name: replace(digits, splits=splits))
