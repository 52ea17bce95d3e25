"""Costs computed from the config equal those of the built network."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import small_config
from vitral import ConvStem, ResNetStem
from vitral.model.cost import count_cost
from vitral.model.network import Config, build
from vitral.model.sizes import NAMES, named_config

VARIANTS: list[dict[str, Any]] = [
    *(dict(pool=pool, registers=2) for pool in ("token", "mean", "map", "none")),
    *(dict(position=position) for position in ("none", "learned-2d", "relative", "sincos-2d")),
    dict(position_at="every-layer", layer_scale=0.1, representation=11),
    dict(attention="axial", registers=3),
    dict(attention="axial", position="relative", image_size=(8, 24)),
    dict(stem=ConvStem(widths=(8, 16), norm="batch"), patch_size=1, image_size=(20, 33)),
    dict(stem=ResNetStem(stages=(1, 2), width_factor=2), patch_size=1, image_size=(57, 70)),
    dict(stem=ResNetStem(stages=(1, 1), width_factor=0.5), patch_size=1, image_size=64),
    dict(num_classes=0, channels=5),
    dict(position="relative", position_grid=(3, 5)),
    dict(merge=3, registers=2, depth=5),
    dict(merge=100, pool="mean", image_size=(12, 20)),
]


def check_against_network(config: Config) -> Tensor:
    """Compare the counts with those of the network, and return its logits."""
    with torch.device("meta"):
        model = build(config).eval()
        images = torch.empty(1, config.channels, *config.image_hw)
    cost = count_cost(config)
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        logits = model(images)
    assert cost.forward_flops == counter.get_total_flops()
    return logits


@pytest.mark.parametrize("name", NAMES)
def test_named_models(name: str) -> None:
    assert check_against_network(named_config(name)).shape == (1, 1000)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_variants(variant: dict[str, Any]) -> None:
    check_against_network(small_config(**variant))


def test_another_size() -> None:
    config = named_config("vit-s16")
    assert count_cost(config, (384, 384)) == count_cost(named_config("vit-s16", image_size=384, position_grid=(14, 14)))


def test_another_size_on_the_meta_device() -> None:
    config = small_config()
    with torch.device("meta"):
        model, images = build(config), torch.empty(1, 3, 24, 32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    resampling = counter.get_total_flops() - count_cost(config, (24, 32)).forward_flops
    assert 0 <= resampling < 0.02 * counter.get_total_flops()


def measure_kept_for_backward(config: Config, batch: int) -> int:
    """Return the bytes of all distinct storages that autograd saves, except parameters."""
    model = build(config)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(torch.randn(batch, config.channels, *config.image_hw))
    return sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in parameters)


@pytest.mark.parametrize(
    ("name", "fields", "tolerance"),
    [
        ("vit-s16", dict(image_size=112), 0.02),
        ("vit-nano4", dict(layer_scale=0.1), 0.02),
        ("vit-s16", dict(stem=ConvStem(), patch_size=1, image_size=112), 0.05),
        ("r26-vit-s32", dict(image_size=96), 0.05),
        ("r-vit-ti16", dict(image_size=128), 0.05),
        ("bit-r26x1", dict(image_size=96), 0.02),
    ],
)
def test_memory_for_the_backward_pass(name: str, fields: dict[str, Any], tolerance: float) -> None:
    config = named_config(name, **fields)
    measured = measure_kept_for_backward(config, batch=2) - measure_kept_for_backward(config, batch=1)
    assert count_cost(config).activation_bytes == pytest.approx(measured, rel=tolerance)
