"""The same parameters, copied into the networks of other libraries, give the same logits."""

import itertools
from typing import Any

import pytest
import torch

from benchmarks.peers import in_naflex, in_timm, in_torchvision, in_transformers, naflex_input, repair_torchvision
from tests.conftest import small_model
from vitral.weights.dialects import timm

TIMM: list[dict[str, Any]] = [
    dict(),
    dict(pool="mean"),
    dict(pool="mean", class_token=True),
    dict(pool="mean", class_token=True, norm_after_pool=True),
    dict(pool="map"),
    dict(registers=3),
    dict(layer_scale=0.1),
    dict(activation="gelu-tanh"),
    dict(patch_size=(4, 2), image_size=(16, 12), channels=5),
    dict(width=64, heads=4, mlp_width=256, depth=4),
]


@torch.no_grad()
@pytest.mark.parametrize("variant", TIMM, ids=str)
def test_timm(variant: dict[str, Any]) -> None:
    model = small_model(**variant)
    images = torch.randn(3, model.config.channels, *model.config.image_hw)
    torch.testing.assert_close(model(images), in_timm(model).eval()(images), atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("size", [(24, 24), (8, 20), (40, 12)])
def test_timm_at_another_size(size: tuple[int, int]) -> None:
    model = small_model(position_resample="bicubic-antialias")
    images = torch.randn(2, 3, *size)
    torch.testing.assert_close(model(images), in_timm(model).eval()(images), atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("activation", ["gelu", "gelu-tanh", "relu"])
def test_transformers(activation: Any) -> None:
    model = small_model(activation=activation, norm_eps=1e-12)
    images = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(model(images), in_transformers(model).eval()(images), atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("size", [(24, 24), (8, 20)])
def test_transformers_at_another_size(size: tuple[int, int]) -> None:
    model = small_model(position_resample="bicubic")
    images = torch.randn(2, 3, *size)
    theirs = in_transformers(model).eval()(images, interpolate_pos_encoding=True)
    torch.testing.assert_close(model(images), theirs, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("representation", [None, 20])
def test_torchvision(representation: int | None) -> None:
    model = small_model(representation=representation)
    images = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(model(images), in_torchvision(model).eval()(images), atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("size", [24, 12])
def test_torchvision_at_another_size(size: int) -> None:
    repair_torchvision()
    from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

    model = small_model(position_resample="bicubic-corners")
    state = interpolate_embeddings(size, 4, in_torchvision(model).state_dict())
    fields = dict(patch_size=4, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=80, num_classes=7)
    peer = VisionTransformer(image_size=size, **fields).eval()
    peer.load_state_dict(state)
    images = torch.randn(2, 3, size, size)
    torch.testing.assert_close(model(images), peer(images), atol=1e-5, rtol=0)


def test_gradients_equal_timms() -> None:
    model = small_model()
    peer = in_timm(model)
    images = torch.randn(3, 3, 16, 16)
    model(images).square().sum().backward()
    peer(images).square().sum().backward()
    pairs = [
        (model.patches.project.bias, peer.patch_embed.proj.bias),
        (model.positions[0].table, peer.pos_embed),
        (model.class_token, peer.cls_token),
        (model.blocks[0].attention.to_qkv.weight, peer.blocks[0].attn.qkv.weight),
        (model.blocks[1].mlp.expand.weight, peer.blocks[1].mlp.fc1.weight),
        (model.norm.weight, peer.norm.weight),
        (model.head.weight, peer.head.weight),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.grad, theirs.grad.view_as(ours), atol=1e-4, rtol=1e-4)


def test_recorded_attention_equals_transformers_eager_one() -> None:
    import vitral

    model = small_model(norm_eps=1e-12)
    peer = in_transformers(model).eval().model
    peer.set_attn_implementation("eager")
    images = torch.randn(2, 3, 16, 16)
    with vitral.record_attention(model) as maps:
        model(images)
    for layer, theirs in enumerate(peer(images, output_attentions=True).attentions):
        torch.testing.assert_close(maps[layer], theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_mixed_sizes_equal_timms_naflex() -> None:
    """vitral packs, NaFlex pads and masks; the logits are equal."""
    model = small_model(position_resample="bicubic-antialias")
    images = [torch.randn(3, *size) for size in ((16, 16), (8, 20), (24, 12), (16, 16))]
    theirs = in_naflex(model).eval()(naflex_input(images, model))
    torch.testing.assert_close(model(images), theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "variant", [dict(depth=3), dict(depth=3, pool="mean", class_token=True, layer_scale=0.1)], ids=str
)
def test_parameter_groups_equal_timm(variant: dict[str, Any]) -> None:
    """Weight decay and relative learning rates agree, with one difference in the definitions.

    timm counts the final norm to the last block; vitral counts it to the head, as BEiT and MAE do."""
    model = small_model(**variant)
    peer = in_timm(model)
    from timm.optim import param_groups_layer_decay

    groups = param_groups_layer_decay(peer, 0.1, peer.no_weight_decay(), layer_decay=0.75)
    names = {id(parameter): name for name, parameter in peer.named_parameters()}
    theirs = {names[id(p)]: (g["weight_decay"], g["lr_scale"]) for g in groups for p in g["params"]}
    ours = {
        name: (group["weight_decay"], group["lr"] / 2)
        for group in model.parameter_groups(2.0, 0.1, layer_decay=0.75)
        for name in group["names"]
    }
    token_rows = int(model.config.has_class_token)
    compared = set()
    for rule in timm.rules(model.config, token_rows=token_rows):
        for name, their_name in itertools.product(rule.ours, rule.theirs):
            decay, scale = theirs[their_name]
            if name.startswith("norm."):
                assert (decay, scale) == (0.0, pytest.approx(0.75))
                assert ours[name] == (0.0, 1.0)
            else:
                assert ours[name] == (decay, pytest.approx(scale)), (name, their_name)
            compared |= {name, their_name}
    assert compared == ours.keys() | theirs.keys()
