"""Preprocess: how a picture becomes what the network was trained on, as a plain description that travels with the
weights. It holds no pictures and needs no torch; ``data/pixels.py`` applies it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from typing import Any, Literal, get_args

from vitral.errors import ConfigError, did_you_mean

Resize = Literal["squash", "crop", "pad", "native"]
Interpolation = Literal["nearest", "bilinear", "bicubic"]

HALF = (0.5, 0.5, 0.5)
"""Mean and standard deviation of Google's models: pixels from -1 to 1."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocess:
    """From picture to tensor: resize, cut out, scale to 0..1, subtract ``mean``, divide by ``std``."""

    size: tuple[int, int]
    """(height, width) of what the network sees."""
    resize: Resize = "squash"
    """squash: to the size, whatever the aspect; crop: the short side, then the centre; pad: the long side, then a
    border; native: size and aspect are kept, rounded to the patch."""
    crop_fraction: float = 1.0
    """With crop: the part of the resized picture's short side that is kept; 0.875 keeps 224 of 256."""
    interpolation: Interpolation = "bilinear"
    """How pixels are resampled."""
    antialias: bool = True
    """Whether shrinking averages over all source pixels; TensorFlow's plain resize does not."""
    mean: tuple[float, ...] = HALF
    """Subtracted from each channel, on a scale from 0 to 1."""
    std: tuple[float, ...] = HALF
    """Divides each channel."""
    channels: int = 3
    """3: RGB, 1: grey; other numbers for bands as they are in the file."""
    background: int = 255
    """What shows through transparent pixels, and fills the border of pad: 0 is black, 255 white."""

    def __post_init__(self) -> None:
        size = (self.size, self.size) if isinstance(self.size, int) else self.size
        for name, value in (("size", size), ("mean", self.mean), ("std", self.std)):
            try:
                object.__setattr__(self, name, tuple(value))
            except TypeError:
                raise ConfigError(f"{name}={value!r} must be a list of numbers.") from None
        self._check_choices()
        self._check_numbers()

    def _check_choices(self) -> None:
        for name, choices in (("resize", get_args(Resize)), ("interpolation", get_args(Interpolation))):
            value = getattr(self, name)
            if value not in choices:
                hint = did_you_mean(str(value), choices)
                raise ConfigError(f"{name}={value!r} must be one of {', '.join(choices)}.", hint=hint)

    def _check_numbers(self) -> None:
        if len(self.size) != 2 or any(type(side) is not int or side < 1 for side in self.size):
            raise ConfigError(f"size={self.size!r} must be (height, width) in whole pixels, each at least 1.")
        if type(self.channels) is not int or self.channels < 1:
            raise ConfigError(f"channels={self.channels!r} must be a whole number of at least 1.")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != self.channels or not all(_is_number(value) for value in values):
                raise ConfigError(f"{name}={values!r} must be {self.channels} numbers, one a channel.")
        if any(value <= 0 for value in self.std):
            raise ConfigError(f"std={self.std!r} must be above 0.")
        if not _is_number(self.crop_fraction) or not 0 < self.crop_fraction <= 1:
            raise ConfigError(f"crop_fraction={self.crop_fraction!r} must be above 0 and at most 1.")
        if not isinstance(self.antialias, bool):
            raise ConfigError(f"antialias={self.antialias!r} must be true or false.")
        if type(self.background) is not int or not 0 <= self.background <= 255:
            raise ConfigError(f"background={self.background!r} must be a whole number from 0 to 255.")

    def changed(self, changes: "Preprocess | Mapping[str, Any]") -> "Preprocess":
        """Another description: the one given, or this one with some fields changed."""
        if isinstance(changes, Preprocess):
            return changes
        if not isinstance(changes, Mapping):
            raise ConfigError(f"preprocess={changes!r} must be a Preprocess, or a dict of its fields.")
        known = [field.name for field in fields(Preprocess)]
        for name in changes:
            if name not in known:
                hint = did_you_mean(str(name), known) or f"There are: {', '.join(known)}."
                raise ConfigError(f"Preprocess has no field {name!r}.", hint=hint)
        return replace(self, **changes)

    def with_channels(self, channels: int) -> "Preprocess":
        """The same for another number of channels: each gets the average mean and deviation."""
        if channels == self.channels:
            return self
        mean, std = (sum(values) / len(values) for values in (self.mean, self.std))
        return replace(self, channels=channels, mean=(mean,) * channels, std=(std,) * channels)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -1e30 < value < 1e30 and isfinite(value)
