"""The sizes of images that an exported file takes. This module does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from vitral.data.geometry import Size
from vitral.errors import ConfigError
from vitral.preprocess import MAX_SIDE


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeRange:
    """Heights and widths that are multiples of a number, up to a maximum."""

    multiple_of: Size
    """(height, width)."""
    maximum: Size
    """(height, width)."""

    def __post_init__(self) -> None:
        for name in ("multiple_of", "maximum"):
            sides = cast("object", getattr(self, name))
            numbers = cast("list[object]", sides) if isinstance(sides, list | tuple) else []
            if len(numbers) != 2 or not all(type(side) is int and 1 <= side <= MAX_SIDE for side in numbers):
                raise ConfigError(f"{name} must be (height, width) of 1 to {MAX_SIDE} pixels (got {sides!r}).")
            object.__setattr__(self, name, tuple(numbers))

    @property
    def is_single(self) -> bool:
        """Return whether this is one size."""
        return self.multiple_of == self.maximum

    def __contains__(self, size: Size) -> bool:
        return all(
            0 < side <= most and side % step == 0
            for side, step, most in zip(size, self.multiple_of, self.maximum, strict=True)
        )

    def __str__(self) -> str:
        limit = f"{as_text(self.maximum)} pixels"
        if self.is_single:
            return limit
        if self.multiple_of == (1, 1):
            return f"any height and width up to {limit}"
        height, width = self.multiple_of
        steps = str(height) if height == width else f"{height} and {width}"
        return f"any height and width that are multiples of {steps}, up to {limit}"

    def nearest(self, size: Size) -> Size:
        """Return the size of the range that is nearest to another one."""
        height, width = (
            min(most // step, max(1, round(side / step))) * step
            for side, step, most in zip(size, self.multiple_of, self.maximum, strict=True)
        )
        return height, width

    def check(self, size: Size, name: str) -> None:
        """Raise ConfigError unless the file of this name takes images of a size."""
        if size not in self:
            hint = f"Use {as_text(self.nearest(size))}."
            if self.is_single:
                hint = "Export the model again with --image-size, or with --dynamic-size."
            raise ConfigError(f"{name} takes images of {self} (got {as_text(size)}).", hint=hint)


def as_text(size: Size) -> str:
    """Return "384 x 256" for (384, 256)."""
    return " x ".join(map(str, size))


def read_sizes(description: Mapping[str, Any], size: Size) -> SizeRange:
    """Return the sizes that the description of a file states; without a range, only `size`.

    Raise ConfigError or TypeError if the description is invalid.
    """
    limits: Mapping[str, Any] | None = description.get("dynamic_size")
    sizes = SizeRange(multiple_of=size, maximum=size) if limits is None else SizeRange(**limits)
    if size not in sizes:
        raise ConfigError(f"size must be one of {sizes} (got {as_text(size)}).")
    return sizes
