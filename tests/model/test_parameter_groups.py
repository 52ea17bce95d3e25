"""Parameter groups decide weight decay and learning rate of every parameter."""

from typing import Any

import pytest
import torch

import vitral
from tests.conftest import small_model
from vitral import BiT, BiTConfig, ResNetStem, ViT

VARIANTS: list[dict[str, Any]] = [
    dict(registers=2, layer_scale=0.1, representation=9),
    dict(pool="map", position="learned-2d", position_at="every-layer"),
    dict(position="relative", attention="axial"),
    dict(stem=ResNetStem(stages=(1, 1)), patch_size=1, image_size=64),
]


def by_name(groups: list[dict[str, Any]], key: str) -> dict[str, float]:
    return {name: group[key] for group in groups for name in group["names"]}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_trainable_parameter_is_in_one_group(variant: dict[str, Any]) -> None:
    model = small_model(**variant)
    model.norm.requires_grad_(False)
    groups = model.parameter_groups(1e-3, 0.1, layer_decay=0.5)
    names = [name for group in groups for name in group["names"]]
    assert sorted(names) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    parameters = dict(model.named_parameters())
    for group in groups:
        assert all(parameters[name] is p for name, p in zip(group["names"], group["params"], strict=True))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_matrices_decay_and_nothing_else(variant: dict[str, Any]) -> None:
    model = small_model(**variant)
    decays = {name for name, decay in by_name(model.parameter_groups(1e-3, 0.1), "weight_decay").items() if decay}
    kernels = torch.nn.Linear | torch.nn.Conv2d
    expected = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kernels)}
    assert decays == expected


def test_learning_rate_falls_from_the_head_down() -> None:
    rates = by_name(small_model(depth=2, registers=1).parameter_groups(0.8, 0.1, layer_decay=0.5), "lr")
    assert {rates[name] for name in ("head.weight", "head.bias", "norm.weight")} == {0.8}
    assert {rate for name, rate in rates.items() if name.startswith("blocks.1.")} == {0.4}
    assert {rate for name, rate in rates.items() if name.startswith("blocks.0.")} == {0.2}
    first = ("patches.project.weight", "class_token", "registers", "positions.0.table")
    assert {rates[name] for name in first} == {0.1}


def test_without_layer_decay_all_rates_are_equal() -> None:
    groups = small_model().parameter_groups(0.1, 0.05)
    assert {group["lr"] for group in groups} == {0.1}
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.05]


def test_bit_has_a_layer_per_unit() -> None:
    model = BiT(BiTConfig(stages=(1, 1, 1, 1), width_factor=0.5, num_classes=3))
    groups = model.parameter_groups(1.0, 0.1, layer_decay=0.5)
    rates, decays = by_name(groups, "lr"), by_name(groups, "weight_decay")
    assert (rates["root.weight"], rates["blocks.0.conv1.weight"], rates["head.weight"]) == (1 / 32, 1 / 16, 1.0)
    assert decays["blocks.0.conv1.weight"] == decays["head.weight"] == 0.1
    assert decays["blocks.0.norm1.weight"] == decays["head.bias"] == 0.0


def test_optimizer_uses_the_groups() -> None:
    model = vitral.create("vit-pico7", num_classes=3)
    assert isinstance(model, ViT)
    optimizer = torch.optim.AdamW(model.parameter_groups(1e-3, 0.1, layer_decay=0.7))
    before = model.head.weight.detach().clone()
    model(torch.randn(2, 3, 28, 28))[:, 0].sum().backward()
    optimizer.step()
    assert not torch.equal(model.head.weight, before)
