"""Build small networks for the tests, with random parameters so that no error hides behind a zero."""

import atexit
import os
import shutil
import tempfile
from typing import Any

import pytest
import torch

from benchmarks.peers import randomize
from vitral import ViT, ViTConfig

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
