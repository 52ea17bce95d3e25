"""Attention equals a slow, obvious reference: a loop over images, heads, queries and keys."""

from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import small_model
from vitral import ViT
from vitral.model.attention import Attention, AxialAttention


def slow_attention(
    module: Attention, x: Tensor, relative_row: Any = None, attends: Any = lambda query, key: True
) -> Tensor:
    """Compute softmax(q k / sqrt(d) + q r / sqrt(d)) v, one number at a time."""
    heads, width = module.heads, x.shape[-1]
    size = width // heads
    mixed = torch.zeros_like(x)
    for image in range(len(x)):
        q, k, v = (x[image] @ module.to_qkv.weight.T + module.to_qkv.bias).split(width, dim=-1)
        for head in range(heads):
            columns = slice(head * size, (head + 1) * size)
            for query in range(x.shape[1]):
                logits = torch.full((x.shape[1],), float("-inf"))
                for key in range(x.shape[1]):
                    if attends(query, key):
                        row = k[key, columns]
                        if relative_row is not None:
                            row = row + relative_row(query, key)[columns]
                        logits[key] = q[query, columns] @ row / sqrt(size)
                mixed[image, query, columns] = logits.softmax(0) @ v[:, columns]
    return mixed @ module.to_out.weight.T + module.to_out.bias


def one_block_input(model: ViT, height: int, width: int) -> tuple[Tensor, Any]:
    x, packing = model.embed(torch.randn(2, 3, height, width))
    return x.detach(), packing


def first_attention(model: ViT) -> Any:
    return model.blocks[0].attention


@torch.no_grad()
def test_full_attention() -> None:
    model = small_model(registers=1)
    x, packing = one_block_input(model, 12, 8)
    module = first_attention(model)
    torch.testing.assert_close(module(x, packing), slow_attention(module, x), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("pool", "registers"), [("mean", 0), ("token", 0), ("token", 2)])
def test_relative_positions_are_extra_keys(pool: Any, registers: int) -> None:
    """D.4: each one-dimensional offset p_q - p_k has an embedding that acts as a key."""
    model = small_model(position="relative", image_size=(8, 12), pool=pool, registers=registers)
    x, packing = one_block_input(model, 8, 12)
    module, extras, patches = first_attention(model), model.config.extra_tokens, 6

    def relative_row(query: int, key: int) -> Tensor:
        if key < extras:
            return module.relative.extra_rows[key]
        if query < extras:
            return module.relative.extra_rows[extras + query]
        return module.relative.offset_rows[(query - extras) - (key - extras) + patches - 1]

    expected = slow_attention(module, x, relative_row)
    torch.testing.assert_close(module(x, packing), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("size", [(16, 20), (4, 24), (4, 4)])
def test_relative_positions_scale_to_another_grid(size: tuple[int, int]) -> None:
    model = small_model(position="relative", image_size=(8, 12), pool="mean")
    x, packing = one_block_input(model, *size)
    module, (rows, columns) = first_attention(model), (size[0] // 4, size[1] // 4)

    def relative_row(query: int, key: int) -> Tensor:
        dy = (query // columns - key // columns) * (1 / (rows - 1) if rows > 1 else 0)  # trained on 2 x 3 patches
        dx = (query % columns - key % columns) * (2 / (columns - 1) if columns > 1 else 0)
        total = torch.zeros(48)
        for y in range(-1, 2):
            for x in range(-2, 3):
                weight = max(0, 1 - abs(dy - y)) * max(0, 1 - abs(dx - x))
                total += weight * module.relative.offset_rows[y * 3 + x + 5]
        return total

    expected = slow_attention(module, x, relative_row)
    torch.testing.assert_close(module(x, packing), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("position", ["learned", "relative"])
@pytest.mark.parametrize(("pool", "registers"), [("mean", 0), ("token", 2)])
@pytest.mark.parametrize("block", [0, 1])
def test_axial_attention_stays_within_its_line(position: Any, pool: Any, registers: int, block: int) -> None:
    """D.6: rows, then columns; class token and registers attend to all, and all to them."""
    model = small_model(attention="axial", position=position, image_size=(8, 12), pool=pool, registers=registers)
    assert len(model.blocks) == 2 * model.config.depth
    x, packing = one_block_input(model, 8, 12)
    module, extras = model.blocks[block].attention, model.config.extra_tokens
    assert isinstance(module, AxialAttention)

    def line(token: int) -> int:
        return divmod(token - extras, 3)[block]  # the row in the first block, the column in the second

    def attends(query: int, key: int) -> bool:
        return query < extras or key < extras or line(query) == line(key)

    def relative_row(query: int, key: int) -> Tensor:
        assert module.relative is not None
        if key < extras:
            return module.relative.extra_rows[key]
        if query < extras:
            return module.relative.extra_rows[extras + query]
        return module.relative.offset_rows[query - key + 5]

    expected = slow_attention(module, x, relative_row if position == "relative" else None, attends)
    torch.testing.assert_close(module(x, packing), expected, atol=1e-5, rtol=1e-5)


def test_two_axial_blocks_reach_every_patch() -> None:
    model = small_model(attention="axial", depth=1, pool="none")
    images = torch.randn(1, 3, 16, 16, requires_grad=True)
    model(images)[0, 5].sum().backward()
    assert images.grad is not None
    assert (images.grad.abs().sum(1) > 0).all()
