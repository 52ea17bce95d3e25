"""BiT as an object: narrow widths, and a new head."""

from pathlib import Path

import pytest
import torch

import vitral
from vitral import BiT, BiTConfig, ConfigError


@pytest.fixture
def model() -> BiT:
    return BiT(BiTConfig(stages=(1, 1, 1, 1), width_factor=0.5, num_classes=5, head_bias=-1.0)).eval()


@pytest.mark.parametrize("dialect", ["bit", "native"])
def test_narrow_bit_survives_saving(model: BiT, dialect: str, tmp_path: Path) -> None:
    torch.nn.init.normal_(model.head.weight)
    path = tmp_path / ("narrow.npz" if dialect == "bit" else "narrow.safetensors")
    vitral.save(model, path, dialect=dialect)
    loaded = vitral.load(path).model
    assert isinstance(loaded, BiT)
    assert loaded.config.width_factor == 0.5
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(loaded(images), model(images))


def test_reset_head(model: BiT) -> None:
    torch.nn.init.normal_(model.head.weight)
    features = model.features(torch.randn(2, 3, 64, 64))
    assert model.reset_head(3) is model
    assert model.config.num_classes == 3
    assert torch.equal(model.head(features.pooled), torch.full((2, 3), -1.0))


def test_reset_head_to_no_classes(model: BiT) -> None:
    model.reset_head(0)
    images = torch.randn(2, 3, 64, 64)
    assert (model.config.num_classes, model.config.head_bias) == (0, 0.0)
    assert torch.equal(model(images), model.features(images).pooled)
    with pytest.raises(ConfigError, match="num_classes must be an integer.*got -1"):
        model.reset_head(-1)
