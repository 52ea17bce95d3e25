"""What shapes do not tell, and how it is found out: heads, and the grid of a table of positions."""

import re
from collections.abc import Iterable
from math import isqrt
from typing import Any

from vitral.errors import WeightsError
from vitral.model.sizes import SIZES

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


def count_layers(names: Iterable[str], pattern: str) -> int:
    """How many layers there are, by the number that the pattern finds in names; they must be 0, 1, 2, ..."""
    matches = (re.match(pattern, name) for name in names)
    found = {int(match[1]) for match in matches if match}
    if found != set(range(len(found))):
        missing = next(index for index in range(len(found) + 1) if index not in found)
        raise WeightsError(f"The file has {len(found)} layers up to number {max(found)}, but none numbered {missing}.")
    return len(found)


def is_square(rows: int) -> bool:
    return rows > 0 and isqrt(rows) ** 2 == rows


def find_grid(
    rows: int, ahead: tuple[int, ...], told: tuple[int, int] | None, asked: tuple[int, int] | None
) -> tuple[tuple[int, int], int]:
    """The grid of a table with this many rows, and how many of them come ahead of the patches.

    ``ahead`` holds the numbers that are possible, the likeliest first. The grid that the file or the user tells is
    right; else a square number of patches is a square grid; else it must be that of the asked image size."""
    for extras in ahead:
        patches = rows - extras
        if told:
            if patches == told[0] * told[1]:
                return told, extras
        elif is_square(patches):
            return (isqrt(patches), isqrt(patches)), extras
        elif asked and patches == asked[0] * asked[1]:
            return asked, extras
    grid = told or asked
    raise WeightsError(
        f"The table of positions has rows for {rows - ahead[0]} patches, "
        + ("which is no square number." if grid is None else f"and the grid should be {grid[0]} x {grid[1]}."),
        hint="Say its grid: position_grid=(rows, columns), or image_size=(height, width) of the original.",
    )


def one_or_two(pair: tuple[int, int]) -> int | tuple[int, int]:
    """A square by its side."""
    return pair[0] if pair[0] == pair[1] else pair


def pair_of(size: Any) -> tuple[int, int] | None:
    """(height, width) of a size as files have it: one number or two; None for anything else."""
    if isinstance(size, int) and not isinstance(size, bool):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return size[0], size[1]
    return None


def asked_grid(asked: dict[str, Any], step: tuple[int, int]) -> tuple[int, int] | None:
    """The grid of the image size that was asked for; ``step`` is the pixels of a patch."""
    size = pair_of(asked.get("image_size"))
    return None if size is None else (-(-size[0] // step[0]), -(-size[1] // step[1]))
