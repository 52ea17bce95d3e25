"""Apply a `Preprocess`: from an image to a uint8 tensor of the model's input size, and then to normalized floats.

Training, evaluation and prediction share this module. Images are resized by torch's uint8 kernel, which equals
Pillow's within rounding. Large JPEGs are decoded at a fraction of their size if that is still large enough.
"""

from functools import lru_cache
from math import floor, sqrt

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.decode import decode
from vitral.data.headers import Pixels, read_header
from vitral.preprocess import Interpolation, Preprocess

Size = tuple[int, int]
Box = tuple[int, int, int, int]
"""(top, left, height, width) in pixels of the upright image."""


def preprocess_image(content: bytes | Pixels, preprocess: Preprocess, *, patch: Size = (1, 1)) -> Tensor:
    """Return an image (the bytes of a file, or pixels (H, W, C)) as uint8 (C, height, width), resized and cropped.

    Native sizes are rounded to multiples of `patch` (`ViTConfig.step_hw`). Raises BadImageError.
    """
    header = read_header(content)
    original = header.height, header.width
    size = resized_size(preprocess, original, patch)
    shrink = shrink_for(original, size, preprocess)
    pixels = decode(content, preprocess.channels, background=preprocess.background, shrink=shrink, header=header)
    image = resize(as_tensor(pixels), size, preprocess.interpolation, preprocess.antialias)
    return crop_or_pad(image, preprocess)


def resized_size(preprocess: Preprocess, original: Size, patch: Size) -> Size:
    """Return the (height, width) that the whole image is resized to, before it is cropped or padded."""
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
    if target[0] * width >= target[1] * height:  # wide enough once the height fits
        return target[0], max(target[1], int(target[0] * width / height))
    return max(target[0], int(target[1] * height / width)), target[1]


def crop_or_pad(image: Tensor, preprocess: Preprocess) -> Tensor:
    """Crop the center of a resized image, or add a border, as the preprocessing requires."""
    height, width = preprocess.size
    if preprocess.resize == "crop":
        top, left = (round((side - target) / 2) for side, target in zip(image.shape[1:], (height, width), strict=True))
        return image[:, top : top + height, left : left + width]
    if preprocess.resize == "pad":
        down, across = height - image.shape[1], width - image.shape[2]
        border = (across // 2, across - across // 2, down // 2, down - down // 2)
        return F.pad(image, border, value=preprocess.background)
    return image


def crop_and_resize(content: bytes | Pixels, box: Box, preprocess: Preprocess) -> Tensor:
    """Return the part of an image inside the box, resized to `preprocess.size`."""
    header = read_header(content)
    shrink = shrink_for(box[2:], preprocess.size, preprocess)
    if header.format != "JPEG" or any(side % shrink for side in box):
        shrink = 1
    top, left, height, width = (side // shrink for side in box)
    pixels = decode(content, preprocess.channels, background=preprocess.background, shrink=shrink, header=header)
    crop = as_tensor(pixels)[:, top : top + height, left : left + width]
    return resize(crop, preprocess.size, preprocess.interpolation, preprocess.antialias)


def shrink_for(size: Size, target: Size, preprocess: Preprocess) -> int:
    """Return the factor by which a JPEG may be shrunk while decoding and still be at least `target`: 1, 2, 4 or 8.

    Without antialiasing it is 1, because resizing then picks single pixels of the file.
    """
    if not preprocess.antialias or preprocess.interpolation == "nearest":
        return 1
    for shrink in (8, 4, 2):
        if size[0] >= shrink * target[0] and size[1] >= shrink * target[1]:
            return shrink
    return 1


def as_tensor(pixels: Pixels) -> Tensor:
    """Return (H, W, C) pixels as a (C, H, W) tensor, without a copy if possible."""
    if any(step < 0 for step in pixels.strides):  # a mirrored view
        pixels = np.ascontiguousarray(pixels)
    if not pixels.flags.writeable:
        pixels = np.array(pixels)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def resize(image: Tensor, size: Size, interpolation: Interpolation, antialias: bool) -> Tensor:
    """Resize a uint8 (C, H, W) image. Its memory stays in channels-last order, which is fast."""
    if tuple(image.shape[1:]) == size:
        return image
    if interpolation == "nearest":
        return F.interpolate(image[None], size, mode="nearest-exact")[0]
    return F.interpolate(image[None], size, mode=interpolation, antialias=antialias, align_corners=False)[0]


def normalize(images: Tensor, preprocess: Preprocess) -> Tensor:
    """Return uint8 (..., C, H, W) images as floats: scaled to 0..1, minus `mean`, divided by `std`."""
    scale, shift = scale_and_shift(preprocess.mean, preprocess.std, images.device)
    return images.to(torch.float32).mul_(scale).add_(shift)


@lru_cache(maxsize=32)
def scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (scale, shift) tensors (C, 1, 1) such that uint8 * scale + shift is normalized."""
    with torch.inference_mode(False):  # cached, so they must be usable in training, too
        means, stds = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, std))
        return (1 / (255 * stds)).float().to(device), (-means / stds).float().to(device)
