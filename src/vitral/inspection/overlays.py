"""Draw maps above images. Arrays only: the report imports this module, and no torch with it."""

import numpy as np
from PIL import Image

DARKEST = 0.12
"""Brightness of the patches that a spotlight leaves out, as in figure 6 of the paper."""
TINY = 96
"""Smaller images are enlarged pixel by pixel."""
_INFERNO = ((4, 3, 18), (38, 12, 81), (89, 16, 110), (140, 41, 99), (188, 55, 84), (227, 89, 51), (249, 140, 10))
_INFERNO += ((249, 201, 50), (252, 255, 200))
Size = tuple[int, int]
_PALETTE = np.array(_INFERNO, dtype=np.float64)


def covered_part(size: Size, grid: Size, patch: Size) -> tuple[float, float]:
    """Return the fractions of a grid (rows, columns) that an image (height, width) covers.

    They are 1 unless a stem rounds up: it makes 5 columns of 8 pixels of an image that is 33 pixels wide."""
    return size[0] / (grid[0] * patch[0]), size[1] / (grid[1] * patch[1])


def spotlight(
    pixels: np.ndarray, map: np.ndarray, side: int = 320, covered: tuple[float, float] = (1, 1)
) -> np.ndarray:
    """Return an image (H, W, C) of any bands in RGB, bright where the map is high."""
    rgb = enlarge(pixels, side)
    shares = stretch(map, rgb.shape[:2], covered)[..., None]
    return (rgb * (DARKEST + (1 - DARKEST) * np.minimum(1, 1.15 * shares))).astype(np.uint8)


def heat(pixels: np.ndarray, map: np.ndarray, side: int = 320, covered: tuple[float, float] = (1, 1)) -> np.ndarray:
    """Return an image (H, W, C) of any bands in gray, under the map in colors."""
    rgb = enlarge(pixels, side).astype(float)
    gray = 0.15 * rgb + 0.85 * rgb.mean(axis=2, keepdims=True)
    shares = stretch(map, rgb.shape[:2], covered)
    level = (0.12 + 0.88 * shares) * (len(_PALETTE) - 1)
    steps = np.arange(len(_PALETTE))
    colors = np.stack([np.interp(level, steps, _PALETTE[:, channel]) for channel in range(3)], axis=2)
    alpha = (0.28 + 0.6 * np.minimum(1, 1.3 * shares))[..., None]
    return (gray * (1 - alpha) + colors * alpha).astype(np.uint8)


def to_rgb(pixels: np.ndarray) -> np.ndarray:
    """Return an image of any number of bands as RGB: the first three, or the first one as gray."""
    return pixels[..., :3] if pixels.shape[2] >= 3 else np.repeat(pixels[..., :1], 3, axis=2)


def enlarge(pixels: np.ndarray, side: int) -> np.ndarray:
    """Return an image in RGB whose longer side has this many pixels."""
    rgb = to_rgb(pixels)
    scale, is_tiny = side / max(rgb.shape[:2]), max(rgb.shape[:2]) < TINY
    size = max(1, round(rgb.shape[1] * scale)), max(1, round(rgb.shape[0] * scale))
    image = Image.fromarray(np.ascontiguousarray(rgb))
    return np.asarray(image.resize(size, Image.Resampling.NEAREST if is_tiny else Image.Resampling.BICUBIC))


def stretch(map: np.ndarray, size: tuple[int, ...], covered: tuple[float, float] = (1, 1)) -> np.ndarray:
    """Return a map as large as an image (height, width), with the contrast of `with_contrast`.

    The image may cover a part of the map only."""
    scaled = Image.fromarray(with_contrast(map).astype(np.float32))
    box = (0, 0, map.shape[1] * covered[1], map.shape[0] * covered[0])
    return np.asarray(scaled.resize((size[1], size[0]), Image.Resampling.BILINEAR, box)).clip(0, 1)


def with_contrast(map: np.ndarray) -> np.ndarray:
    """Return a map from 0, its smallest value, to 1, its 99th percentile; a constant map is 1 everywhere.

    Without the percentile, one artifact token would leave everything else dark."""
    low, high = float(map.min()), float(np.quantile(map, 0.99))
    return np.ones_like(map) if high - low < 1e-9 * abs(high) + 1e-30 else ((map - low) / (high - low)).clip(0, 1)
