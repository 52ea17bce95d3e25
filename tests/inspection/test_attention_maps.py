"""Rollout and attention distance, against NumPy, closed forms and the attention of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vitral
from benchmarks.peers import randomize, repair_torchvision
from tests.conftest import small_model
from vitral import ConfigError, DataError
from vitral.inspection import attention_distance, relevance, rollout, traversal
from vitral.inspection.attention_maps import mean_distance, patch_distances
from vitral.model.packing import Group
from vitral.model.recording import observe_attention

VARIANTS: list[dict[str, Any]] = [
    dict(),
    dict(registers=2),
    dict(pool="mean"),
    dict(pool="mean", class_token=True, registers=1),
    dict(pool="token+mean"),
    dict(pool="map"),
    dict(pool="none"),
    dict(position="relative"),
    dict(attention="axial"),
    dict(patch_size=1, stem=vitral.ConvStem(widths=(16, 16))),
]


@pytest.fixture(scope="module")
def their_model() -> Any:
    """Return a ViT of transformers with random weights that shows its attention."""
    repair_torchvision()
    from transformers import ViTConfig as TheirConfig
    from transformers import ViTForImageClassification

    config = TheirConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=80, image_size=32, patch_size=8
    )
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    return randomize(ViTForImageClassification(config)).eval()


def numpy_rollout(attention: list[np.ndarray], pooled: np.ndarray, extras: int) -> np.ndarray:
    """Return the rollout as the paper describes it: mean of heads plus identity, normalized, multiplied."""
    product = np.eye(attention[0].shape[-1])
    for layer in attention:  # (heads, N, N)
        mixed = layer.mean(axis=0) + np.eye(layer.shape[-1])
        product = (mixed / mixed.sum(axis=1, keepdims=True)) @ product
    row = (pooled @ product)[extras:]
    return row / row.sum()


def test_attention_and_rollout_equal_those_of_transformers(their_model: Any, tmp_path: Any) -> None:
    their_model.save_pretrained(tmp_path)
    model = vitral.load(tmp_path).model.float().eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        theirs = their_model(images, output_attentions=True).attentions
        with vitral.record_attention(model) as maps:
            model(images)
    assert len(theirs) == len(maps) == 3
    for layer, expected in enumerate(theirs):
        torch.testing.assert_close(maps[layer], expected, atol=1e-5, rtol=0)
    for index, ours in enumerate(rollout(model, images)):
        attention = [layer[index].double().numpy() for layer in theirs]
        first_token = np.eye(attention[0].shape[-1])[0]
        expected = numpy_rollout(attention, first_token, extras=1).reshape(4, 4)
        np.testing.assert_allclose(ours.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_rollout_follows_the_pooling(variant: dict[str, Any]) -> None:
    """An independent computation starts from the tokens that each pooling reads."""
    model = small_model(**variant)
    images, extras = torch.randn(2, 3, 16, 24), model.config.extra_tokens
    maps = rollout(model, images)
    assert isinstance(maps, Tensor)
    assert maps.shape == (2, 4, 6)
    with torch.no_grad(), vitral.record_attention(model) as recorded:
        tokens = model.features(images)
    for index in range(2):
        attention = [recorded[layer][index].double().numpy() for layer in recorded]
        pooled = np.zeros(attention[0].shape[-1])
        if model.config.pool in ("token", "token+mean"):
            pooled[0] = 1
        if model.config.pool in ("mean", "none", "token+mean"):
            pooled[extras:] = 1 / 24
        if model.config.pool == "map":
            pooled[extras:] = probe_attention(model, tokens.patches[index])
        expected = numpy_rollout(attention, pooled / pooled.sum(), extras).reshape(4, 6)
        np.testing.assert_allclose(maps[index].numpy(), expected, atol=1e-5)
        assert maps[index].sum().item() == pytest.approx(1, abs=1e-5)


def probe_attention(model: vitral.ViT, patches: Tensor) -> np.ndarray:
    """Return the mean over heads of the softmax between the probe and the patches."""
    pool: Any = model.pool
    with torch.no_grad():
        q = pool.to_q(pool.probe).view(model.config.heads, -1)
        k = pool.to_kv(patches)[:, : model.config.width].view(len(patches), model.config.heads, -1)
        logits = torch.einsum("hd,nhd->hn", q, k) / q.shape[-1] ** 0.5
    return logits.softmax(-1).mean(0).double().numpy()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_mixed_sizes_give_a_list_of_the_same_maps(variant: dict[str, Any]) -> None:
    model = small_model(**variant)
    images = [torch.randn(3, 16, 16), torch.randn(3, 8, 24), torch.randn(3, 16, 16)]
    maps = rollout(model, images)
    assert isinstance(maps, list)
    assert [tuple(map.shape) for map in maps] == [(4, 4), (2, 6), (4, 4)]
    for image, map in zip(images, maps, strict=True):
        torch.testing.assert_close(map, rollout(model, image[None])[0], atol=1e-6, rtol=1e-5)
    expected = torch.stack([attention_distance(model, image[None]) for image in images]).mean(0)
    torch.testing.assert_close(attention_distance(model, images), expected, atol=1e-4, rtol=1e-5)


def test_large_batches_run_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results do not depend on how many images run at a time."""
    model, images = small_model(depth=3), torch.randn(5, 3, 16, 16)
    expected, distance = rollout(model, images), attention_distance(model, images)
    monkeypatch.setattr(traversal, "MAX_BYTES", 2 * traversal.attention_bytes(model.config, (4, 4)))
    sizes = [len(batch) for batch in traversal.split_images(images, model)]
    assert sizes == [2, 2, 1]
    torch.testing.assert_close(rollout(model, images), expected)
    torch.testing.assert_close(attention_distance(model, images), distance)


def test_one_layer_of_attention_is_in_memory_at_a_time() -> None:
    """No attention weights of an earlier layer are alive when the next layer is observed."""
    import weakref

    model, alive = small_model(depth=4), []

    def observe(layer: int, weights: list[Tensor], packing: Any) -> None:
        assert not [1 for reference in alive if reference() is not None]
        alive.append(weakref.ref(weights[0]))

    with torch.no_grad(), observe_attention(model, observe):
        rollout(model, torch.randn(2, 3, 16, 16))
    assert len(alive) == 4


def test_layers_that_are_not_observed_stay_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = small_model(depth=4), []
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or fused(*a, **k))
    with torch.no_grad(), observe_attention(model, lambda *_: None, layers=[1]):
        model(torch.randn(1, 3, 16, 16))
    assert len(calls) == 3


def test_training_mode_is_restored_and_dropout_is_off() -> None:
    model = small_model(dropout=0.5, attention_dropout=0.5).train()
    images = torch.randn(1, 3, 16, 16)
    torch.testing.assert_close(rollout(model, images), rollout(model, images))
    assert all(module.training for module in model.modules())


# ---- distance ----


def pairwise(rows: int, columns: int, height: float, width: float) -> np.ndarray:
    """Return all distances between patch centers, patch by patch."""
    centers = [(height * row, width * column) for row in range(rows) for column in range(columns)]
    return np.array([[np.hypot(a[0] - b[0], a[1] - b[1]) for b in centers] for a in centers])


def test_distance_of_hand_made_attention() -> None:
    group = Group(1, (3, 4), 2)
    uniform = torch.full((1, 2, 14, 14), 1 / 14)
    identity = torch.eye(14).expand(1, 2, 14, 14)
    shift = torch.eye(14).roll(1, dims=1).expand(1, 1, 14, 14)  # every patch attends to the next one
    distances = pairwise(3, 4, 16, 8)
    np.testing.assert_allclose(patch_distances((3, 4), (16, 8), torch.device("cpu")).numpy(), distances, rtol=1e-6)
    assert mean_distance(identity, group, (16, 8)).abs().max() == 0
    np.testing.assert_allclose(mean_distance(uniform, group, (16, 8)).numpy(), distances.mean(), rtol=1e-5)
    steps = [distances[i, i + 1] for i in range(11)]  # the last patch attends to the class token only: distance 0
    assert mean_distance(shift, group, (16, 8)).item() == pytest.approx(sum(steps) / 12, rel=1e-5)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_uniform_attention_has_the_mean_distance_of_all_patches(variant: dict[str, Any]) -> None:
    """Without queries, a model attends to all patches alike, whatever its pooling; axial layers see one line."""
    model = small_model(**variant)
    with torch.no_grad():
        for block in model.blocks:
            block.get_parameter("attention.to_qkv.weight")[: 2 * 48] = 0
            block.get_parameter("attention.to_qkv.bias")[: 2 * 48] = 0
    result = attention_distance(model, torch.randn(2, 3, 16, 24))
    expected = pairwise(4, 6, 4, 4).mean()
    if variant.get("attention") == "axial":
        along_rows, along_columns = pairwise(1, 6, 4, 4).mean(), pairwise(4, 1, 4, 4).mean()
        expected = np.tile([[along_rows], [along_columns]], (2, 3))
    np.testing.assert_allclose(result.numpy(), np.broadcast_to(expected, result.shape), rtol=1e-4)


# ---- errors ----


def test_bit_is_refused_with_the_reason() -> None:
    bit = vitral.create("bit-r50x1", num_classes=3, image_size=32)
    with pytest.raises(ConfigError, match="convolutions have no attention"):
        rollout(bit, torch.randn(1, 3, 32, 32))


def test_merged_tokens_are_refused_with_the_fix(tmp_path: Path) -> None:
    model, images = small_model(merge=2), torch.randn(1, 3, 16, 16)
    for compute in (rollout, attention_distance, relevance):
        with pytest.raises(ConfigError, match=r"merges tokens \(merge=2\).*merge=0"):
            compute(model, images)
    vitral.save(vitral.Checkpoint(model=model, preprocess=vitral.Preprocess(size=(16, 16))), tmp_path / "m.safetensors")
    whole = vitral.load(tmp_path / "m.safetensors", merge=0).model
    assert rollout(whole, images).shape == (1, 4, 4)


def test_wrong_images_raise_the_errors_of_the_model() -> None:
    model = small_model()
    for images in (
        torch.randn(3, 16, 16),
        [torch.randn(1, 3, 16, 16)],
        torch.randn(1, 3, 15, 16),
        [],
        torch.zeros(0, 3, 16, 16),
        [1],
    ):
        with pytest.raises(DataError):
            rollout(model, images)  # type: ignore[arg-type]
