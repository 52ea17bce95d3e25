"""Preprocessing: each resize policy against Pillow and against NumPy."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from tests.conftest import small_model
from tests.data.images import encoded, photo
from vitral import Preprocess
from vitral.data.decode import decode
from vitral.data.transforms import crop_and_resize, normalize, preprocess_image, resized_size

PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(32, 32), (20, 48), (90, 100)])
def test_squash_is_pillows_resize(interpolation: Any, size: tuple[int, int]) -> None:
    image = photo(60, 80)
    ours = preprocess_image(np.asarray(image), Preprocess(size=size, interpolation=interpolation))
    theirs = torch.from_numpy(np.array(image.resize(size[::-1], PILLOW[interpolation]))).permute(2, 0, 1)
    assert (ours.int() - theirs.int()).abs().float().mean() < 0.2
    assert (ours.int() - theirs.int()).abs().max() <= 2


@pytest.mark.parametrize(("height", "width"), [(60, 80), (80, 60), (301, 97)])
def test_crop_resizes_and_crops_the_center(height: int, width: int) -> None:
    image = photo(height, width)
    ours = preprocess_image(np.asarray(image), Preprocess(size=(28, 28), resize="crop", crop_fraction=0.875))
    short = 32
    size = (short, int(short * height / width)) if width < height else (int(short * width / height), short)
    larger = image.resize(size, Image.Resampling.BILINEAR)
    left, top = round((size[0] - 28) / 2), round((size[1] - 28) / 2)
    theirs = torch.from_numpy(np.array(larger.crop((left, top, left + 28, top + 28)))).permute(2, 0, 1)
    assert (ours.int() - theirs.int()).abs().float().mean() < 0.3


def triangle_resize(pixels: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Resize one axis by its definition: a triangle filter as wide as the scale, about pixel centers."""
    length = pixels.shape[axis]
    scale = max(1.0, length / size)
    centers = (np.arange(size) + 0.5) * length / size
    distance = np.abs(np.arange(length) + 0.5 - centers[:, None]) / scale
    weights = np.clip(1 - distance, 0, None)
    weights /= weights.sum(axis=1, keepdims=True)
    return np.moveaxis(np.tensordot(weights, pixels.astype(float), axes=(1, axis)), 0, axis)


@pytest.mark.parametrize("size", [(32, 32), (20, 48), (90, 100)])
def test_squash_is_a_triangle_filter(size: tuple[int, int]) -> None:
    pixels = np.asarray(photo(60, 80))
    ours = preprocess_image(pixels, Preprocess(size=size)).permute(1, 2, 0).numpy()
    expected = triangle_resize(triangle_resize(pixels, size[0], 0), size[1], 1)
    assert np.abs(ours - expected).max() <= 2  # two roundings to uint8, one per axis


def test_nearest_picks_the_pixel_under_the_center() -> None:
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8, 1)
    preprocess = Preprocess(size=(4, 2), interpolation="nearest").with_channels(1)
    assert np.array_equal(preprocess_image(pixels, preprocess)[0].numpy(), pixels[1::2, 2::4, 0])


def test_pad_keeps_the_aspect_and_centers_the_image() -> None:
    pixels = np.asarray(photo(10, 40))
    image = preprocess_image(pixels, Preprocess(size=(32, 32), resize="pad", background=5))
    assert image.shape == (3, 32, 32)
    assert (image[:, :12] == 5).all()
    assert (image[:, 20:] == 5).all()
    expected = triangle_resize(triangle_resize(pixels, 8, 0), 32, 1)
    assert np.abs(image[:, 12:20].permute(1, 2, 0).numpy() - expected).max() <= 2


@pytest.mark.parametrize("patch", [1, 2, (1, 4)])
def test_native_sizes_fit_behind_a_stem(patch: int | tuple[int, int]) -> None:
    config = small_model(stem=vitral.ConvStem(widths=(8, 8)), patch_size=patch, image_size=32).config
    for original in ((45, 61), (200, 304), (17, 90)):
        size = resized_size(Preprocess(size=(64, 64), resize="native"), original, config.step_hw)
        config.grid(*size)  # no DataError


@pytest.mark.parametrize(("original", "expected"), [((50, 70), (48, 64)), ((5, 5), (16, 16)), ((400, 100), (128, 32))])
def test_native_rounds_to_patches_and_is_bounded(original: tuple[int, int], expected: tuple[int, int]) -> None:
    preprocess = Preprocess(size=(64, 64), resize="native")
    assert resized_size(preprocess, original, (16, 16)) == expected
    assert preprocess_image(np.zeros((*original, 3), np.uint8), preprocess, patch=(16, 16)).shape == (3, *expected)


@pytest.mark.parametrize("settings", [{"antialias": False}, {"interpolation": "nearest"}])
def test_without_antialiasing_a_jpeg_is_decoded_at_full_size(settings: dict[str, Any]) -> None:
    content = encoded(photo(75, 100).resize((800, 600), Image.Resampling.BICUBIC), "JPEG", quality=90)
    preprocess = Preprocess(size=(64, 64), **settings)
    assert torch.equal(preprocess_image(content, preprocess), preprocess_image(decode(content), preprocess))


def test_large_jpegs_are_decoded_small_and_look_the_same() -> None:
    image = photo(75, 100).resize((1600, 1200), Image.Resampling.BICUBIC)
    content = encoded(image, "JPEG", quality=95)
    preprocess = Preprocess(size=(96, 96), resize="crop", crop_fraction=0.9)
    from_file, from_pixels = preprocess_image(content, preprocess), preprocess_image(np.asarray(image), preprocess)
    assert (from_file.int() - from_pixels.int()).abs().float().mean() < 3
    box = (64, 128, 800, 960)
    part = crop_and_resize(content, box, preprocess)
    whole = crop_and_resize(np.asarray(image), box, preprocess)
    assert (part.int() - whole.int()).abs().float().mean() < 3


def test_normalize() -> None:
    preprocess = Preprocess(size=(2, 2), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    images = torch.randint(0, 256, (4, 3, 2, 2), dtype=torch.uint8)
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocess.mean, preprocess.std))
    torch.testing.assert_close(normalize(images, preprocess), (images / 255 - mean) / std)
    extremes = torch.tensor([0, 255], dtype=torch.uint8).reshape(1, 1, 2).expand(3, 1, 2)
    assert normalize(extremes, Preprocess(size=(1, 2))).tolist() == [[[-1.0, 1.0]]] * 3
