"""Augmentation: bounds of crops, determinism, and the effect of each operation."""

from typing import Any

import numpy as np
import pytest
import torch

import vitral
from tests.data.images import encoded, photo
from vitral import Preprocess
from vitral.data.augment import (
    _OPERATIONS,
    Augment,
    augment_image,
    change_colors,
    check_augment,
    erase_rectangle,
    inception_box,
    random_affine,
    random_box,
    resized_box,
    shift_pixels,
    squashed_box,
)
from vitral.data.randomness import random_generator

INF, NAN = float("inf"), float("nan")


def as_tensor(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def test_boxes_follow_their_distribution() -> None:
    for sample_box, area in ((resized_box, (0.08, 1.0)), (inception_box, (0.05, 1.0))):
        fractions, ratios = [], []
        for sample in range(3000):
            top, left, h, w = sample_box(300, 400, area, (0.75, 4 / 3), random_generator(0, 0, sample))
            assert 0 <= top <= 300 - h
            assert 0 <= left <= 400 - w
            fractions.append(h * w / 120_000)
            ratios.append(w / h)
        assert min(fractions) > area[0] * 0.95
        assert max(fractions) <= 1
        assert min(ratios) > 0.7
        assert max(ratios) < 1.4
    areas = [
        np.prod(resized_box(300, 300, (0.08, 1.0), (0.75, 4 / 3), random_generator(0, 0, i))[2:]) for i in range(3000)
    ]
    assert abs(np.mean(areas) / 90_000 - 0.5) < 0.06  # uniform, except that wide crops of a large area do not fit


@pytest.mark.parametrize(("height", "width"), [(300, 400), (480, 640), (640, 100), (7, 5), (1, 300), (512, 512)])
def test_squashed_boxes_keep_the_aspect_of_the_image(height: int, width: int) -> None:
    """The BiT-HyperRule: resize to 512 x 512, then crop 480 x 480 anywhere."""
    area = (480 / 512) ** 2
    tops, lefts = set(), set()
    for sample in range(2000):
        box = squashed_box(height, width, (area, area), (1.0, 1.0), random_generator(0, 0, sample))
        assert box[2:] == (max(1, round(height * 480 / 512)), max(1, round(width * 480 / 512)))
        tops.add(box[0])
        lefts.add(box[1])
        assert 0 <= box[0] <= height - box[2]
        assert 0 <= box[1] <= width - box[3]
    assert max(tops) == height - box[2]
    assert max(lefts) == width - box[3]
    assert min(tops) == min(lefts) == 0


@pytest.mark.parametrize(
    "settings",
    [
        Augment(flip=1.0),
        Augment(crop="shift", crop_shift=3),
        Augment(rotate=20),
        Augment(randaugment=2),
        Augment(jitter=0.4),
        Augment(erase=1.0),
        Augment(crop="inception", crop_area=(0.05, 1.0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("channels", [1, 3])
def test_each_augmentation_keeps_the_shape_and_repeats(settings: Augment, channels: int) -> None:
    pixels = np.asarray(photo(32, 32))[..., :channels]
    preprocess = Preprocess(size=(32, 32)).with_channels(channels)
    first = augment_image(pixels, preprocess, settings, random_generator(1, 2, 3))
    assert first.shape == (channels, 32, 32)
    assert first.dtype == torch.uint8
    assert torch.equal(first, augment_image(pixels, preprocess, settings, random_generator(1, 2, 3)))
    others = [augment_image(pixels, preprocess, settings, random_generator(1, 2, i)) for i in range(4, 14)]
    plain = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    assert any(not torch.equal(plain, other) for other in others)


def test_a_flip_is_a_flip() -> None:
    pixels = np.asarray(photo(16, 16))
    flipped = augment_image(pixels, Preprocess(size=(16, 16)), Augment(flip=1.0), random_generator(0, 0, 0))
    assert np.array_equal(flipped.permute(1, 2, 0).numpy(), pixels[:, ::-1])


def test_a_rotation_by_zero_changes_nothing() -> None:
    pixels = np.asarray(photo(16, 16))
    same = augment_image(pixels, Preprocess(size=(16, 16)), Augment(rotate=1e-9), random_generator(0, 0, 0))
    assert np.abs(same.permute(1, 2, 0).numpy().astype(int) - pixels).max() <= 1


def test_a_random_crop_of_a_large_jpeg() -> None:
    content = encoded(photo(900, 1200), "JPEG", quality=95)
    image = augment_image(content, Preprocess(size=(64, 64)), Augment(crop="resized"), random_generator(0, 0, 1))
    assert image.shape == (3, 64, 64)


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            dict(crop="zoom"),
            dict(flip=2.0),
            dict(flip=True),
            dict(rotate=-1),
            dict(shear=90),
            dict(zoom=5),
            dict(zoom=1),
        ),
        *(dict(crop_area=area) for area in [(0.5, 0.1), (0.5, 9), (2, 9), (0, 1), (NAN, 1), (0.5,), 0.5, "ab"]),
        *(dict(crop_aspect=aspect) for aspect in [(0.5, INF), (NAN, 1), (0, 1), (1e-320, 1)]),
        *(dict(randaugment_magnitude=100), dict(randaugment=1.5), dict(crop_shift="4"), dict(crop_shift=NAN)),
        *(
            {name: value}
            for name in ("flip", "rotate", "shift", "jitter", "erase", "zoom")
            for value in (INF, NAN, -0.1)
        ),
    ],
)
def test_invalid_settings(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(vitral.ConfigError) as caught:
        Augment(**wrong)
    assert str(caught.value).startswith(f"{name} must be ")
    assert "(got " in str(caught.value)


def test_the_strongest_settings() -> None:
    strongest = Augment(
        rotate=180, shear=89, zoom=0.99, shift=1, randaugment=16, randaugment_magnitude=20, jitter=10, erase=1
    )
    for sample in range(20):
        image = augment_image(
            np.asarray(photo(16, 16)), Preprocess(size=(16, 16)), strongest, random_generator(0, 0, sample)
        )
        assert image.shape == (3, 16, 16)


def test_every_key_has_its_own_random_numbers(recwarn: pytest.WarningsRecorder) -> None:
    keys = [(seed, epoch, 5) for seed in (-2, -1, 0, 1, 2**63, 2**63 + 1) for epoch in (0, 1, 2**23, 2**23 + 1)]
    assert len({random_generator(*key).random() for key in keys}) == len(keys)
    assert not recwarn.list
    assert random_generator(3, 2, 1).random() == np.random.Generator(np.random.Philox(key=[3, (2 << 40) | 1])).random()


@pytest.mark.parametrize("sample_box", [resized_box, inception_box, squashed_box])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 90), (90, 1), (2, 3), (64, 64), (30, 3000)])
def test_boxes_stay_inside_the_image(sample_box: Any, height: int, width: int) -> None:
    for sample in range(300):
        area = (0.001, 1.0) if sample % 2 else (0.9, 1.0)
        top, left, h, w = sample_box(height, width, area, (0.1, 10.0), random_generator(0, 0, sample))
        assert 1 <= h <= height - top
        assert 1 <= w <= width - left
        assert min(top, left) >= 0


def test_boxes_of_large_jpegs_are_aligned() -> None:
    """A JPEG that is decoded at an eighth of its size has whole pixels for such a box only."""
    content = encoded(photo(800, 1200), "JPEG")
    preprocess = Preprocess(size=(16, 16))
    for sample in range(50):
        augment = Augment(crop="resized", crop_area=(0.5, 1.0))
        box = random_box(content, preprocess, augment, random_generator(0, 0, sample))
        assert all(side % 8 == 0 for side in box)


@pytest.mark.parametrize("flip", [0.0, 0.3, 1.0])
def test_the_probability_of_a_flip(flip: float) -> None:
    pixels = np.asarray(photo(8, 8))
    preprocess = Preprocess(size=(8, 8))
    flipped = as_tensor(pixels[:, ::-1])
    images = [augment_image(pixels, preprocess, Augment(flip=flip), random_generator(0, 0, i)) for i in range(400)]
    rate = sum(torch.equal(image, flipped) for image in images) / 400
    assert rate == pytest.approx(flip, abs=0.08)  # three standard deviations of a mean of 400


def test_a_shift_moves_pixels_and_mirrors_the_border() -> None:
    image = torch.arange(36, dtype=torch.uint8).reshape(1, 6, 6)
    padded = np.pad(image.numpy()[0], 2, mode="reflect")
    windows = [padded[top : top + 6, left : left + 6].tolist() for top in range(5) for left in range(5)]
    shifted = [shift_pixels(image, 2, random_generator(0, 0, sample))[0].tolist() for sample in range(300)]
    assert all(window in windows for window in shifted)
    assert all(window in shifted for window in windows)  # every shift occurs
    assert torch.equal(shift_pixels(image, 0, random_generator(0, 0, 0)), image)


def test_a_rotation_by_180_degrees_is_two_flips() -> None:
    """The center of rotation is half a pixel above and left of the center of the image."""
    image = as_tensor(np.asarray(photo(9, 13)))

    class Largest:
        def uniform(self, low: float, high: float) -> float:
            return high

    turned = random_affine(image, Augment(rotate=180), Largest())  # type: ignore[arg-type]
    difference = turned[:, :-1, :-1].int() - image[:, :-1, :-1].flip(1, 2).int()
    assert difference.abs().max() <= 1


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_geometry_works_for_any_number_of_channels(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 24, channels), dtype=np.uint8)
    settings = Augment(crop="resized", flip=0.5, rotate=20, shear=5, zoom=0.2, shift=0.1, erase=1.0)
    image = augment_image(
        pixels, Preprocess(size=(16, 16)).with_channels(channels), settings, random_generator(0, 0, 1)
    )
    assert image.shape == (channels, 16, 16)
    assert image.is_contiguous()


def test_erasing_changes_one_rectangle() -> None:
    image = torch.full((3, 40, 50), 7, dtype=torch.uint8)
    for sample in range(50):
        erased = erase_rectangle(image, random_generator(0, 0, sample))
        rows, columns = torch.where((erased != 7).any(dim=0))
        height, width = int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1
        assert 0.015 <= height * width / 2000 <= 0.35
        assert len(rows) > 0.95 * height * width  # noise, not a color
    assert (image == 7).all()


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_operations_of_magnitude_zero(mode: str) -> None:
    """Geometric operations, cutout and solarize-add do nothing at magnitude 0; the others have no neutral magnitude."""
    image = photo(16, 16).convert(mode)
    unchanged = [
        index
        for index, operation in enumerate(_OPERATIONS)
        if np.array_equal(np.asarray(operation(image, 0.0, random_generator(0, 0, 0))), np.asarray(image))
    ]
    assert set(unchanged) >= {3, 10, 11, 12, 13, 14, 15}
    assert not set(unchanged) & {2, 4, 5}  # invert, posterize, solarize


def test_invert_and_solarize_by_their_definition() -> None:
    image = photo(16, 16)
    pixels, random = np.asarray(image), random_generator(0, 0, 0)
    assert np.array_equal(np.asarray(_OPERATIONS[2](image, 1.0, random)), 255 - pixels)
    solarized = np.where(pixels < 128, pixels, 255 - pixels)
    assert np.array_equal(np.asarray(_OPERATIONS[5](image, 0.5, random)), solarized)
    added = np.where(pixels < 128, np.minimum(255, pixels.astype(int) + 110), pixels)
    assert np.array_equal(np.asarray(_OPERATIONS[15](image, 1.0, random)), added)


def test_jitter_of_a_gray_image_stays_gray() -> None:
    image = as_tensor(np.asarray(photo(16, 16).convert("L"))[..., None])
    assert change_colors(image, Augment(jitter=0.5), random_generator(0, 0, 0)).shape == (1, 16, 16)


@pytest.mark.parametrize("settings", [dict(randaugment=1), dict(jitter=0.1)])
@pytest.mark.parametrize("channels", [2, 4, 5])
def test_color_operations_need_gray_or_rgb(settings: dict[str, Any], channels: int) -> None:
    preprocess = Preprocess(size=(8, 8)).with_channels(channels)
    with pytest.raises(vitral.ConfigError, match=f"augment.{next(iter(settings))} .*{channels} channels"):
        check_augment(Augment(**settings), preprocess)
    for allowed in (1, 3):
        check_augment(Augment(**settings), preprocess.with_channels(allowed))


@pytest.mark.parametrize("crop", ["resized", "inception", "squashed"])
def test_native_sizes_and_resizing_crops_contradict(crop: Any) -> None:
    with pytest.raises(vitral.ConfigError, match=f"augment.crop={crop} .*native"):
        check_augment(Augment(crop=crop), Preprocess(size=(8, 8), resize="native"))
    check_augment(Augment(crop=crop), Preprocess(size=(8, 8), resize="crop"))
    for allowed in ("none", "shift"):
        check_augment(Augment(crop=allowed), Preprocess(size=(8, 8), resize="native"))  # type: ignore[arg-type]
