"""Masked patch prediction (B.1.2): targets of hand-made patches, what is corrupted and how often, and the loss."""

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
from vitral.training.filled_in import Painter, hatching
from vitral.training.masked_patches import Corruption, MaskedPatches, colour_of, draw_corruption, quantise
from vitral.training.masking import Masking


def config(**fields: object) -> ViTConfig:
    given = dict(width=32, depth=2, heads=2, mlp_width=64, patch_size=8, image_size=32, num_classes=0)
    return ViTConfig(**{**given, **fields})  # type: ignore[arg-type]


def patch_of(colour: tuple[int, int, int], image: Tensor, row: int, column: int) -> None:
    image[0, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = torch.tensor(colour)[:, None, None]


def targets(pixels: Tensor, target: str, **fields: object) -> Tensor:
    objective = MaskedPatches(config(**fields), Masking(target=target))  # type: ignore[arg-type]
    return objective.targets(pixels, pixels.float() / 127.5 - 1)


def test_the_mean_colour_has_three_bits_a_channel() -> None:
    """64 r + 8 g + b over eight equal bins of the un-normalised colour."""
    pixels = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    patch_of((255, 255, 255), pixels, 0, 1)
    patch_of((255, 0, 0), pixels, 0, 2)
    patch_of((0, 0, 255), pixels, 0, 3)
    patch_of((31, 32, 64), pixels, 1, 0)  # 31/255 is below an eighth, 32/255 is above it, 64/255 above a quarter
    pixels[0, :, 8:16, 8:12] = 255  # half of the patch (1, 1): a mean of 0.5, which begins the fifth bin
    found = targets(pixels, "mean-colour")
    assert found.shape == (1, 16)
    assert found[0, :6].tolist() == [0, 511, 7 * 64, 7, 0 * 64 + 1 * 8 + 2, 4 * 64 + 4 * 8 + 4]


def test_every_colour_is_a_class_of_its_own_and_comes_back() -> None:
    levels = (torch.arange(8) + 0.5) / 8
    colours = torch.cartesian_prod(levels, levels, levels)
    classes = quantise(colours)
    assert classes.tolist() == list(range(512))
    assert torch.allclose(colour_of(classes, 3), colours)
    assert quantise(torch.tensor([[0.0], [0.999], [1.0]])).tolist() == [0, 7, 7]  # grey: eight classes


def test_a_small_patch_is_sixteen_colours_in_reading_order() -> None:
    pixels = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    pixels[0, 0, 0:2, 2:4] = 255  # the second of the first row of parts
    pixels[0, 2, 6:8, 6:8] = 255  # the last one
    found = targets(pixels, "small-patch")
    assert found.shape == (1, 16, 16)
    assert found[0, 0].tolist() == [0, 448, *[0] * 13, 7]
    assert not found[0, 1:].any()


def test_pixels_are_the_normalised_patch() -> None:
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    found = targets(pixels, "pixels")
    assert found.shape == (2, 16, 3 * 8 * 8)
    patch = (pixels[1, :, 8:16, 16:24].float() / 127.5 - 1).flatten()
    assert torch.equal(found[1, 1 * 4 + 2], patch)


@pytest.mark.parametrize("ratio", [0.5, 0.15, 1.0])
def test_how_much_is_corrupted(ratio: float) -> None:
    how = Masking(ratio=ratio)
    found = draw_corruption(4000, 16, how, torch.Generator().manual_seed(0))
    number = round(ratio * 16)
    chosen = torch.zeros(4000, 16, dtype=torch.bool).scatter(1, found.asked, True)
    assert (chosen.sum(1) == number).all()  # in every picture
    own = torch.arange(16).expand_as(found.source)
    swapped = found.source != own
    assert not (found.masked & swapped).any()
    assert not ((found.masked | swapped) & ~chosen).any()
    total = chosen.sum().item()
    for seen, wanted in ((found.masked, 0.8), (swapped, 0.1), (chosen & ~found.masked & ~swapped, 0.1)):
        deviation = (wanted * (1 - wanted) / total) ** 0.5
        assert seen.sum().item() / total == pytest.approx(wanted, abs=4 * deviation)
    places = chosen.float().mean(0)
    assert (places - number / 16).abs().max() < 0.04  # everywhere alike
    further = (found.source - own)[swapped] % 16
    assert set(further.tolist()) == set(range(1, 16))  # any other patch, never its own


def test_the_same_seed_corrupts_alike() -> None:
    first, again, other = (draw_corruption(8, 16, Masking(), torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.asked, other.asked)


def test_what_the_network_sees() -> None:
    """Masked: nothing of the patch; swapped: the other patch; the rest: itself."""
    torch.manual_seed(0)
    model = ViT(config()).eval()
    objective = MaskedPatches(model.config, Masking())
    images = torch.randn(2, 3, 32, 32)
    seen: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    corruption = draw_corruption(2, 16, Masking(), torch.Generator().manual_seed(3))
    objective.predict(model, images, corruption)
    table = model.positions[0].table  # type: ignore[union-attr]
    tokens = seen[0][:, 1:] - table[1:]  # without the class token and without positions
    plain = model.patches(images)
    for picture in range(2):
        for patch in range(16):
            expected = (
                objective.mask
                if corruption.masked[picture, patch]
                else plain[picture, corruption.source[picture, patch]]
            )
            assert torch.allclose(tokens[picture, patch], expected, atol=1e-6)


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
def test_without_corruption_its_head_sees_the_patches_of_the_network(fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = ViT(config(**fields)).eval()
    objective = MaskedPatches(model.config, Masking())
    torch.nn.init.normal_(objective.head.weight)
    images = torch.randn(2, 3, 32, 32)
    patches = model.features(images).patches
    none = torch.zeros(patches.shape[:2], dtype=torch.bool)
    asked = torch.tensor([[0, 3, 15], [1, 2, 14]])
    nothing = Corruption(asked, none, torch.arange(patches.shape[1]).expand(2, -1))
    wanted = torch.stack([patches[0, asked[0]], patches[1, asked[1]]])
    torch.testing.assert_close(objective.predict(model, images, nothing), objective.head(wanted))


@pytest.mark.parametrize("target", ["mean-colour", "small-patch", "pixels"])
def test_the_loss_by_hand(target: str) -> None:
    torch.manual_seed(0)
    objective = MaskedPatches(config(), Masking(target=target))  # type: ignore[arg-type]
    torch.nn.init.normal_(objective.head.weight)
    predictions = torch.randn(2, 8, objective.head.out_features)
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    truth = objective.targets(pixels, pixels.float() / 127.5 - 1)
    corruption = draw_corruption(2, 16, Masking(), torch.Generator().manual_seed(0))
    found = objective.loss(predictions, corruption.of_asked(truth))
    by_hand = []
    for picture, number in product(range(2), range(8)):
        row, wanted = predictions[picture, number], truth[picture, corruption.asked[picture, number]]
        if target == "pixels":
            by_hand.append((row - wanted).square().mean())
        elif target == "mean-colour":
            by_hand.append(-row.log_softmax(0)[wanted])
        else:
            by_hand.append(F.nll_loss(row.view(16, 512).log_softmax(1), wanted))
    assert found == pytest.approx(torch.stack(by_hand).mean().item(), rel=1e-5)


def test_with_a_stem_a_patch_is_what_a_token_stands_for() -> None:
    fields = dict(stem=vitral.ConvStem(widths=(8, 16)), patch_size=1)
    objective = MaskedPatches(config(**fields), Masking())
    assert objective.cell == (4, 4)
    assert targets(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "mean-colour", **fields).shape == (1, 64)


@pytest.mark.parametrize(
    ("fields", "target", "reason"),
    [
        (dict(channels=4), "mean-colour", "4 bands"),
        (dict(patch_size=2), "small-patch", "2 x 2 pixels"),
        (dict(stem=vitral.ConvStem(widths=(8, 16)), patch_size=1, image_size=30), "mean-colour", "multiples of 4 x 4"),
        (dict(stem=vitral.ConvStem(widths=(8, 16)), patch_size=1, image_size=(32, 30)), "pixels", "32 x 30 pixels"),
    ],
)
def test_what_cannot_be_asked(fields: dict[str, Any], target: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        MaskedPatches(config(**fields), Masking(target=target))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [dict(ratio=0.0), dict(ratio=1.5), dict(masked=0.8, swapped=0.3), dict(target="x")])
def test_settings_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="masking"):
        Masking(**wrong)  # type: ignore[arg-type]


def test_a_norm_that_waits_for_the_pooling_is_not_left_out() -> None:
    """As in MAE's networks: the head sees normalised tokens, and the norm learns."""
    torch.manual_seed(0)
    model = ViT(config(pool="mean", norm_after_pool=True))
    masking = MaskedPatches(model.config, Masking())
    torch.nn.init.normal_(masking.head.weight)
    images = torch.randn(2, 3, *model.config.image_hw)
    rows, columns = model.config.grid(*model.config.image_hw)
    corruption = draw_corruption(2, rows * columns, Masking(), torch.Generator().manual_seed(0))
    masking.predict(model, images, corruption).square().sum().backward()
    assert model.norm.weight.grad is not None
    assert model.norm.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("target", ["mean-colour", "small-patch", "pixels"])
def test_what_is_painted(target: str) -> None:
    """Four patches of one colour each; the second is masked, the third shows the fourth, and both are asked about."""
    objective = MaskedPatches(config(image_size=16), Masking(target=target))  # type: ignore[arg-type]
    colours = torch.tensor([[16, 16, 16], [240, 16, 16], [16, 240, 16], [16, 16, 240]], dtype=torch.uint8)
    pixels = colours.T.reshape(1, 3, 2, 2).repeat_interleave(8, 2).repeat_interleave(8, 3)
    preprocess = Preprocess(size=(16, 16), mean=(0.5, 0.4, 0.3), std=(0.5, 0.6, 0.7))
    mean, std = (torch.tensor(part)[:, None, None] for part in (preprocess.mean, preprocess.std))
    images = (pixels.float() / 255 - mean) / std
    masked = torch.tensor([[False, True, False, False]])
    corruption = Corruption(torch.tensor([[1, 2]]), masked, torch.tensor([[0, 1, 3, 3]]))
    truth = corruption.of_asked(objective.targets(pixels, images))
    answers = truth.flip(1) if target == "pixels" else F.one_hot(truth.flip(1), 512).flatten(2).float()
    painter = Painter(objective, preprocess, (2, 2))
    picture, seen, answer, true = painter.row(images[0], corruption, answers[0], truth[0])
    whole = (colours / 255)[:, :, None, None].expand(4, 3, 8, 8)
    near = dict(atol=1e-6 if target == "pixels" else 1 / 16, rtol=0)  # of eight bins the middle
    torch.testing.assert_close(picture, whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(seen[[0, 2, 3]], whole[[0, 3, 3]], atol=1e-6, rtol=0)
    assert torch.equal(seen[1], hatching(8, 8).expand(3, 8, 8))
    torch.testing.assert_close(true[[1, 2]], whole[[1, 2]], **near)
    torch.testing.assert_close(answer[[1, 2]], whole[[2, 1]], **near)
    for column in (answer, true):
        torch.testing.assert_close(column[[0, 3]], whole[[0, 3]] * 0.25 + 0.75, atol=1e-6, rtol=0)
