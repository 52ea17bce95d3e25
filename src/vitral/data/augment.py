"""Augment training images, with randomness keyed by (seed, epoch, sample).

An image comes out the same in the same epoch, regardless of the order and the process that loads it.

    crop -> flip -> rotate, shear, zoom, shift -> jitter -> RandAugment -> erase
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, exp, log, radians, sin, sqrt, tan
from numbers import Real
from typing import Literal, get_args

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from vitral.data.headers import Pixels, read_header
from vitral.data.randomness import Generator
from vitral.data.transforms import Box, crop_and_resize, preprocess_image, shrink_for
from vitral.errors import ConfigError, check_choice, check_int, check_number, short_repr
from vitral.preprocess import Preprocess

Crop = Literal["none", "resized", "inception", "squashed", "shift"]
Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Augment:
    """Settings of the augmentation. By default everything is off."""

    crop: Crop = "none"
    """none: crop as in evaluation. resized: crop randomly, as torchvision's RandomResizedCrop does. inception: crop as
    the paper's code does (TensorFlow). squashed: make the image square, then crop it (as for BiT). shift: shift by up
    to crop_shift pixels, with a mirrored border."""
    crop_area: Range = (0.08, 1.0)
    """Smallest and largest fraction of the area, for resized, inception and squashed."""
    crop_aspect: Range = (0.75, 4 / 3)
    """Smallest and largest aspect ratio, width by height; for squashed, of the square image."""
    crop_shift: int = 4
    """Largest shift in pixels, for shift."""
    flip: float = 0.0
    """Probability of mirroring left and right."""
    rotate: float = 0.0
    """Largest rotation in degrees, either way."""
    shear: float = 0.0
    """Largest shear in degrees, either way."""
    zoom: float = 0.0
    """Largest change of scale: 0.1 is 90 to 110 %."""
    shift: float = 0.0
    """Largest shift as a fraction of each side."""
    randaugment: int = 0
    """Number of RandAugment operations per image."""
    randaugment_magnitude: float = 10.0
    """Strength of the RandAugment operations; 10 is full strength in the paper's code."""
    jitter: float = 0.0
    """Largest relative change of brightness, contrast and saturation."""
    erase: float = 0.0
    """Probability of overwriting a random rectangle with noise."""

    def __post_init__(self) -> None:
        check_choice("crop", self.crop, get_args(Crop))
        for name, (minimum, maximum) in _BOUNDS.items():
            check = check_int if name in ("randaugment", "crop_shift") else check_number
            check(name, getattr(self, name), minimum=minimum, maximum=maximum)
        for name, (minimum, maximum) in _RANGES.items():
            value = getattr(self, name)
            is_pair = isinstance(value, list | tuple) and [isinstance(side, Real) for side in value] == [True, True]
            if not is_pair or not minimum <= value[0] <= value[1] <= maximum:
                rule = f"(smallest, largest), both from {minimum:g} to {maximum:g}"
                raise ConfigError(f"{name} must be {rule} (got {short_repr(value)}).")
            object.__setattr__(self, name, tuple(value))


_BOUNDS = {
    "crop_shift": (0, 65_500),
    "flip": (0, 1),
    "rotate": (0, 180),
    "shear": (0, 89),
    "zoom": (0, 0.99),
    "shift": (0, 1),
    "randaugment": (0, 100),
    "randaugment_magnitude": (0, 20),  # above, posterize would keep more than eight bits
    "jitter": (0, 10),
    "erase": (0, 1),
}
_RANGES = {"crop_area": (0.001, 1), "crop_aspect": (0.01, 100)}


def check_augment(augment: Augment, preprocess: Preprocess) -> None:
    """Raise ConfigError if settings would have no effect on these images, or undo their preprocessing."""
    if preprocess.channels not in (1, 3) and (augment.randaugment or augment.jitter):
        name = "randaugment" if augment.randaugment else "jitter"
        raise ConfigError(
            f"augment.{name} needs gray or RGB images (got {preprocess.channels} channels).",
            hint=f"Pass --augment.{name} 0.",
        )
    if preprocess.resize == "native" and augment.crop in _BOX_SAMPLERS:
        raise ConfigError(
            f"augment.crop={augment.crop} resizes every image to one size, which contradicts resize=native.",
            hint="Pass --augment.crop none, or --resize crop.",
        )


def augment_image(
    content: bytes | Pixels,
    preprocess: Preprocess,
    augment: Augment,
    random: Generator,
    *,
    patch: tuple[int, int] = (1, 1),
) -> Tensor:
    """Return an augmented training image as uint8 (C, height, width)."""
    if augment.crop in _BOX_SAMPLERS:
        image = crop_and_resize(content, random_box(content, preprocess, augment, random), preprocess)
    else:
        image = preprocess_image(content, preprocess, patch=patch)
        if augment.crop == "shift":
            image = shift_pixels(image, augment.crop_shift, random)
    if augment.flip and random.random() < augment.flip:
        image = image.flip(2)
    if augment.rotate or augment.shear or augment.zoom or augment.shift:
        image = random_affine(image, augment, random)
    if augment.randaugment or augment.jitter:
        image = change_colors(image, augment, random)
    if augment.erase and random.random() < augment.erase:
        image = erase_rectangle(image, random)
    return image.contiguous()


def random_box(content: bytes | Pixels, preprocess: Preprocess, augment: Augment, random: Generator) -> Box:
    """Return the random crop of an image.

    A large box is moved by at most seven pixels, to whole pixels of a JPEG that is decoded at a fraction of its size.
    """
    header, sample = read_header(content), _BOX_SAMPLERS[augment.crop]
    box = sample(header.height, header.width, augment.crop_area, augment.crop_aspect, random)
    shrink = shrink_for(box[2:], preprocess.size, preprocess)
    top, left, height, width = (side // shrink * shrink for side in box)
    return top, left, height, width


def resized_box(height: int, width: int, area: Range, aspect: Range, random: Generator) -> Box:
    """Sample as torchvision: area uniform, logarithm of the aspect uniform, ten attempts, else the center."""
    for _ in range(10):
        target = height * width * random.uniform(*area)
        ratio = exp(random.uniform(log(aspect[0]), log(aspect[1])))
        w, h = round(sqrt(target * ratio)), round(sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(random.integers(0, height - h + 1)), int(random.integers(0, width - w + 1)), h, w
    ratio = min(max(width / height, aspect[0]), aspect[1])
    h, w = min(height, round(width / ratio)), min(width, round(height * ratio))
    return (height - h) // 2, (width - w) // 2, max(1, h), max(1, w)


def inception_box(height: int, width: int, area: Range, aspect: Range, random: Generator) -> Box:
    """Sample as TensorFlow: aspect uniform, height uniform among those that fit the area, else the whole image."""
    for _ in range(100):
        ratio = random.uniform(*aspect)
        lowest = round(sqrt(area[0] * height * width / ratio))
        highest = min(round(sqrt(area[1] * height * width / ratio)), height, int((width + 0.5) / ratio))
        if highest < 1:
            continue
        h = int(random.integers(min(lowest, highest), highest + 1))
        w = round(h * ratio)
        if 0 < w <= width and area[0] * height * width <= h * w <= area[1] * height * width:
            return int(random.integers(0, height - h + 1)), int(random.integers(0, width - w + 1)), h, w
    return 0, 0, height, width


def squashed_box(height: int, width: int, area: Range, aspect: Range, random: Generator) -> Box:
    """Sample as torchvision on the image stretched to a square, so that all of a long image can be sampled."""
    side = max(height, width)
    top, left, h, w = resized_box(side, side, area, aspect, random)
    down, across = height / side, width / side
    h, w = max(1, round(h * down)), max(1, round(w * across))
    return min(round(top * down), height - h), min(round(left * across), width - w), h, w


_BOX_SAMPLERS = {"resized": resized_box, "inception": inception_box, "squashed": squashed_box}


def shift_pixels(image: Tensor, pixels: int, random: Generator) -> Tensor:
    """Shift an image by up to `pixels` in each direction; the border is mirrored."""
    maximum = min(pixels, min(image.shape[1:]) - 1)
    sources = []
    for side in image.shape[1:]:
        indices = np.abs(np.arange(side) + int(random.integers(0, 2 * maximum + 1)) - maximum)
        sources.append((side - 1) - np.abs((side - 1) - indices))
    return torch.from_numpy(image.numpy()[:, sources[0][:, None], sources[1]])


def random_affine(image: Tensor, augment: Augment, random: Generator) -> Tensor:
    """Rotate, shear, zoom and shift in one bilinear affine map. Pixels from outside get the color of the corner."""
    angle = radians(random.uniform(-augment.rotate, augment.rotate))
    scale = 1 / random.uniform(1 - augment.zoom, 1 + augment.zoom) if augment.zoom else 1.0
    height, width = image.shape[1:]
    dx, dy = (random.uniform(-augment.shift, augment.shift) * side for side in (width, height))
    slant = tan(radians(random.uniform(-augment.shear, augment.shear))) if augment.shear else 0.0
    a, b = cos(angle) * scale, sin(angle) * scale
    cx, cy = (width - 1) / 2, (height - 1) / 2
    c, d = b + slant * a, a - slant * b  # rotation after shear
    matrix = (a, c, cx - a * (cx + dx) - c * (cy + dy), -b, d, cy + b * (cx + dx) - d * (cy + dy))
    bands = []
    for pixels in image.contiguous().numpy():
        options = {"resample": Image.Resampling.BILINEAR, "fillcolor": int(pixels[0, 0])}
        bands.append(Image.fromarray(pixels).transform((width, height), Image.Transform.AFFINE, matrix, **options))
    return torch.from_numpy(np.stack(bands))


def erase_rectangle(image: Tensor, random: Generator) -> Tensor:
    """Apply Random Erasing (Zhong et al. 2017): fill 2 to 33 % of the area, aspect 0.3 to 3.3, with noise."""
    channels, height, width = image.shape
    for _ in range(10):
        area = height * width * random.uniform(0.02, 0.33)
        ratio = exp(random.uniform(log(0.3), log(3.3)))
        h, w = round(sqrt(area * ratio)), round(sqrt(area / ratio))
        if 0 < h < height and 0 < w < width:
            top, left = int(random.integers(0, height - h + 1)), int(random.integers(0, width - w + 1))
            noise = random.integers(0, 256, (channels, h, w), dtype=np.uint8)
            image = image.clone()
            image[:, top : top + h, left : left + w] = torch.from_numpy(noise)
            return image
    return image


def change_colors(image: Tensor, augment: Augment, random: Generator) -> Tensor:
    """Apply jitter and RandAugment with Pillow to a gray or RGB image."""
    pixels = image.permute(1, 2, 0).contiguous().numpy()
    changed = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    if augment.jitter:
        enhancers = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
        for index in random.permutation(len(enhancers)):
            factor = random.uniform(max(0.0, 1 - augment.jitter), 1 + augment.jitter)
            changed = enhancers[index](changed).enhance(factor)
    for _ in range(augment.randaugment):
        operation = _OPERATIONS[int(random.integers(len(_OPERATIONS)))]
        changed = operation(changed, augment.randaugment_magnitude / 10, random)
    return torch.from_numpy(np.atleast_3d(np.array(changed))).permute(2, 0, 1)


Operation = Callable[[Image.Image, float, Generator], Image.Image]


def _gray(image: Image.Image) -> int | tuple[int, int, int]:
    return 128 if image.mode == "L" else (128, 128, 128)


def _sign(random: Generator) -> int:
    return 1 if random.random() < 0.5 else -1


def _affine(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    nearest = Image.Resampling.NEAREST
    return image.transform(image.size, Image.Transform.AFFINE, matrix, nearest, fillcolor=_gray(image))


def _shift(image: Image.Image, strength: float, random: Generator) -> float:
    """Return a shift of 100 pixels for a side of 224, and in proportion for others."""
    return 100 / 224 * max(image.size) * strength * _sign(random)


def _enhance(enhancer: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    return lambda image, strength, random: enhancer(image).enhance(1.8 * strength + 0.1)


def _solarize_add(image: Image.Image, strength: float, random: Generator) -> Image.Image:
    table = [min(255, value + int(110 * strength)) if value < 128 else value for value in range(256)]
    return image.point(table * len(image.getbands()))


def _cutout(image: Image.Image, strength: float, random: Generator) -> Image.Image:
    half = int(40 / 224 * max(image.size) * strength)
    x, y = (int(random.integers(0, side)) for side in image.size)
    cut_out = image.copy()
    cut_out.paste(_gray(image), (max(0, x - half), max(0, y - half), x + half, y + half))
    return cut_out


# RandAugment of the paper's code (the sixteen operations of AutoAugment). Strength 1 is magnitude 10 there.
_OPERATIONS: tuple[Operation, ...] = (
    lambda image, strength, random: ImageOps.autocontrast(image),
    lambda image, strength, random: ImageOps.equalize(image),
    lambda image, strength, random: ImageOps.invert(image),
    lambda image, strength, random: image.rotate(30 * strength * _sign(random), fillcolor=_gray(image)),
    lambda image, strength, random: ImageOps.posterize(image, max(1, int(4 * strength))),
    lambda image, strength, random: ImageOps.solarize(image, int(256 * strength)),
    _enhance(ImageEnhance.Color),
    _enhance(ImageEnhance.Contrast),
    _enhance(ImageEnhance.Brightness),
    _enhance(ImageEnhance.Sharpness),
    lambda image, strength, random: _affine(image, (1, 0.3 * strength * _sign(random), 0, 0, 1, 0)),
    lambda image, strength, random: _affine(image, (1, 0, 0, 0.3 * strength * _sign(random), 1, 0)),
    lambda image, strength, random: _affine(image, (1, 0, _shift(image, strength, random), 0, 1, 0)),
    lambda image, strength, random: _affine(image, (1, 0, 0, 0, 1, _shift(image, strength, random))),
    _cutout,
    _solarize_add,
)
