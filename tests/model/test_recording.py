"""Attention weights can be recorded while all other layers keep the fused kernel."""

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import vitral
from tests.conftest import small_model
from vitral import ConfigError

VARIANTS: list[dict[str, Any]] = [
    dict(),
    dict(registers=2),
    dict(position="relative"),
    dict(attention="axial", pool="mean"),
    dict(attention="axial", position="relative", registers=1),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_weights_are_those_of_the_fused_kernel(variant: dict[str, Any]) -> None:
    """The product of recorded weights and values equals the output of the fused kernel."""
    model = small_model(**variant)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = model(images)
        with vitral.record_attention(model) as maps:
            torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=1e-5)
        x, packing = model.embed(images)
        for layer, block in enumerate(model.blocks):
            tokens = block.norm1(x)
            values = block.attention.to_qkv(tokens).chunk(3, dim=-1)[2].unflatten(-1, (3, 16)).transpose(1, 2)
            mixed = block.attention.to_out((maps[layer] @ values).transpose(1, 2).flatten(2))
            torch.testing.assert_close(mixed, block.attention(tokens, packing), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(maps[layer].sum(-1), torch.ones_like(maps[layer].sum(-1)))
            x = block(x, packing)


def test_only_chosen_layers_skip_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(depth=4)
    calls = []
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or fused(*a, **k))
    with vitral.record_attention(model, layers=[1, -1]) as maps:
        model(torch.randn(1, 3, 16, 16))
    assert sorted(maps) == [1, 3]
    assert len(calls) == 2
    model(torch.randn(1, 3, 16, 16))
    assert len(calls) == 6  # outside the context all four are fused again


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_list_of_images_equals_single_images(variant: dict[str, Any]) -> None:
    model = small_model(**variant)
    images = [torch.randn(3, 16, 16), torch.randn(3, 8, 20), torch.randn(3, 16, 16)]
    with vitral.record_attention(model) as packed:
        model(images)
    for index, image in enumerate(images):
        with vitral.record_attention(model) as alone:
            model(image[None])
        for layer in alone:
            torch.testing.assert_close(packed[layer][index], alone[layer], atol=1e-5, rtol=1e-5)


def test_list_of_equal_sizes_gives_a_list() -> None:
    model = small_model()
    with vitral.record_attention(model) as maps:
        model([torch.randn(3, 16, 16), torch.randn(3, 16, 16)])
    assert [weights.shape for weights in maps[0]] == [(1, 3, 17, 17)] * 2


def test_axial_weights_are_zero_outside_the_line() -> None:
    model = small_model(attention="axial", pool="mean", image_size=(8, 12))
    with vitral.record_attention(model) as maps:
        model(torch.randn(1, 3, 8, 12))
    row = torch.arange(6) // 3
    column = torch.arange(6) % 3
    assert torch.equal(maps[0][0, 0] > 0, row[:, None] == row)
    assert torch.equal(maps[1][0, 0] > 0, column[:, None] == column)


def test_recorders_are_removed() -> None:
    model = small_model()
    with pytest.raises(vitral.DataError), vitral.record_attention(model) as maps:
        model([torch.randn(3, 16, 17)])
    assert not maps
    with vitral.record_attention(model) as maps:
        model(torch.randn(1, 3, 16, 16))
    assert not any(block.attention.recorders for block in model.blocks)
    before = dict(maps)
    model(torch.randn(1, 3, 16, 16))
    assert all(maps[layer] is weights for layer, weights in before.items())


def test_contexts_nest() -> None:
    model = small_model()
    with vitral.record_attention(model, layers=[0]) as outer:
        with vitral.record_attention(model, layers=[0]) as inner:
            model(torch.randn(1, 3, 16, 16))
        assert torch.equal(inner[0], outer[0])  # both record
        model(torch.randn(1, 3, 16, 16))
    assert not torch.equal(inner[0], outer[0])
    assert not model.blocks[0].attention.recorders


def test_contexts_end_in_any_order() -> None:
    model = small_model()
    first, second = vitral.record_attention(model), vitral.record_attention(model)
    first.__enter__()
    maps = second.__enter__()
    first.__exit__(None, None, None)
    model(torch.randn(1, 3, 16, 16))
    assert 0 in maps
    second.__exit__(None, None, None)
    assert not any(block.attention.recorders for block in model.blocks)


def test_each_thread_records_its_own_weights() -> None:
    model = small_model()
    images = [torch.randn(1, 3, 16, 16) for _ in range(8)]
    start = Barrier(4)

    def record(image: torch.Tensor) -> torch.Tensor:
        start.wait()
        with torch.no_grad(), vitral.record_attention(model, layers=0) as maps:
            for _ in range(5):
                model(image)
        return maps[0]

    with ThreadPoolExecutor(4) as pool:
        recorded = list(pool.map(record, images))
    for image, weights in zip(images, recorded, strict=True):
        with torch.no_grad(), vitral.record_attention(model, layers=0) as alone:
            model(image)
        torch.testing.assert_close(weights, alone[0], atol=1e-5, rtol=1e-5)
    assert not any(block.attention.recorders for block in model.blocks)


def test_copies_are_not_recorded() -> None:
    model = small_model()
    with vitral.record_attention(model) as maps:
        model(torch.randn(1, 3, 16, 16))
        twin = copy.deepcopy(model)
        before = maps[0]
        twin(torch.randn(1, 3, 16, 16))
    assert maps[0] is before
    assert not twin.blocks[0].attention.recorders


def test_missing_layers_raise_key_errors() -> None:
    model = small_model()
    with vitral.record_attention(model, layers=[1]) as maps:
        with pytest.raises(KeyError, match="layer 1 .*none yet"):
            maps[1]
        model(torch.randn(1, 3, 16, 16))
        assert maps[-1] is maps[1]
        with pytest.raises(KeyError, match=r"layer 0 was not requested.*available: 1"):
            maps[0]


def test_invalid_layers_and_models() -> None:
    with (
        pytest.raises(ConfigError, match="no layer 5 .*0 to 1"),
        vitral.record_attention(small_model(), layers=[5]),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="Linear has no attention"),
        vitral.record_attention(torch.nn.Linear(1, 1)),
    ):
        pass


def test_weights_are_differentiable() -> None:
    model = small_model()
    with vitral.record_attention(model) as maps:
        logits = model(torch.randn(1, 3, 16, 16))
    (gradient,) = torch.autograd.grad(logits[0, 0], maps[0])
    assert gradient.shape == maps[0].shape
    assert gradient.abs().sum() > 0


def test_recording_under_gradient_checkpointing() -> None:
    model = small_model().train()
    images = torch.randn(1, 3, 16, 16)
    expected = torch.autograd.grad(model(images).sum(), model.class_token)[0]
    model.gradient_checkpointing = True
    with vitral.record_attention(model, layers=0) as maps:
        logits = model(images)
    assert 0 in maps
    assert -2 in maps
    assert 1 not in maps
    assert maps.get(1) is None
    gradient = torch.autograd.grad(logits.sum(), model.class_token)[0]  # outside the context
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-5)
    logits = model(images)  # forward outside the context, backward inside
    with vitral.record_attention(model) as maps:
        gradient = torch.autograd.grad(logits.sum(), model.class_token)[0]
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-5)
    assert not maps


def test_large_queries_and_keys_do_not_overflow_in_half_precision() -> None:
    model = small_model(depth=1, norm_eps=1e-3)
    with torch.no_grad():
        model.blocks[0].attention.to_qkv.weight.mul_(120)  # products beyond what float16 holds
    images = torch.randn(1, 3, 16, 16)
    with vitral.record_attention(model) as exact:
        model(images)
    with vitral.record_attention(model.half()) as maps:
        model(images.half())
    assert maps[0].isfinite().all()
    assert exact[0].isfinite().all()
