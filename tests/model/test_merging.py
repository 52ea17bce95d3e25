"""Token merging equals a slow implementation in NumPy, written from the paper, and keeps what it promises."""

from collections.abc import Callable
from math import erf, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import vitral
from tests.conftest import small_config, small_model
from vitral.errors import ConfigError
from vitral.exporting.exporter import export
from vitral.model.block import Block, MergingBlock
from vitral.model.merging import merge_tokens, unmerge
from vitral.model.packing import Group, Packing
from vitral.weights.checkpoint import Checkpoint

Array = np.ndarray
VARIANTS: list[dict[str, Any]] = [
    dict(merge=1),
    dict(merge=3, depth=4),
    dict(merge=100, depth=5),
    dict(merge=3, registers=1),
    dict(merge=2, registers=2, pool="mean", image_size=(12, 20)),
    dict(merge=4, pool="mean", image_size=(12, 20)),
    dict(merge=4, pool="mean", class_token=True, norm_after_pool=True),
    dict(merge=3, pool="token+mean", layer_scale=0.3, position="learned-2d"),
    dict(merge=5, pool="map", position="sincos-2d", registers=3),
    dict(merge=5, pool="none", position="none", class_token=True),
    dict(merge=1, stem=vitral.ConvStem(widths=(8, 16)), patch_size=1),
]


def same_as(model: vitral.ViT, **changes: Any) -> vitral.ViT:
    """Return a model with the same weights and another config."""
    other = vitral.load(model.state_dict(), config=model.config, **changes).model
    assert isinstance(other, vitral.ViT)
    return other.to(next(model.parameters()).dtype)


# ---- the reference: one image, one token at a time, in float64 ----


class Token(NamedTuple):
    """A vector, and the patches that it stands for; none for the class token and registers."""

    vector: Array
    patches: frozenset[int]


def reference_tokens(model: vitral.ViT, image: torch.Tensor) -> tuple[Array, list[int]]:
    """Return one vector per extra token and patch after the last block, and the number of tokens after each block."""
    extras = model.config.extra_tokens
    start = model.embed(image[None])[0][0].detach().numpy()
    tokens = [
        Token(vector, frozenset({number - extras} if number >= extras else ())) for number, vector in enumerate(start)
    ]
    counts: list[int] = []
    for block in model.blocks:
        tokens = reference_block(block, tokens, extras, model.config.merge)
        counts.append(len(tokens))
    vectors = {patch: token.vector for token in tokens for patch in token.patches}
    return np.stack([*(token.vector for token in tokens[:extras]), *(vectors[key] for key in sorted(vectors))]), counts


def reference_block(block: Any, tokens: list[Token], extras: int, merge: int) -> list[Token]:
    """Attend, merge, then apply the MLP."""
    heads, scale = block.attention.heads, apply(block.after_attention)
    qkv = linear(block.attention.to_qkv, norm(block.norm1, np.stack([token.vector for token in tokens])))
    q, k, v = qkv.reshape(len(tokens), 3, heads, -1).transpose(1, 2, 0, 3)
    copies = np.repeat(np.arange(len(tokens)), [max(1, len(token.patches)) for token in tokens])  # as if never merged
    logits = q @ k[:, copies].transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    mixed = (weights / weights.sum(-1, keepdims=True)) @ v[:, copies]
    branch = scale(linear(block.attention.to_out, mixed.transpose(1, 0, 2).reshape(len(tokens), -1)))
    tokens = [Token(token.vector + change, token.patches) for token, change in zip(tokens, branch, strict=True)]
    tokens = reference_merge(tokens, k.mean(0), extras, merge)
    x = np.stack([token.vector for token in tokens])
    hidden = linear(block.mlp.expand, norm(block.norm2, x))
    gelu = hidden * 0.5 * (1 + np.vectorize(erf)(hidden / np.sqrt(2)))
    x = x + apply(block.after_mlp)(linear(block.mlp.contract, gelu))
    return [Token(vector, token.patches) for vector, token in zip(x, tokens, strict=True)]


def reference_merge(tokens: list[Token], keys: Array, extras: int, merge: int) -> list[Token]:
    """Section 3 of the paper: two sets by turns, an edge from each token to its nearest, keep the best edges."""
    first = [number for number in range(extras, len(tokens)) if number % 2 == 0]
    second = [number for number in range(extras, len(tokens)) if number % 2 == 1]
    merge = min(merge, (len(tokens) - extras) // 2)
    if not merge:
        return tokens
    edges: list[tuple[float, int, int]] = []
    for one in first:
        cosines = [keys[one] @ keys[two] / np.linalg.norm(keys[one]) / np.linalg.norm(keys[two]) for two in second]
        edges.append((max(cosines), one, second[int(np.argmax(cosines))]))
    chosen = sorted(edges, reverse=True)[:merge]
    groups = {two: [two, *(one for _, one, other in chosen if other == two)] for two in second}
    merged = {one for _, one, _ in chosen}
    kept = [tokens[one] for one in first if one not in merged]
    return [*tokens[:extras], *kept, *(average([tokens[number] for number in group]) for group in groups.values())]


def average(tokens: list[Token]) -> Token:
    """Return the mean over all patches of the tokens."""
    total = sum(len(token.patches) * token.vector for token in tokens)
    patches = frozenset().union(*(token.patches for token in tokens))
    return Token(np.asarray(total / len(patches)), patches)


def linear(layer: torch.nn.Linear, x: Array) -> Array:
    return x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()


def norm(layer: torch.nn.LayerNorm, x: Array) -> Array:
    unit = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + layer.eps)
    return unit * layer.weight.detach().numpy() + layer.bias.detach().numpy()


def apply(branch: Any) -> Callable[[Array], Array]:
    scale = 1 if branch.scale is None else branch.scale.detach().numpy()
    return lambda x: x * scale


# ---- the tests ----


def count_keys(weights: torch.Tensor | list[torch.Tensor]) -> int:
    assert isinstance(weights, torch.Tensor)
    return weights.shape[-1]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_equals_the_paper_in_numpy(variant: dict[str, Any]) -> None:
    model = small_model(**variant).double()
    images = torch.randn(3, 3, *model.config.image_hw, dtype=torch.float64)
    x, packing = model.embed(images)
    with torch.no_grad(), vitral.record_attention(model) as maps:
        tokens, _ = model.run_blocks(range(model.config.depth), x, packing)
        logits = model(images)
        for index, image in enumerate(images):
            expected, counts = reference_tokens(model, image)
            np.testing.assert_allclose(tokens[index], expected, atol=1e-9)
            assert [count_keys(maps[layer]) for layer in range(1, model.config.depth)] == counts[:-1]
            encoded = torch.from_numpy(expected)[None]
            encoded = encoded if model.config.norm_after_pool else model.norm(encoded)
            pooled = model.pool_tokens(encoded, Packing((packing.groups[0]._replace(images=1),), None))
            torch.testing.assert_close(model.head(pooled)[0], logits[index], atol=1e-9, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_results_do_not_depend_on_the_batch(variant: dict[str, Any]) -> None:
    model = small_model(**variant)
    height, width = model.config.image_hw
    sizes = [(height, width), (2 * height, width), (height, width), (height, 4 * width), (4, 4), (2 * height, width)]
    images = [torch.randn(3, *size) for size in sizes]
    with torch.no_grad():
        alone = [model(image[None])[0] for image in images]
        together, batch = model(images), model(torch.stack([images[0], images[2]]))
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batch, torch.stack([alone[0], alone[2]]), atol=1e-5, rtol=1e-5)


def test_merge_0_is_the_plain_network() -> None:
    plain = small_model()
    merging = same_as(plain, merge=4)
    back = same_as(merging, merge=0)
    images = torch.randn(2, 3, 16, 16)
    assert all(type(block) is Block for block in back.blocks)
    assert all(type(block) is MergingBlock for block in merging.blocks)
    assert torch.equal(back(images), plain(images))
    assert not torch.allclose(merging(images), plain(images), atol=1e-3)
    alone = torch.randn(2, 3, 4, 4)  # one patch: nothing to merge with
    assert torch.equal(merging(alone), plain(alone))


def test_merging_equal_tokens_changes_nothing() -> None:
    """Proportional attention: a token of s patches acts as its s equal patches did."""
    plain = small_model(position="none", image_size=(16, 32), depth=3)
    merging = same_as(plain, merge=16)
    images = torch.randn(2, 3, 16, 4).repeat(1, 1, 1, 8)  # four rows of eight equal patches
    torch.testing.assert_close(merging(images), plain(images), atol=1e-5, rtol=1e-5)
    with torch.no_grad(), vitral.record_attention(merging) as maps:
        merging(images)
    assert [count_keys(maps[layer]) for layer in range(3)] == [33, 17, 9]


def test_order_of_patches_within_each_set_does_not_matter() -> None:
    model = small_model(position="none", depth=1, merge=5)
    x, packing = model.embed(torch.randn(2, 3, 16, 16))
    order = torch.arange(17)
    order[1::2], order[2::2] = order[1::2][torch.randperm(8)], order[2::2][torch.randperm(8)]
    tokens, permuted = (model.run_blocks(range(1), sequence, packing)[0] for sequence in (x, x[:, order]))
    torch.testing.assert_close(permuted, tokens[:, order], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("extras", "grid", "count"), [(0, (3, 5), 4), (1, (4, 4), 8), (3, (1, 7), 100), (2, (1, 2), 1)]
)
def test_sizes_and_places(extras: int, grid: tuple[int, int], count: int) -> None:
    tokens = extras + prod(grid)
    x, packing, left = torch.randn(2, tokens, 6), Packing((Group(2, grid, extras),), None), prod(grid)
    start = x
    for _ in range(6):
        keys = [torch.randn(2, x.shape[1], 4)]
        x, packing = merge_tokens(x, packing, keys, count)
        left -= min(count, left // 2)
        assert x.shape[1] == packing.groups[0].tokens == extras + left
    merged = packing.groups[0].merged
    assert merged is not None
    assert torch.equal(merged.sizes.sum(1), torch.tensor([float(prod(grid))] * 2))
    for image in range(2):
        assert torch.equal(torch.bincount(merged.tokens[image], minlength=left).float(), merged.sizes[image])
    restored = unmerge(x, packing)
    assert torch.equal(restored[:, :extras], start[:, :extras])
    torch.testing.assert_close(restored[:, extras:].mean(1), start[:, extras:].mean(1))  # no patch is lost


def test_features_have_the_grid_of_the_image() -> None:
    model = small_model(merge=3, pool="mean", registers=1)
    images = torch.randn(2, 3, 16, 24)
    features = model.features(images, layers=[0])
    assert features.maps.shape == features.layers[0].maps.shape == (2, 48, 4, 6)
    torch.testing.assert_close(features.patches.mean(1), features.pooled)
    mixed = model.features([images[0], torch.randn(3, 8, 8)])
    torch.testing.assert_close(mixed[0].patches, features.patches[:1], atol=1e-5, rtol=1e-5)
    assert mixed[1].grid == (2, 2)


def test_gradients() -> None:
    model = small_model(merge=2, depth=3, layer_scale=0.5).double()
    images = torch.randn(1, 3, 8, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, images, fast_mode=True)
    loss = model(images).square().sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    model.gradient_checkpointing = True
    again = torch.autograd.grad(model.train()(images).square().sum(), list(model.parameters()))
    assert all(map(torch.equal, gradients, again))


def test_recorded_weights_are_those_of_the_fused_kernel() -> None:
    model = small_model(merge=3, registers=2)
    images = [torch.randn(3, 16, 16), torch.randn(3, 8, 16)]
    expected = model(images)
    with vitral.record_attention(model) as maps:
        torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=1e-5)
    assert [image.shape[-1] for image in maps[1]] == [16, 8]
    torch.testing.assert_close(maps[1][0].sum(-1), torch.ones(1, 3, 16))


def test_half_precision_matches_in_float32() -> None:
    model, images = small_model(merge=3, depth=3), torch.randn(2, 3, 16, 16)
    expected = model(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (model(images).float() - expected).abs().max() < 0.3  # another pair may be chosen
    assert model.bfloat16()(images.bfloat16()).isfinite().all()


def test_exports(tmp_path: Path) -> None:
    model = small_model(merge=3, pool="token+mean", registers=1)
    preprocess = vitral.Preprocess(size=(16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)
    checkpoint = Checkpoint(model=model, preprocess=preprocess, labels=None)
    for to in ("onnx", "pt2"):
        assert export(checkpoint, tmp_path / f"model.{to}", to=to).difference < 1e-5


@pytest.mark.parametrize(
    "choice", [dict(position="relative"), dict(position_at="every-layer"), dict(attention="axial")]
)
def test_choices_that_need_every_token(choice: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"merge=2 does not fit {next(iter(choice))}="):
        small_config(merge=2, **choice)
    small_config(merge=0, **choice)


def test_files_keep_the_choice(tmp_path: Path) -> None:
    vitral.save(small_model(merge=3), tmp_path / "merging.safetensors")
    vitral.save(small_model(), tmp_path / "plain.safetensors")
    assert vitral.load(tmp_path / "merging.safetensors").model.config == small_config(merge=3)
    assert vitral.load(tmp_path / "plain.safetensors", merge=3).model.config == small_config(merge=3)
    assert b'"merge"' not in (tmp_path / "plain.safetensors").read_bytes()  # older versions read it too
    with pytest.raises(ConfigError, match=r"merge must be .* \(got -1\)"):
        vitral.load(tmp_path / "plain.safetensors", merge=-1)
