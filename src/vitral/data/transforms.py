"""Apply a `Preprocess`: from an image to a uint8 tensor of the model's input size, and then to normalized floats.

Training, evaluation and prediction share this module. Images are resized by torch's uint8 kernel, which equals
Pillow's within rounding. Large JPEGs are decoded at a fraction of their size if that is still large enough.
"""

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.decode import decode
from vitral.data.geometry import Size, border_of, corner_of, resized_size, shrink_for
from vitral.data.headers import Pixels, read_header
from vitral.preprocess import Interpolation, Preprocess

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


def crop_or_pad(image: Tensor, preprocess: Preprocess) -> Tensor:
    """Crop the center of a resized image, or add a border, as the preprocessing requires."""
    height, width = preprocess.size
    if preprocess.resize == "crop":
        top, left = corner_of((image.shape[1], image.shape[2]), preprocess.size)
        return image[:, top : top + height, left : left + width]
    if preprocess.resize == "pad":
        (top, bottom), (left, right) = border_of((image.shape[1], image.shape[2]), preprocess.size)
        return F.pad(image, (left, right, top, bottom), value=preprocess.background)
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
