"""Initial values have the distributions of the reference implementation."""

from math import sqrt

import pytest
import torch
from torch import Tensor

import vitral
from vitral import ViT


@pytest.fixture(scope="module")
def model() -> ViT:
    torch.manual_seed(1)
    return vitral.create("vit-s16", depth=1, representation=256, registers=4, layer_scale=1e-5, head_bias=-10.0)


def assert_uniform(weight: Tensor, bound: float) -> None:
    """Assert a uniform distribution in +-bound: its standard deviation is bound / sqrt(3)."""
    assert weight.abs().max() <= bound
    assert weight.abs().max() > 0.999 * bound
    assert weight.std().item() == pytest.approx(bound / sqrt(3), rel=0.01)
    assert weight.mean().item() == pytest.approx(0, abs=bound / 100)


def test_patch_kernel_is_lecun_normal(model: ViT) -> None:
    weight = model.patches.project.weight
    sigma = sqrt(1 / (16 * 16 * 3))
    assert weight.std().item() == pytest.approx(sigma, rel=0.01)
    assert weight.abs().max().item() <= 2 * sigma / 0.87962566 * 1.0001  # truncated at two uncorrected sigmas
    assert not model.patches.project.bias.any()


def test_tokens_and_positions(model: ViT) -> None:
    assert model.class_token is not None
    assert model.registers is not None
    assert not model.class_token.any()
    assert model.positions[0].table.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.registers.std().item() == pytest.approx(0.02, rel=0.1)


def test_each_attention_projection_is_xavier_uniform(model: ViT) -> None:
    attention = model.blocks[0].attention
    for projection in attention.to_qkv.weight.chunk(3):
        assert_uniform(projection, sqrt(3 / 384))
    assert_uniform(attention.to_out.weight, sqrt(3 / 384))
    assert not attention.to_qkv.bias.any()
    assert not attention.to_out.bias.any()


def test_mlp(model: ViT) -> None:
    mlp = model.blocks[0].mlp
    for layer in (mlp.expand, mlp.contract):
        assert_uniform(layer.weight, sqrt(6 / (384 + 1536)))
        assert layer.bias.std().item() == pytest.approx(1e-6, rel=0.15)


def test_norms_and_layer_scale(model: ViT) -> None:
    for norm in (model.norm, model.blocks[0].norm1, model.blocks[0].norm2):
        assert (norm.weight == 1).all()
        assert not norm.bias.any()
    assert (model.blocks[0].after_mlp.scale == 1e-5).all()


def test_representation_and_head(model: ViT) -> None:
    hidden = model.representation[0]
    assert hidden.weight.std().item() == pytest.approx(sqrt(1 / 384), rel=0.01)
    assert not hidden.bias.any()
    assert not model.head.weight.any()
    assert (model.head.bias == -10).all()


def test_attention_pooling() -> None:
    pool = vitral.create("vit-s16", depth=1, pool="map").pool
    bound = sqrt(6 / (1 + 384))
    assert pool.probe.abs().max() <= bound
    assert pool.probe.std().item() == pytest.approx(bound / sqrt(3), rel=0.1)
    for projection in (pool.to_q.weight, *pool.to_kv.weight.chunk(2), pool.to_out.weight):
        assert_uniform(projection, sqrt(3 / 384))


def test_other_position_tables() -> None:
    model = vitral.create("vit-s16", depth=1, position="learned-2d", image_size=512)
    for table in model.positions[0].parameters():
        assert table.std().item() == pytest.approx(0.02, rel=0.1)
    relative = vitral.create("vit-s16", depth=1, position="relative").blocks[0].attention.relative
    for table in relative.parameters():
        assert table.std().item() == pytest.approx(0.02, rel=0.1)


def test_conv_stem() -> None:
    stem = vitral.create("vit-s16", depth=1, stem=vitral.ConvStem(), patch_size=1).patches.stem
    assert stem[2][0].weight.std().item() == pytest.approx(sqrt(1 / (9 * 96)), rel=0.02)


def test_resnet_stem() -> None:
    stem = vitral.create("R50+ViT-B/16", depth=1).patches.stem
    assert stem.root.weight.std().item() == pytest.approx(sqrt(1 / (7 * 7 * 3)), rel=0.02)
    for stage in stem.stages:
        for unit in stage:
            assert not unit.norm3.weight.any()  # the last norm of a unit starts at zero
            assert (unit.norm1.weight == 1).all()
            assert unit.conv2.weight.std().item() == pytest.approx(unit.conv2.weight[0].numel() ** -0.5, rel=0.02)


def test_reset_parameters_initializes_a_meta_model() -> None:
    """Sharded training builds on the meta device, allocates, then initializes module by module."""
    fields = dict(registers=1, pool="map", class_token=True, position="relative", layer_scale=0.1)
    with torch.device("meta"):
        model = vitral.create("vit-pico7", **fields, patch_size=1, stem=vitral.ResNetStem(stages=(1,)))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert not model.head.weight.any()
