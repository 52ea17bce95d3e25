"""Embedded color profiles: wide colors become sRGB, and everything else stays as it is."""

import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image, ImageCms
from pillow_heif import HeifImageFile

from tests.data.images import as_heic, encoded, photo
from tests.data.profiles import DISPLAY_P3, SRGB, gray_profile, rgb_profile
from vitral.data import decode as module
from vitral.data.decode import decode, from_pillow

P3 = rgb_profile(DISPLAY_P3)


def p3_to_srgb(pixels: np.ndarray) -> np.ndarray:
    """Convert by definition: linear light, the matrix between the primaries, and back."""
    matrix = np.array([[1.22494, -0.22494, 0], [-0.04206, 1.04206, 0], [-0.01964, -0.07864, 1.09828]])
    values = pixels / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4) @ matrix.T
    linear = linear.clip(0, 1)
    encoded = np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)
    return encoded * 255


def difference(first: np.ndarray, second: np.ndarray) -> float:
    assert first.shape == second.shape
    return float(np.abs(first.astype(float) - second).max())


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF", "AVIF", "HEIF"])
def test_display_p3_becomes_srgb(format: str) -> None:
    content = as_heic(photo(), icc_profile=P3) if format == "HEIF" else encoded(photo(), format, icc_profile=P3)
    opener = HeifImageFile if format == "HEIF" else Image.open
    stored = np.asarray(opener(io.BytesIO(content)))
    assert difference(p3_to_srgb(stored), stored) > 20
    assert difference(decode(content), p3_to_srgb(stored)) <= 2  # rounding


@pytest.mark.parametrize("fast", [True, False])
def test_display_p3_jpegs_with_both_decoders(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(module, "fast_jpeg", lambda: None)
    content = encoded(photo(), "JPEG", quality=95, icc_profile=P3)
    stored = decode(encoded(photo(), "JPEG", quality=95))
    assert difference(decode(content), p3_to_srgb(stored)) <= 2
    assert decode(content, shrink=2).shape == (20, 30, 3)
    gray = decode(content, channels=1)
    assert difference(gray, (p3_to_srgb(stored) @ [0.299, 0.587, 0.114])[..., None]) <= 2


def test_transparent_images_keep_their_transparency() -> None:
    image = photo().convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    expected = p3_to_srgb(np.asarray(photo()))
    pixels = decode(encoded(image, "PNG", icc_profile=P3), background=0)
    assert difference(pixels, expected * (np.asarray(image)[..., 3:] / 255)) <= 3
    palette = photo().quantize(16)
    expected = p3_to_srgb(np.asarray(palette.convert("RGB")))
    assert difference(decode(encoded(palette, "PNG", icc_profile=P3)), expected) <= 2
    keyed = Image.new("RGB", (4, 4), (255, 0, 0))
    assert (decode(encoded(keyed, "PNG", transparency=(255, 0, 0), icc_profile=P3), background=7) == 7).all()


def test_gray_profiles() -> None:
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(8, 32))
    linear = (np.arange(256).reshape(8, 32) / 255) ** 1.8
    expected = 255 * np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)
    content = encoded(ramp, "PNG", icc_profile=gray_profile(1.8))
    assert difference(decode(content, channels=1)[..., 0], expected) <= 2
    jpeg = encoded(ramp, "JPEG", quality=100, icc_profile=gray_profile(1.8))
    assert np.abs(decode(jpeg, channels=1)[..., 0] - expected).mean() <= 2


@pytest.mark.parametrize(
    "profile",
    [
        rgb_profile(SRGB),
        ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(),
        P3[:200],
        b"not a profile",
        gray_profile(1.0),  # of another mode
        P3[:300] + b"\xff" * (len(P3) - 300),
    ],
)
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_srgb_and_damaged_profiles_change_nothing(profile: bytes, format: str) -> None:
    with_profile = decode(encoded(photo(), format, icc_profile=profile))
    assert np.array_equal(with_profile, decode(encoded(photo(), format)))


def test_pillow_images_are_converted_like_files() -> None:
    image = photo()
    image.info["icc_profile"] = P3
    assert difference(from_pillow(image), p3_to_srgb(np.asarray(photo()))) <= 2
    assert np.array_equal(from_pillow(photo()), np.asarray(photo()))


def test_threads_share_a_profile() -> None:
    files = [encoded(photo(seed=seed), "PNG", icc_profile=P3) for seed in range(8)]
    expected = [decode(content) for content in files]
    with ThreadPoolExecutor(4) as pool:
        for first, second in zip(expected * 10, pool.map(decode, files * 10), strict=True):
            assert np.array_equal(first, second)
