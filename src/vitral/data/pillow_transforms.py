"""Preprocess images with Pillow and NumPy, for commands that run an exported file and start without torch.

Pixels equal those of `vitral.data.transforms` within `TOLERANCE`: torch's uint8 kernel rounds differently than Pillow.
"""

import numpy as np
from PIL import Image

from vitral.data.decode import decode
from vitral.data.geometry import Size, border_of, corner_of, resized_size, shrink_for
from vitral.data.headers import Pixels, read_header
from vitral.preprocess import Interpolation, Preprocess

TOLERANCE = 1
"""Largest difference of a pixel, of 255 levels."""
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_CUBIC = -0.75
"""The coefficient of torch's bicubic interpolation without antialiasing."""


def preprocess_array(content: bytes | Pixels, preprocess: Preprocess, *, patch: Size = (1, 1)) -> np.ndarray:
    """Return an image (the bytes of a file, or pixels (H, W, C)) as uint8 (C, height, width), resized and cropped.

    Native sizes are rounded to multiples of `patch`. Raises BadImageError.
    """
    header = read_header(content)
    original = header.height, header.width
    size = resized_size(preprocess, original, patch)
    shrink = shrink_for(original, size, preprocess)
    pixels = decode(content, preprocess.channels, background=preprocess.background, shrink=shrink, header=header)
    image = resize_array(pixels, size, preprocess.interpolation, preprocess.antialias)
    return np.ascontiguousarray(_crop_or_pad(image, preprocess).transpose(2, 0, 1))


def resize_array(pixels: Pixels, size: Size, interpolation: Interpolation, antialias: bool) -> Pixels:
    """Resize uint8 (H, W, C) pixels."""
    if pixels.shape[:2] == size:
        return pixels
    if interpolation == "nearest":
        rows, columns = (_nearest(side, target) for side, target in zip(pixels.shape[:2], size, strict=True))
        return pixels[rows][:, columns]
    if not antialias:
        return _interpolate(pixels, size, interpolation)
    height, width = size
    resample = _FILTERS[interpolation]
    if pixels.shape[2] == 3:
        return np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).resize((width, height), resample))
    bands = [np.ascontiguousarray(pixels[..., band]) for band in range(pixels.shape[2])]
    return np.stack([np.asarray(Image.fromarray(band).resize((width, height), resample)) for band in bands], axis=2)


def _crop_or_pad(image: Pixels, preprocess: Preprocess) -> Pixels:
    height, width = preprocess.size
    if preprocess.resize == "crop":
        top, left = corner_of(image.shape[:2], preprocess.size)
        return image[top : top + height, left : left + width]
    if preprocess.resize == "pad":
        rows, columns = border_of(image.shape[:2], preprocess.size)
        return np.pad(image, (rows, columns, (0, 0)), constant_values=preprocess.background)
    return image


def _nearest(side: int, target: int) -> np.ndarray:
    """Return the source pixel of each target pixel: that under its center."""
    return np.minimum(((np.arange(target) + 0.5) * side / target).astype(int), side - 1)


def _interpolate(pixels: Pixels, size: Size, interpolation: Interpolation) -> Pixels:
    """Resize without antialiasing: each pixel is a mean of the two or four nearest ones in each direction."""
    rows, row_weights = _taps(pixels.shape[0], size[0], interpolation)
    columns, column_weights = _taps(pixels.shape[1], size[1], interpolation)
    taps = range(rows.shape[1])
    wide = sum(pixels[:, columns[:, tap]] * column_weights[:, tap, None] for tap in taps)
    image = np.asarray(wide) if interpolation == "bilinear" else _to_levels(wide)  # as torch rounds
    return _to_levels(sum(image[rows[:, tap]] * row_weights[:, tap, None, None] for tap in taps))


def _to_levels(values: "np.ndarray | int") -> Pixels:
    return np.asarray(values).round().clip(0, 255).astype(np.uint8)


def _taps(side: int, target: int, interpolation: Interpolation) -> tuple[np.ndarray, np.ndarray]:
    """Return the (target, taps) source pixels of each target pixel and their weights."""
    center = (np.arange(target) + 0.5) * side / target - 0.5
    if interpolation == "bilinear":
        center = center.clip(0)
    first = np.floor(center).astype(int)
    fraction = (center - first).astype(np.float32)
    if interpolation == "bilinear":
        offsets, weights = np.array([0, 1]), np.stack([1 - fraction, fraction], axis=1)
    else:
        offsets = np.array([-1, 0, 1, 2])
        weights = _cubic_weights(np.abs(fraction[:, None] - offsets))
    return (first[:, None] + offsets).clip(0, side - 1), weights.astype(np.float32)


def _cubic_weights(distance: np.ndarray) -> np.ndarray:
    a = _CUBIC
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = a * (((distance - 5) * distance + 8) * distance - 4)
    return np.where(distance <= 1, near, far)
