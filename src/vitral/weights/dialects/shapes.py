"""Infer config fields from names and shapes, and from tables of published models where shapes do not suffice."""

import re
from collections.abc import Iterable, Mapping
from math import isqrt
from typing import Any

from vitral.errors import WeightsError, short_repr
from vitral.model.sizes import SIZES
from vitral.weights.dialects.plan import Overrides
from vitral.weights.formats.tensor_file import TensorFile

Pair = tuple[int, int]
"""(height, width) or (rows, columns)."""
# width, depth, mlp_width -> heads of published models that have no name in vitral
_MORE_PUBLISHED_HEADS = {
    (512, 12, 2048): 8,  # big_vision's M
    (1152, 27, 4304): 16,  # So400m
    (1536, 40, 6144): 16,  # g-opt
    (1536, 48, 8192): 16,  # G-opt
    (1792, 56, 15360): 16,  # e
}
PUBLISHED_HEADS = {(width, depth, mlp): heads for width, depth, heads, mlp in SIZES.values()} | _MORE_PUBLISHED_HEADS


def add_heads(fields: dict[str, Any], stated: object, overrides: Overrides, assumed: dict[str, str]) -> None:
    """Add ``heads`` to the fields: from the caller, else as the file states, else guessed and noted as assumed."""
    if "heads" in overrides:
        fields["heads"] = overrides["heads"]
        return
    if stated is not None:
        if type(stated) is not int or stated < 1:
            raise WeightsError(f"config.json states an invalid number of heads (got {short_repr(stated)}).")
        fields["heads"] = stated
        return
    width, depth, mlp_width = fields["width"], fields["depth"], fields["mlp_width"]
    heads = PUBLISHED_HEADS.get((width, depth, mlp_width))
    reason = f"as in the published model with width {width}, depth {depth}, MLP width {mlp_width}"
    if heads is None:
        heads, reason = width // 64, "64 channels per head; the file does not state it"
        if width % 64:
            raise WeightsError(
                f"The file does not state the number of heads, and width {width} is neither a multiple of 64 nor that "
                "of a published model.",
                hint="Pass heads=...",
            )
    fields["heads"], assumed["heads"] = heads, f"heads={heads}: {reason}"


def count_layers(names: Iterable[str], before: str, after: str = ".") -> int:
    """Return the number of layers, from the numbers that names have between two texts; they must be 0, 1, 2, ..."""
    matches = (re.match(rf"{re.escape(before)}(\d+){re.escape(after)}", name) for name in names)
    numbers = {int(match[1]) for match in matches if match}
    if numbers != set(range(len(numbers))):
        missing = next(index for index in range(len(numbers) + 1) if index not in numbers)
        raise WeightsError(f"The file has {len(numbers)} layers up to number {max(numbers)}, but no layer {missing}.")
    return len(numbers)


def count_units(names: Iterable[str], pattern: str) -> tuple[int, ...]:
    """Return the residual units per stage of a ResNet; the pattern's groups are stage and unit."""
    units: dict[int, set[str]] = {}
    for name in names:
        if match := re.match(pattern, name):
            units.setdefault(int(match[1]), set()).add(match[2])
    return tuple(len(units[stage]) for stage in sorted(units))


def width_factor(root_channels: int) -> int | float:
    """Return the width factor of a ResNet from the output channels of its root convolution."""
    return root_channels // 64 if root_channels % 64 == 0 else root_channels / 64


def infer_sizes(file: TensorFile, kernel: str, layers: str, hidden: str) -> dict[str, Any]:
    """Return the fields that the patch convolution, the layer names and an MLP determine."""
    width, channels, patch_height, patch_width = file.shape(f"{kernel}.weight", 4)
    return dict(
        width=width,
        depth=count_layers(file.shapes, layers),
        mlp_width=file.shape(f"{layers}0.{hidden}.weight", 2)[0],
        patch_size=as_size((patch_height, patch_width)),
        channels=channels,
    )


def unused_tensors(file: TensorFile, reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the tensors whose names start with one of the patterns, with its reason for ignoring them."""
    return {name: reason for name in file.shapes for pattern, reason in reasons.items() if re.match(pattern, name)}


def is_square(rows: int) -> bool:
    """Return whether so many patches can form a square grid."""
    return rows > 0 and isqrt(rows) ** 2 == rows


def infer_grid(
    rows: int, token_rows: tuple[int, ...], overrides: Overrides, patch: Pair, stated: Pair | None = None
) -> tuple[Pair, int]:
    """Return the grid of a position table, and how many of its rows belong to tokens ahead of the patches.

    ``token_rows`` lists the possible numbers of such rows, the likeliest first; ``patch`` is the size of a patch in
    pixels. A grid that the caller passes, or else the file states, decides. Otherwise the grid is square, or that of
    the image size that the caller passes.
    """
    stated, requested = as_pair(overrides.get("position_grid")) or stated, requested_grid(overrides, patch)
    for extra in token_rows:
        patches = rows - extra
        if stated:
            if patches == stated[0] * stated[1]:
                return stated, extra
        elif is_square(patches):
            return (isqrt(patches), isqrt(patches)), extra
        elif requested and patches == requested[0] * requested[1]:
            return requested, extra
    grid = stated or requested
    expected = "a square number" if grid is None else f"a grid of {grid[0]} x {grid[1]}"
    raise WeightsError(
        f"The position table has rows for {rows - token_rows[0]} patches (expected {expected}).",
        hint="Pass its grid as position_grid=(rows, columns), or image_size=(height, width) of the original.",
    )


def image_size(grid: Pair, patch: Pair) -> int | Pair:
    """Return the image size of a grid of patches."""
    return as_size((grid[0] * patch[0], grid[1] * patch[1]))


def requested_grid(overrides: Overrides, patch: Pair) -> Pair | None:
    """Return the grid of the image size that the caller passes, if any."""
    size = as_pair(overrides.get("image_size"))
    return None if size is None else (-(-size[0] // patch[0]), -(-size[1] // patch[1]))


def as_pair(size: object) -> Pair | None:
    """Return (height, width) of a size in a file, which is one integer or two; None for anything else."""
    if isinstance(size, int) and not isinstance(size, bool):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return size[0], size[1]
    return None


def as_size(pair: Pair) -> int | Pair:
    """Return a square's side, or the pair itself."""
    return pair[0] if pair[0] == pair[1] else pair
