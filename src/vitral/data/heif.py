"""Look inside HEIC and AVIF files, which are trees of boxes: their format, the size that they claim, and their end."""

import struct
from collections.abc import Iterator

_AVIF_BRANDS = {b"avif", b"avis"}
_HEIF_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"}
_CONTAINERS = {b"meta": 4, b"iprp": 0, b"ipco": 0}
"""Boxes on the way to the sizes of images, with the bytes before their first box."""
_MAX_BOXES = 10_000


def find_format(content: bytes) -> str | None:
    """Return AVIF, HEIF (HEIC and its relatives), or None, by the brands at the start of a file."""
    if content[4:8] != b"ftyp":
        return None
    end = min(int.from_bytes(content[:4], "big"), 256)
    brands = {content[8:12], *(content[at : at + 4] for at in range(16, end, 4))}
    if brands & _AVIF_BRANDS:
        return "AVIF"
    return "HEIF" if brands & _HEIF_BRANDS else None


def read_size(content: bytes) -> tuple[int, int]:
    """Return (height, width) of the largest image that the first bytes of a file name, or (0, 0)."""
    sizes = [(0, 0)]
    ranges = [(0, len(content))]
    while ranges:
        for kind, start, end in _boxes(content, *ranges.pop()):
            if kind in _CONTAINERS:
                ranges.append((start + _CONTAINERS[kind], min(end, len(content))))
            elif kind == b"ispe":
                width, height = struct.unpack_from(">II", content, start + 4)
                sizes.append((height, width))
    return max(sizes, key=lambda size: size[0] * size[1])


def is_cut_off(content: bytes) -> bool:
    """Return whether a box at the top reaches beyond the end of the file."""
    return any(end > len(content) for _, _, end in _boxes(content, 0, len(content)))


def _boxes(content: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the type of each box between two offsets, and the offsets of its content."""
    for _ in range(_MAX_BOXES):
        if start + 8 > end:
            return
        size, kind = struct.unpack_from(">I4s", content, start)
        head = 8
        if size == 1:  # a longer size follows
            size, head = struct.unpack_from(">Q", content, start + 8)[0], 16
        elif size == 0:  # up to the end
            size = end - start
        if size < head:
            return
        yield kind, start + head, start + size
        start += size
