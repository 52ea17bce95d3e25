"""Preprocessing without torch equals that of torch within one level, for every setting."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitral.data.pillow_transforms import TOLERANCE, preprocess_array
from vitral.data.transforms import preprocess_image
from vitral.preprocess import Preprocess


def photo(height: int, width: int, format: str = "JPEG") -> bytes:
    generator = np.random.default_rng(height)
    rows, columns = np.mgrid[0:height, 0:width]
    waves = np.stack([np.sin(rows / 9 + band) * 60 + np.cos(columns / 13) * 60 + 128 for band in range(3)], axis=2)
    pixels = (waves + generator.normal(0, 12, waves.shape)).clip(0, 255).astype(np.uint8)
    stream = BytesIO()
    Image.fromarray(pixels).save(stream, format)
    return stream.getvalue()


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("resize", ["squash", "crop", "pad", "native"])
def test_pixels_equal_those_of_torch(interpolation: Any, antialias: bool, resize: Any) -> None:
    preprocess = Preprocess(
        size=(48, 32), interpolation=interpolation, antialias=antialias, resize=resize, crop_fraction=0.875
    )
    for content in (photo(70, 90), photo(30, 20, "PNG"), photo(400, 300)):
        ours = preprocess_array(content, preprocess, patch=(4, 4))
        theirs = preprocess_image(content, preprocess, patch=(4, 4)).numpy()
        assert ours.shape == theirs.shape
        assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= TOLERANCE


@pytest.mark.parametrize("channels", [1, 5])
def test_other_channels(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, channels), np.uint8)
    options: dict[str, Any] = dict(channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels)
    preprocess = Preprocess(size=(16, 24), **options)
    ours = preprocess_array(pixels, preprocess)
    theirs = preprocess_image(pixels, preprocess).numpy()
    assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= TOLERANCE
