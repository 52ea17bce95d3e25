"""Preprocess applied: from a picture to the uint8 tensor that the network sees, and from there to normalised numbers.

Training, evaluation and prediction all come through here. Resizing is torch's uint8 kernel, which equals
Pillow's within a rounding; large JPEGs are decoded at a fraction of their size when that is still large enough.
"""

from functools import lru_cache
from math import floor, sqrt

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.decode import LIMITS, Header, Limits, Pixels, decode, read_header
from vitral.preprocess import Interpolation, Preprocess

Size = tuple[int, int]
Box = tuple[int, int, int, int]
"""(top, left, height, width) in pixels of the upright picture."""


def prepare(
    content: bytes | Pixels, preprocess: Preprocess, *, patch: Size = (1, 1), limits: Limits = LIMITS
) -> Tensor:
    """A file's bytes, or pixels (H, W, C), as uint8 (C, height, width) by the policy of the preprocessing.

    ``patch`` is what native sizes are rounded to (step_hw of a network's config)."""
    if isinstance(content, bytes):
        header = read_header(content, limits)
        size = resized(preprocess, (header.height, header.width), patch)
        shrink = shrink_for((header.height, header.width), size, preprocess)
        pixels = _decode(content, header, preprocess, shrink, limits)
        original = header.height, header.width
    else:
        pixels, original = content, (content.shape[0], content.shape[1])
        size = resized(preprocess, original, patch)
    image = resize(as_tensor(pixels), size, preprocess.interpolation, preprocess.antialias)
    return fit(image, preprocess)


def _decode(content: bytes, header: Header, preprocess: Preprocess, shrink: int, limits: Limits) -> Pixels:
    return decode(
        content,
        preprocess.channels,
        background=preprocess.background,
        shrink=shrink,
        limits=limits,
        header=header,
    )


def resized(preprocess: Preprocess, original: Size, patch: Size) -> Size:
    """The (height, width) that the whole picture is resized to, before anything is cut off or added."""
    (height, width), (to_height, to_width) = original, preprocess.size
    if preprocess.resize == "squash":
        return preprocess.size
    if preprocess.resize == "native":
        scale = min(1.0, sqrt(to_height * to_width / (height * width)))
        sides = ((height, patch[0]), (width, patch[1]))
        return tuple(max(1, round(side * scale / step)) * step for side, step in sides)  # type: ignore[return-value]
    if preprocess.resize == "pad":
        scale = min(to_height / height, to_width / width)
        return max(1, min(to_height, round(height * scale))), max(1, min(to_width, round(width * scale)))
    target = floor(to_height / preprocess.crop_fraction), floor(to_width / preprocess.crop_fraction)
    if target[0] * width >= target[1] * height:  # as wide as needed once the height fits
        return target[0], max(target[1], int(target[0] * width / height))
    return max(target[0], int(target[1] * height / width)), target[1]


def fit(image: Tensor, preprocess: Preprocess) -> Tensor:
    """Cuts the centre out, or adds the border."""
    height, width = preprocess.size
    if preprocess.resize == "crop":
        top, left = (round((have - want) / 2) for have, want in zip(image.shape[1:], (height, width), strict=True))
        return image[:, top : top + height, left : left + width]
    if preprocess.resize == "pad":
        down, across = height - image.shape[1], width - image.shape[2]
        border = (across // 2, across - across // 2, down // 2, down - down // 2)
        return F.pad(image, border, value=preprocess.background)
    return image


def crop_and_resize(content: bytes | Pixels, box: Box, preprocess: Preprocess, limits: Limits = LIMITS) -> Tensor:
    """A part of a picture, resized to the size of the preprocessing; the whole file is decoded as small as it may."""
    top, left, height, width = box
    if isinstance(content, bytes):
        header = read_header(content, limits)
        shrink = shrink_for((height, width), preprocess.size, preprocess)
        if header.format != "JPEG" or any(side % shrink for side in box):
            shrink = 1
        pixels = _decode(content, header, preprocess, shrink, limits)
        top, left, height, width = (side // shrink for side in box)
    else:
        pixels = content
    part = as_tensor(pixels)[:, top : top + height, left : left + width]
    return resize(part, preprocess.size, preprocess.interpolation, preprocess.antialias)


def shrink_for(size: Size, to: Size, preprocess: Preprocess) -> int:
    """By how much a JPEG may be shrunk while decoding, so that it still has to be shrunk afterwards: 1, 2, 4 or 8. Who
    asks for single pixels, not for means of them, gets those of the file."""
    if not preprocess.antialias or preprocess.interpolation == "nearest":
        return 1
    for shrink in (8, 4, 2):
        if size[0] >= shrink * to[0] and size[1] >= shrink * to[1]:
            return shrink
    return 1


def as_tensor(pixels: Pixels) -> Tensor:
    """(H, W, C) -> (C, H, W), without a copy."""
    if any(step < 0 for step in pixels.strides):  # somebody mirrored it
        pixels = np.ascontiguousarray(pixels)
    if not pixels.flags.writeable:
        pixels = pixels.copy() if pixels.base is None else np.array(pixels)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def resize(image: Tensor, size: Size, interpolation: Interpolation, antialias: bool) -> Tensor:
    """uint8 (C, H, W) to another size; its memory stays in the order of pixels, which is the fast one."""
    if tuple(image.shape[1:]) == size:
        return image
    if interpolation == "nearest":
        return F.interpolate(image[None], size, mode="nearest-exact")[0]
    return F.interpolate(image[None], size, mode=interpolation, antialias=antialias, align_corners=False)[0]


def normalize(images: Tensor, preprocess: Preprocess) -> Tensor:
    """uint8 (..., C, H, W) to the numbers that the network was trained on."""
    scale, shift = scale_and_shift(preprocess.mean, preprocess.std, images.device)
    return images.to(torch.float32).mul_(scale).add_(shift)


@lru_cache(maxsize=32)
def scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # kept, so they must serve training too
        means, deviations = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, std))
        return (1 / (255 * deviations)).float().to(device), (-means / deviations).float().to(device)
