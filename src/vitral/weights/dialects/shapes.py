"""What names and shapes tell in every dialect, and how to find out what they do not: heads, and the grid of a table."""

import re
from collections.abc import Iterable
from math import isqrt
from typing import Any

from vitral.errors import WeightsError
from vitral.model.sizes import SIZES
from vitral.weights.formats.tensor_file import TensorFile

Pair = tuple[int, int]
"""Height before width, rows before columns."""

# width, depth, mlp_width -> heads, of published networks that have no name here
_ALSO_PUBLISHED = {
    (512, 12, 2048): 8,  # big_vision's M
    (1152, 27, 4304): 16,  # So400m
    (1536, 40, 6144): 16,  # g-opt
    (1536, 48, 8192): 16,  # G-opt
    (1792, 56, 15360): 16,  # e
}
PUBLISHED_HEADS = {(width, depth, mlp): heads for width, depth, heads, mlp in SIZES.values()} | _ALSO_PUBLISHED


def guess_heads(width: int, depth: int, mlp_width: int) -> tuple[int, str]:
    """Heads of a file that keeps queries, keys and values in one matrix, and where the number is from."""
    if heads := PUBLISHED_HEADS.get((width, depth, mlp_width)):
        return heads, f"heads={heads}: of the published size with width {width}, depth {depth}, MLP width {mlp_width}"
    if width % 64:
        raise WeightsError(
            f"The file does not tell the number of heads, and width {width} is no multiple of 64 and of no published "
            "size.",
            hint="Say it: heads=...",
        )
    return (
        width // 64,
        f"heads={width // 64}: 64 numbers a head, as the file does not tell and the size is not published",
    )


def settle_heads(fields: dict[str, Any], told: int | None, asked: dict[str, Any], assumed: dict[str, str]) -> None:
    """Adds ``heads``: asked for, else told by the file, else guessed, which is noted."""
    if "heads" in asked:
        fields["heads"] = asked["heads"]
    elif told is not None:
        if type(told) is not int or told < 1:
            raise WeightsError(f"The file's own config says {told!r} heads, which is no number of heads.")
        fields["heads"] = told
    else:
        fields["heads"], assumed["heads"] = guess_heads(fields["width"], fields["depth"], fields["mlp_width"])


def count_layers(names: Iterable[str], before: str, after: str = ".") -> int:
    """How many layers there are, by the number that names have between the two; they must be 0, 1, 2, ..."""
    matches = (re.match(rf"{re.escape(before)}(\d+){re.escape(after)}", name) for name in names)
    found = {int(match[1]) for match in matches if match}
    if found != set(range(len(found))):
        missing = next(index for index in range(len(found) + 1) if index not in found)
        raise WeightsError(f"The file has {len(found)} layers up to number {max(found)}, but none numbered {missing}.")
    return len(found)


def find_sizes(file: TensorFile, kernel: str, layers: str, hidden: str) -> dict[str, Any]:
    """The fields that the patch convolution and the layers' names and MLPs tell."""
    width, channels, height, across = file.shape(f"{kernel}.weight", 4)
    return dict(
        width=width,
        depth=count_layers(file.shapes, layers),
        mlp_width=file.shape(f"{layers}0.{hidden}.weight", 2)[0],
        patch_size=one_or_two((height, across)),
        channels=channels,
    )


def is_square(rows: int) -> bool:
    return rows > 0 and isqrt(rows) ** 2 == rows


def find_grid(
    rows: int, ahead: tuple[int, ...], asked: dict[str, Any], step: Pair, told: Pair | None = None
) -> tuple[Pair, int]:
    """The grid of a table with this many rows, and how many of them come ahead of the patches.

    ``ahead`` holds the numbers that are possible, the likeliest first; ``step`` is the pixels of a patch. The grid that
    the user or the file (``told``) tells is right; else a square number of patches is a square grid; else it must be
    that of the asked image size."""
    told, wanted = pair_of(asked.get("position_grid")) or told, asked_grid(asked, step)
    for extras in ahead:
        patches = rows - extras
        if told:
            if patches == told[0] * told[1]:
                return told, extras
        elif is_square(patches):
            return (isqrt(patches), isqrt(patches)), extras
        elif wanted and patches == wanted[0] * wanted[1]:
            return wanted, extras
    grid = told or wanted
    raise WeightsError(
        f"The table of positions has rows for {rows - ahead[0]} patches, "
        + ("which is no square number." if grid is None else f"and the grid should be {grid[0]} x {grid[1]}."),
        hint="Say its grid: position_grid=(rows, columns), or image_size=(height, width) of the original.",
    )


def one_or_two(pair: Pair) -> int | Pair:
    """A square by its side."""
    return pair[0] if pair[0] == pair[1] else pair


def image_of(grid: Pair, step: Pair) -> Pair:
    """The pixels of a grid of patches."""
    return grid[0] * step[0], grid[1] * step[1]


def pair_of(size: Any) -> Pair | None:
    """(height, width) of a size as files have it: one number or two; None for anything else."""
    if isinstance(size, int) and not isinstance(size, bool):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return size[0], size[1]
    return None


def asked_grid(asked: dict[str, Any], step: Pair) -> Pair | None:
    """The grid of the image size that was asked for; ``step`` is the pixels of a patch."""
    size = pair_of(asked.get("image_size"))
    return None if size is None else (-(-size[0] // step[0]), -(-size[1] // step[1]))
