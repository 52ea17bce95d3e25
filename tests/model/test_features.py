"""Features name the tokens of a batch, of a list and of layers."""

from typing import Any

import pytest
import torch

from tests.conftest import small_model
from vitral import ConfigError


def test_tokens_of_a_batch() -> None:
    model = small_model(registers=2, position="sincos-2d")
    images = torch.randn(2, 3, 8, 12)
    features = model.features(images)
    assert features.cls.shape == (2, 48)
    assert features.registers.shape == (2, 2, 48)
    assert features.patches.shape == (2, 6, 48)
    assert features.grid == (2, 3)
    assert features.maps.shape == (2, 48, 2, 3)
    assert torch.equal(features.maps[:, :, 1, 2], features.patches[:, 5])
    assert torch.equal(features.pooled, features.cls)
    assert torch.equal(model.head(features.pooled), model(images))


@pytest.mark.parametrize("pool", ["mean", "map", "none"])
def test_pooled_is_the_input_of_the_head(pool: Any) -> None:
    model = small_model(pool=pool, norm_after_pool=pool == "mean", representation=9)
    images = torch.randn(2, 3, 16, 16)
    features = model.features(images)
    assert features.cls is None
    assert torch.equal(model.head(model.representation(features.pooled)), model(images))


def test_intermediate_layers() -> None:
    model = small_model(depth=3)
    features = model.features(torch.randn(2, 3, 16, 16), layers=[0, -1])
    assert list(features.layers) == [0, 2]
    last = features.layers[-1]
    assert last is features.layers[2]
    assert torch.equal(model.norm(last.patches), features.patches)
    assert not torch.equal(features.layers[0].patches, last.patches)


def test_a_list_of_images_gives_a_list_of_features() -> None:
    model = small_model(registers=1)
    images = [torch.randn(3, 16, 16), torch.randn(3, 8, 12), torch.randn(3, 16, 16)]
    for image, packed in zip(images, model.features(images, layers=[0]), strict=True):
        alone = model.features(image[None], layers=[0])
        assert packed.grid == alone.grid
        for name in ("cls", "registers", "patches", "pooled"):
            torch.testing.assert_close(getattr(packed, name), getattr(alone, name), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed.layers[0].patches, alone.layers[0].patches, atol=1e-5, rtol=1e-5)


def test_repr_shows_shapes() -> None:
    model = small_model()
    features = model.features(torch.randn(2, 3, 16, 16), layers=0)
    assert repr(features).startswith("Features(cls=(2, 48), registers=(2, 0, 48), patches=(2, 16, 48), grid=(4, 4),")
    assert "layers=ByLayer({0: Tokens(cls=(2, 48)" in repr(features)


def test_unknown_layer() -> None:
    with pytest.raises(ConfigError, match="no layer 2 .*0 to 1"):
        small_model().features(torch.randn(1, 3, 16, 16), layers=[2])


def test_model_without_head_returns_pooled_features() -> None:
    model = small_model(num_classes=0)
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(model(images), model.features(images).pooled)
