"""Preprocess: the plain description of how an image becomes the tensor that a network was trained on.

It travels with the weights and does not import torch; `vitral.data.transforms` applies it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast, get_args

from vitral.errors import ConfigError, check_bool, check_choice, check_field_names, check_int, check_number, short_repr

Resize = Literal["squash", "crop", "pad", "native"]
Interpolation = Literal["nearest", "bilinear", "bicubic"]

HALF = (0.5, 0.5, 0.5)
"""Mean and standard deviation of Google's models: pixels from -1 to 1."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MAX_SIDE = 16384
"""Largest side in pixels, as in `vitral.model.config`: larger images would exhaust the memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocess:
    """From image to tensor: resize, crop or pad, scale to 0..1, subtract `mean`, divide by `std`."""

    size: tuple[int, int]
    """(height, width) of the tensor."""
    resize: Resize = "squash"
    """squash: to the size, ignoring the aspect ratio; crop: the short side, then the center; pad: the long side, then a
    border; native: keep size and aspect ratio, rounded to the patch size."""
    crop_fraction: float = 1.0
    """With crop: the fraction of the resized image's short side to keep; 0.875 keeps 224 of 256."""
    interpolation: Interpolation = "bilinear"
    """Interpolation of the resize."""
    antialias: bool = True
    """Average over all source pixels when shrinking; TensorFlow's plain resize does not."""
    mean: tuple[float, ...] = HALF
    """Mean per channel, on a scale from 0 to 1."""
    std: tuple[float, ...] = HALF
    """Standard deviation per channel, on the same scale."""
    channels: int = 3
    """3: RGB, 1: gray; other numbers: the bands of the file as they are."""
    background: int = 255
    """Gray level behind transparent pixels and in the border of pad, from 0 (black) to 255 (white)."""

    def __post_init__(self) -> None:
        size = (self.size, self.size) if isinstance(self.size, int) else self.size
        for name, values in (("size", size), ("mean", self.mean), ("std", self.std)):
            object.__setattr__(self, name, _to_tuple(name, values))
        check_choice("resize", self.resize, get_args(Resize))
        check_choice("interpolation", self.interpolation, get_args(Interpolation))
        check_bool("antialias", self.antialias)
        check_int("channels", self.channels, minimum=1)
        check_number("crop_fraction", self.crop_fraction, above=0, maximum=1)
        check_int("background", self.background, minimum=0, maximum=255)
        if len(self.size) != 2:
            raise ConfigError(f"size must be (height, width) (got {short_repr(self.size)}).")
        for side in self.size:
            check_int("each side of size", side, minimum=1, maximum=MAX_SIDE)
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != self.channels:
                got = f"{short_repr(values)} for channels={self.channels}"
                raise ConfigError(
                    f"{name} must have one number per channel (got {got}).",
                    hint=f"Pass mean and std, or use Preprocess(...).with_channels({self.channels}).",
                )
            for value in values:
                check_number(f"each of {name}", value, above=0 if name == "std" else None)

    def with_changes(self, changes: "Preprocess | Mapping[str, Any]") -> "Preprocess":
        """Return `changes` if it is a Preprocess, else this one with the given fields changed."""
        if isinstance(changes, Preprocess):
            return changes
        if not isinstance(cast("object", changes), Mapping):
            raise ConfigError(f"preprocess must be a Preprocess or a dict of its fields (got {short_repr(changes)}).")
        check_field_names(changes, of=Preprocess)
        return replace(self, **changes)

    def with_channels(self, channels: int) -> "Preprocess":
        """Return the same for another number of channels, each with the average mean and standard deviation."""
        if channels == self.channels:
            return self
        mean, std = (sum(values) / len(values) for values in (self.mean, self.std))
        return replace(self, channels=channels, mean=(mean,) * channels, std=(std,) * channels)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for a file."""
        return asdict(self)


def _to_tuple(name: str, values: object) -> tuple[object, ...]:
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise ConfigError(f"{name} must be a list of numbers (got {short_repr(values)}).")
    return tuple(cast("Iterable[object]", values))
