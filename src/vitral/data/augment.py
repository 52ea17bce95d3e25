"""Randomness in training, keyed by (seed, epoch, sample): the same picture in the same epoch always comes out the same,
whoever loads it and in whatever order.

    crop -> flip -> turn, slant, zoom, shift -> RandAugment -> colour -> erase
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, exp, log, radians, sin, sqrt, tan
from numbers import Integral, Real
from typing import Literal, get_args

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from vitral.data.decode import Pixels, read_header
from vitral.data.transforms import Box, crop_and_resize, prepare, shrink_for
from vitral.errors import ConfigError
from vitral.preprocess import Preprocess

Generator = np.random.Generator
Crop = Literal["none", "resized", "inception", "squashed", "shift"]
Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Augment:
    """What happens to a training picture; everything is off by default."""

    crop: Crop = "none"
    """none: as in evaluation; resized: a random part (torchvision's law); inception: a random part (TensorFlow's law,
    as in the paper's code); squashed: a random part of the picture made square (as for BiT); shift: moved by up to
    crop_shift pixels, the border mirrored."""
    crop_area: Range = (0.08, 1.0)
    """Smallest and largest part of the picture's area, for resized, inception and squashed."""
    crop_aspect: Range = (0.75, 4 / 3)
    """Narrowest and widest part, width by height; of the squashed picture for squashed."""
    crop_shift: int = 4
    """Pixels, for shift."""
    flip: float = 0.0
    """Chance of mirroring left and right."""
    rotate: float = 0.0
    """Turned by up to so many degrees."""
    shear: float = 0.0
    """Slanted by up to so many degrees."""
    zoom: float = 0.0
    """Made larger or smaller by up to this part: 0.1 is 90 to 110 %."""
    shift: float = 0.0
    """Moved by up to this part of the side."""
    randaugment: int = 0
    """How many operations of RandAugment a picture gets; 0: none."""
    randaugment_magnitude: float = 10.0
    """Their strength; 10 is the full one of the paper's code."""
    jitter: float = 0.0
    """Brightness, contrast and saturation change by up to this part."""
    erase: float = 0.0
    """Chance that a random rectangle is overwritten with noise."""

    def __post_init__(self) -> None:
        if self.crop not in get_args(Crop):
            raise ConfigError(f"crop={self.crop!r} must be none, resized, inception, squashed or shift.")
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            kind = Integral if name in ("randaugment", "crop_shift") else Real
            if not isinstance(value, kind) or isinstance(value, bool) or not least <= value <= most:
                words = "a whole number " if kind is Integral else ""
                raise ConfigError(f"{name}={value!r} must be {words}from {least:g} to {most:g}.")
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not _is_range(value, least, most):
                raise ConfigError(f"{name}={value!r} must be (smallest, largest), both from {least:g} to {most:g}.")
            object.__setattr__(self, name, tuple(value))


_BOUNDS = {
    "crop_shift": (0, 65_500),
    "flip": (0, 1),
    "rotate": (0, 180),
    "shear": (0, 89),
    "zoom": (0, 0.99),
    "shift": (0, 1),
    "randaugment": (0, 100),
    "randaugment_magnitude": (0, 20),  # beyond, posterize would keep more than eight bits
    "jitter": (0, 10),
    "erase": (0, 1),
}
_RANGES = {"crop_area": (0.001, 1), "crop_aspect": (0.01, 100)}


def _is_range(value: object, least: float, most: float) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(isinstance(side, Real) for side in value):
        return False
    return least <= value[0] <= value[1] <= most


def random_generator(seed: int, epoch: int, sample: int) -> Generator:
    """Independent randomness for each picture of each epoch; it does not depend on who asks, or when."""
    key = np.array([number & (2**64 - 1) for number in (seed, (epoch << 40) | sample)], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))  # a list of large numbers would go through float


def augment(
    content: bytes | Pixels,
    preprocess: Preprocess,
    how: Augment,
    random: Generator,
    *,
    patch: tuple[int, int] = (1, 1),
) -> Tensor:
    """A training picture as uint8 (C, height, width)."""
    if how.crop in _LAWS:
        image = crop_and_resize(content, random_box(content, preprocess, how, random), preprocess)
    else:
        image = prepare(content, preprocess, patch=patch)
        if how.crop == "shift":
            image = shifted(image, how.crop_shift, random)
    if how.flip and random.random() < how.flip:
        image = image.flip(2)
    if how.rotate or how.shear or how.zoom or how.shift:
        image = turned(image, how, preprocess, random)
    if how.randaugment or how.jitter:
        image = recoloured(image, how, random)
    if how.erase and random.random() < how.erase:
        image = erased(image, random)
    return image.contiguous()


# ---- where ----


def random_box(content: bytes | Pixels, preprocess: Preprocess, how: Augment, random: Generator) -> Box:
    if isinstance(content, bytes):
        header = read_header(content)
        height, width = header.height, header.width
    else:
        height, width = content.shape[:2]
    box = _LAWS[how.crop](height, width, how.crop_area, how.crop_aspect, random)
    return aligned(box, (height, width), preprocess)


def resized_box(height: int, width: int, area: Range, aspect: Range, random: Generator) -> Box:
    """torchvision's law: area uniform, aspect uniform in its logarithm, ten tries, else the centre."""
    for _ in range(10):
        wanted = height * width * random.uniform(*area)
        ratio = exp(random.uniform(log(aspect[0]), log(aspect[1])))
        w, h = round(sqrt(wanted * ratio)), round(sqrt(wanted / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(random.integers(0, height - h + 1)), int(random.integers(0, width - w + 1)), h, w
    ratio = min(max(width / height, aspect[0]), aspect[1])
    h, w = min(height, round(width / ratio)), min(width, round(height * ratio))
    return (height - h) // 2, (width - w) // 2, max(1, h), max(1, w)


def inception_box(height: int, width: int, area: Range, aspect: Range, random: Generator) -> Box:
    """TensorFlow's law: aspect uniform, height uniform among those that fit the area, else the whole picture."""
    for _ in range(100):
        ratio = random.uniform(*aspect)
        least = round(sqrt(area[0] * height * width / ratio))
        most = min(round(sqrt(area[1] * height * width / ratio)), height, int((width + 0.5) / ratio))
        if most < 1:
            continue
        h = int(random.integers(min(least, most), most + 1))
        w = round(h * ratio)
        if 0 < w <= width and area[0] * height * width <= h * w <= area[1] * height * width:
            return int(random.integers(0, height - h + 1)), int(random.integers(0, width - w + 1)), h, w
    return 0, 0, height, width


def squashed_box(height: int, width: int, area: Range, aspect: Range, random: Generator) -> Box:
    """torchvision's law on the picture as if it were a square, so that every part of a long one is seen."""
    side = max(height, width)
    top, left, h, w = resized_box(side, side, area, aspect, random)
    down, across = height / side, width / side
    h, w = max(1, round(h * down)), max(1, round(w * across))
    return min(round(top * down), height - h), min(round(left * across), width - w), h, w


_LAWS = {"resized": resized_box, "inception": inception_box, "squashed": squashed_box}


def aligned(box: Box, size: tuple[int, int], preprocess: Preprocess) -> Box:
    """A box that a JPEG decoded at a fraction of its size has whole pixels for: at most seven pixels off, in boxes that
    are at least twice as large as the result."""
    shrink = shrink_for(box[2:], preprocess.size, preprocess)
    if shrink == 1:
        return box
    top, left, height, width = (side // shrink * shrink for side in box)
    return top, left, height, width


def shifted(image: Tensor, pixels: int, random: Generator) -> Tensor:
    rows, columns = (_mirrored(side, min(pixels, min(image.shape[1:]) - 1), random) for side in image.shape[1:])
    return torch.from_numpy(image.numpy()[:, rows[:, None], columns])


def _mirrored(side: int, most: int, random: Generator) -> np.ndarray:
    """Which pixels take the places along a side when it is moved by up to ``most``."""
    places = np.abs(np.arange(side) + int(random.integers(0, 2 * most + 1)) - most)
    return (side - 1) - np.abs((side - 1) - places)


def turned(image: Tensor, how: Augment, preprocess: Preprocess, random: Generator) -> Tensor:
    """Turn, slant, zoom and shift in one affine map, bilinear; what comes in from outside has the corner's colour."""
    angle = radians(random.uniform(-how.rotate, how.rotate))
    scale = 1 / random.uniform(1 - how.zoom, 1 + how.zoom) if how.zoom else 1.0
    height, width = image.shape[1:]
    dx, dy = (random.uniform(-how.shift, how.shift) * side for side in (width, height))
    slant = tan(radians(random.uniform(-how.shear, how.shear))) if how.shear else 0.0
    a, b = cos(angle) * scale, sin(angle) * scale
    cx, cy = (width - 1) / 2, (height - 1) / 2
    c, d = b + slant * a, a - slant * b  # the turn after the slant
    matrix = (a, c, cx - a * (cx + dx) - c * (cy + dy), -b, d, cy + b * (cx + dx) - d * (cy + dy))
    fill = image[:, 0, 0].tolist()
    bands = [
        Image.fromarray(band.numpy()).transform(
            (width, height), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=colour
        )
        for band, colour in zip(image.contiguous(), fill, strict=True)
    ]
    return torch.from_numpy(np.stack([np.asarray(band) for band in bands]))


def erased(image: Tensor, random: Generator) -> Tensor:
    """ "Random Erasing" (Zhong et al. 2017): 2 to 33 % of the area, aspect 0.3 to 3.3, filled with noise."""
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


# ---- colour ----


def recoloured(image: Tensor, how: Augment, random: Generator) -> Tensor:
    """RandAugment and jitter, by Pillow, on grey and RGB pictures; others stay as they are."""
    if image.shape[0] not in (1, 3):
        return image
    pixels = image.permute(1, 2, 0).contiguous().numpy()
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    if how.jitter:
        kinds = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
        for index in random.permutation(len(kinds)):
            picture = kinds[index](picture).enhance(random.uniform(max(0.0, 1 - how.jitter), 1 + how.jitter))
    for _ in range(how.randaugment):
        operation = _OPERATIONS[int(random.integers(len(_OPERATIONS)))]
        picture = operation(picture, how.randaugment_magnitude / 10, random)
    changed = np.array(picture)
    return torch.from_numpy(changed[..., None] if changed.ndim == 2 else changed).permute(2, 0, 1)


Operation = Callable[[Image.Image, float, Generator], Image.Image]

# RandAugment of the paper's code (AutoAugment's sixteen operations): strength 1 is magnitude 10 there.

_GREY = 128


def _fill(picture: Image.Image) -> int | tuple[int, int, int]:
    return _GREY if picture.mode == "L" else (_GREY, _GREY, _GREY)


def _sign(random: Generator) -> int:
    return 1 if random.random() < 0.5 else -1


def _affine(picture: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    nearest = Image.Resampling.NEAREST
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, nearest, fillcolor=_fill(picture))


def _rotate(picture: Image.Image, strength: float, random: Generator) -> Image.Image:
    return picture.rotate(30 * strength * _sign(random), fillcolor=_fill(picture))


def _shear_x(picture: Image.Image, strength: float, random: Generator) -> Image.Image:
    return _affine(picture, (1, 0.3 * strength * _sign(random), 0, 0, 1, 0))


def _shear_y(picture: Image.Image, strength: float, random: Generator) -> Image.Image:
    return _affine(picture, (1, 0, 0, 0.3 * strength * _sign(random), 1, 0))


def _translate(picture: Image.Image, strength: float, random: Generator) -> float:
    """100 pixels of a 224-pixel picture, and as much of any other."""
    return 100 / 224 * max(picture.size) * strength * _sign(random)


def _translate_x(picture: Image.Image, strength: float, random: Generator) -> Image.Image:
    return _affine(picture, (1, 0, _translate(picture, strength, random), 0, 1, 0))


def _translate_y(picture: Image.Image, strength: float, random: Generator) -> Image.Image:
    return _affine(picture, (1, 0, 0, 0, 1, _translate(picture, strength, random)))


def _enhance(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    return lambda picture, strength, random: kind(picture).enhance(1.8 * strength + 0.1)


def _solarize_add(picture: Image.Image, strength: float, random: Generator) -> Image.Image:
    added = int(110 * strength)
    return picture.point(
        [min(255, value + added) if value < 128 else value for value in range(256)] * len(picture.getbands())
    )


def _cutout(picture: Image.Image, strength: float, random: Generator) -> Image.Image:
    half = int(40 / 224 * max(picture.size) * strength)
    x, y = (int(random.integers(0, side)) for side in picture.size)
    covered = picture.copy()
    covered.paste(_fill(picture), (max(0, x - half), max(0, y - half), x + half, y + half))
    return covered


_OPERATIONS = (
    lambda picture, strength, random: ImageOps.autocontrast(picture),
    lambda picture, strength, random: ImageOps.equalize(picture),
    lambda picture, strength, random: ImageOps.invert(picture),
    _rotate,
    lambda picture, strength, random: ImageOps.posterize(picture, max(1, int(4 * strength))),
    lambda picture, strength, random: ImageOps.solarize(picture, int(256 * strength)),
    _enhance(ImageEnhance.Color),
    _enhance(ImageEnhance.Contrast),
    _enhance(ImageEnhance.Brightness),
    _enhance(ImageEnhance.Sharpness),
    _shear_x,
    _shear_y,
    _translate_x,
    _translate_y,
    _cutout,
    _solarize_add,
)
