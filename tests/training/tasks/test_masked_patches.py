"""Masked patch prediction (B.1.2): targets of hand-made patches, the corruption and its frequencies, and the loss."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vitral
from vitral.errors import ConfigError
from vitral.model.config import ViTConfig
from vitral.model.vit import ViT
from vitral.preprocess import Preprocess
from vitral.training.config import Masking
from vitral.training.tasks import Corruption
from vitral.training.tasks.masked_patches import MaskedPatchHead, color_of, draw_corruption, quantize, select_patches
from vitral.training.tasks.masked_sheet import PatchSheet, hatching


def make_config(**fields: Any) -> ViTConfig:
    sizes: dict[str, Any] = dict(width=32, depth=2, heads=2, mlp_width=64, patch_size=8, image_size=32, num_classes=0)
    return ViTConfig(**{**sizes, **fields})


def paint(color: tuple[int, int, int], image: Tensor, row: int, column: int) -> None:
    image[0, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = torch.tensor(color)[:, None, None]


def targets_of(pixels: Tensor, target: Any, **fields: Any) -> Tensor:
    head = MaskedPatchHead(make_config(**fields), Masking(target=target))
    return head.targets(pixels, pixels.float() / 127.5 - 1)


# ---- targets ----


def test_the_mean_color_has_three_bits_per_channel() -> None:
    """64 r + 8 g + b over eight equal bins of the color before normalization."""
    pixels = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    paint((255, 255, 255), pixels, 0, 1)
    paint((255, 0, 0), pixels, 0, 2)
    paint((0, 0, 255), pixels, 0, 3)
    paint((31, 32, 64), pixels, 1, 0)  # 31/255 is below an eighth, 32/255 is above it, 64/255 above a quarter
    pixels[0, :, 8:16, 8:12] = 255  # half of the patch (1, 1): a mean of 0.5, where the fifth bin starts
    targets = targets_of(pixels, "mean-color")
    assert targets.shape == (1, 16)
    assert targets[0, :6].tolist() == [0, 511, 7 * 64, 7, 0 * 64 + 1 * 8 + 2, 4 * 64 + 4 * 8 + 4]


def test_every_color_has_its_own_class_and_comes_back() -> None:
    levels = (torch.arange(8) + 0.5) / 8
    colors = torch.cartesian_prod(levels, levels, levels)
    classes = quantize(colors)
    assert classes.tolist() == list(range(512))
    assert torch.allclose(color_of(classes, 3), colors)
    assert quantize(torch.tensor([[0.0], [0.999], [1.0]])).tolist() == [0, 7, 7]  # gray: eight classes


def test_a_small_patch_is_sixteen_colors_in_reading_order() -> None:
    pixels = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    pixels[0, 0, 0:2, 2:4] = 255  # the second cell of the first row
    pixels[0, 2, 6:8, 6:8] = 255  # the last cell
    targets = targets_of(pixels, "small-patch")
    assert targets.shape == (1, 16, 16)
    assert targets[0, 0].tolist() == [0, 448, *[0] * 13, 7]
    assert not targets[0, 1:].any()


def test_pixels_are_the_normalized_patch() -> None:
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    targets = targets_of(pixels, "pixels")
    assert targets.shape == (2, 16, 3 * 8 * 8)
    patch = (pixels[1, :, 8:16, 16:24].float() / 127.5 - 1).flatten()
    assert torch.equal(targets[1, 1 * 4 + 2], patch)


def test_with_a_stem_a_patch_is_the_area_of_a_token() -> None:
    fields = dict(stem=vitral.ConvStem(widths=(8, 16)), patch_size=1)
    assert MaskedPatchHead(make_config(**fields), Masking()).cell == (4, 4)
    assert targets_of(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "mean-color", **fields).shape == (1, 64)


@pytest.mark.parametrize(
    ("fields", "target", "fragment"),
    [
        (dict(channels=4), "mean-color", "4 channels.*pixels"),
        (dict(patch_size=2), "small-patch", "2 x 2"),
        (dict(stem=vitral.ConvStem(widths=(8, 16)), patch_size=1, image_size=30), "mean-color", "multiples of 4 x 4"),
        (dict(stem=vitral.ConvStem(widths=(8, 16)), patch_size=1, image_size=(32, 30)), "pixels", "32 x 30 pixels"),
    ],
)
def test_targets_that_are_refused(fields: dict[str, Any], target: Any, fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment):
        MaskedPatchHead(make_config(**fields), Masking(target=target))


# ---- corruption ----


@pytest.mark.parametrize("ratio", [0.5, 0.15, 1.0])
def test_how_often_patches_are_corrupted(ratio: float) -> None:
    drawn = draw_corruption(4000, 16, Masking(ratio=ratio), torch.Generator().manual_seed(0))
    count = round(ratio * 16)
    is_corrupted = torch.zeros(4000, 16, dtype=torch.bool).scatter(1, drawn.corrupted, True)
    assert (is_corrupted.sum(1) == count).all()  # in every image
    itself = torch.arange(16).expand_as(drawn.source)
    swapped = drawn.source != itself
    assert not (drawn.masked & swapped).any()
    assert not ((drawn.masked | swapped) & ~is_corrupted).any()
    total = is_corrupted.sum().item()
    for mask, fraction in ((drawn.masked, 0.8), (swapped, 0.1), (is_corrupted & ~drawn.masked & ~swapped, 0.1)):
        standard_error = (fraction * (1 - fraction) / total) ** 0.5
        assert mask.sum().item() / total == pytest.approx(fraction, abs=4 * standard_error)
    frequencies = is_corrupted.float().mean(0)
    assert (frequencies - count / 16).abs().max() < 0.04  # every patch alike
    offsets = (drawn.source - itself)[swapped] % 16
    assert set(offsets.tolist()) == set(range(1, 16))  # any other patch, never itself


def test_the_same_seed_corrupts_alike() -> None:
    first, again, other = (draw_corruption(8, 16, Masking(), torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.corrupted, other.corrupted)


def test_the_input_of_the_encoder() -> None:
    """A masked patch has the mask embedding, a swapped one that of another patch, the rest their own."""
    torch.manual_seed(0)
    model = ViT(make_config()).eval()
    head = MaskedPatchHead(model.config, Masking())
    images = torch.randn(2, 3, 32, 32)
    inputs: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    corruption = draw_corruption(2, 16, Masking(), torch.Generator().manual_seed(3))
    head.predict(model, images, corruption)
    table = model.positions[0].table
    assert isinstance(table, Tensor)
    tokens = inputs[0][:, 1:] - table[1:]  # without the class token and without positions
    plain = model.patches(images)
    for image, patch in product(range(2), range(16)):
        is_masked = corruption.masked[image, patch]
        expected = head.mask if is_masked else plain[image, corruption.source[image, patch]]
        assert torch.allclose(tokens[image, patch], expected, atol=1e-6)


@pytest.mark.parametrize(
    "fields",
    [
        dict(),
        dict(pool="mean", registers=2),
        dict(position="learned-2d", position_at="every-layer"),
        dict(position="relative", attention="axial"),
        dict(stem=vitral.ConvStem(widths=(8, 16)), patch_size=1, position="sincos-2d", pool="map"),
        dict(stem=vitral.ResNetStem(stages=(1,)), patch_size=1),
    ],
    ids=str,
)
def test_without_corruption_the_head_sees_the_patches_of_the_network(fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = ViT(make_config(**fields)).eval()
    head = MaskedPatchHead(model.config, Masking())
    torch.nn.init.normal_(head.head.weight)
    images = torch.randn(2, 3, 32, 32)
    patches = model.features(images).patches
    none = torch.zeros(patches.shape[:2], dtype=torch.bool)
    corrupted = torch.tensor([[0, 3, 15], [1, 2, 14]])
    nothing = Corruption(corrupted, none, torch.arange(patches.shape[1]).expand(2, -1))
    expected = torch.stack([patches[0, corrupted[0]], patches[1, corrupted[1]]])
    torch.testing.assert_close(head.predict(model, images, nothing), head.head(expected))


def test_a_norm_that_follows_the_pooling_is_applied() -> None:
    """As in the networks of MAE: the head sees normalized tokens, and the norm is trained."""
    torch.manual_seed(0)
    model = ViT(make_config(pool="mean", norm_after_pool=True))
    head = MaskedPatchHead(model.config, Masking())
    torch.nn.init.normal_(head.head.weight)
    images = torch.randn(2, 3, *model.config.image_hw)
    rows, columns = model.config.grid(*model.config.image_hw)
    corruption = draw_corruption(2, rows * columns, Masking(), torch.Generator().manual_seed(0))
    head.predict(model, images, corruption).square().sum().backward()
    assert model.norm.weight.grad is not None
    assert model.norm.weight.grad.abs().sum() > 0


# ---- loss and sheet ----


@pytest.mark.parametrize("target", ["mean-color", "small-patch", "pixels"])
def test_the_loss_by_hand(target: Any) -> None:
    torch.manual_seed(0)
    head = MaskedPatchHead(make_config(), Masking(target=target))
    torch.nn.init.normal_(head.head.weight)
    predictions = torch.randn(2, 8, head.head.out_features)
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    targets = head.targets(pixels, pixels.float() / 127.5 - 1)
    corruption = draw_corruption(2, 16, Masking(), torch.Generator().manual_seed(0))
    loss = head.loss(predictions, select_patches(targets, corruption.corrupted))
    by_hand: list[Tensor] = []
    for image, number in product(range(2), range(8)):
        row, expected = predictions[image, number], targets[image, corruption.corrupted[image, number]]
        if target == "pixels":
            by_hand.append((row - expected).square().mean())
        elif target == "mean-color":
            by_hand.append(-row.log_softmax(0)[expected])
        else:
            by_hand.append(F.nll_loss(row.view(16, 512).log_softmax(1), expected))
    assert loss.item() == pytest.approx(torch.stack(by_hand).mean().item(), rel=1e-5)


@pytest.mark.parametrize("target", ["mean-color", "small-patch", "pixels"])
def test_the_sheet(target: Any) -> None:
    """Four patches of one color each; the second is masked, the third shows the fourth, and both are predicted."""
    head = MaskedPatchHead(make_config(image_size=16), Masking(target=target))
    colors = torch.tensor([[16, 16, 16], [240, 16, 16], [16, 240, 16], [16, 16, 240]], dtype=torch.uint8)
    pixels = colors.T.reshape(1, 3, 2, 2).repeat_interleave(8, 2).repeat_interleave(8, 3)
    preprocess = Preprocess(size=(16, 16), mean=(0.5, 0.4, 0.3), std=(0.5, 0.6, 0.7))
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocess.mean, preprocess.std))
    images = (pixels.float() / 255 - mean) / std
    masked = torch.tensor([[False, True, False, False]])
    corruption = Corruption(torch.tensor([[1, 2]]), masked, torch.tensor([[0, 1, 3, 3]]))
    targets = select_patches(head.targets(pixels, images), corruption.corrupted)
    outputs = targets.flip(1) if target == "pixels" else F.one_hot(targets.flip(1), 512).flatten(2).float()
    sheet = PatchSheet(preprocess=preprocess, grid=(2, 2), cell=head.cell, target=target)
    single = Corruption(*(tensor[0] for tensor in corruption))
    predicted, true = head.colors(outputs, is_prediction=True), head.colors(targets, is_prediction=False)
    image, seen, prediction, target_column = sheet.draw_row(images[0], single, predicted[0], true[0])
    whole = (colors / 255)[:, :, None, None].expand(4, 3, 8, 8)
    tolerance = dict(atol=1e-6 if target == "pixels" else 1 / 16, rtol=0)  # half of a bin
    torch.testing.assert_close(image, whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(seen[[0, 2, 3]], whole[[0, 3, 3]], atol=1e-6, rtol=0)
    assert torch.equal(seen[1], hatching(8, 8).expand(3, 8, 8))
    torch.testing.assert_close(target_column[[1, 2]], whole[[1, 2]], **tolerance)
    torch.testing.assert_close(prediction[[1, 2]], whole[[2, 1]], **tolerance)
    for column in (prediction, target_column):
        torch.testing.assert_close(column[[0, 3]], whole[[0, 3]] * 0.25 + 0.75, atol=1e-6, rtol=0)
    drawn = sheet.draw(images, corruption, predicted, true)
    assert drawn.size == (4 * 102 + 6, 18 + 102 + 6)
