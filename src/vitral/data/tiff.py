"""Read TIFFs of many bands, as instruments and satellites produce them.

Pillow reads TIFFs of one, three or four bands. This module appends another directory to the file that describes the
same bytes as gray images, which Pillow can read.

    bands side by side in each pixel (chunky)    -> one gray image, wider by the number of bands
    one band after the other (separate planes)   -> one gray image per band
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _SAMPLES, _PLANES = 256, 257, 258, 259, 262, 277, 284
_STRIPS, _ROWS, _STRIP_BYTES, _PREDICTOR = 273, 278, 279, 317
_TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES = 322, 323, 324, 325
_EXTRA, _SAMPLE_FORMAT = 338, 339
_KEPT = (
    *(_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _STRIPS, _SAMPLES, _ROWS, _STRIP_BYTES, _PLANES, _PREDICTOR),
    *(_TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES, _EXTRA, _SAMPLE_FORMAT),
)
_INTEGER_TYPES = {1: "B", 3: "H", 4: "I"}
_GRAY, _RGB = 1, 2
_HORIZONTAL_DIFFERENCES = 2
_PREDICTING_COMPRESSIONS = (5, 8, 32946, 50000)  # LZW, both kinds of deflate, Zstandard; others have no predictor
_MAX_VALUES = 1_000_000

Tags = Mapping[int, tuple[int, ...]]
Open = Callable[[bytes], Image.Image]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bands:
    """Describe a TIFF whose bands Pillow cannot read directly."""

    order: str
    """Byte order, as in `struct`: < or >."""
    tags: Tags
    count: int

    @property
    def size(self) -> tuple[int, int]:
        """Return (height, width)."""
        return self.tags[_HEIGHT][0], self.tags[_WIDTH][0]

    @property
    def is_color(self) -> bool:
        """Return whether the first three bands are red, green and blue."""
        return self.tags[_PHOTOMETRIC][0] == _RGB


def find_bands(content: bytes) -> Bands | None:
    """Return the bands of a TIFF, or None if Pillow can read (or must judge) the file as it is."""
    try:
        order = {b"II": "<", b"MM": ">"}[content[:2]]
        tags = _read_directory(content, order)
        count, photometric, extra = tags.get(_SAMPLES, (1,))[0], tags[_PHOTOMETRIC][0], tags.get(_EXTRA, ())
        usual = {_GRAY: 1, _RGB: 3}.get(photometric, count)
        is_transparent = count == usual + 1 and extra != (0,)
        if count <= usual or is_transparent or not {_WIDTH, _HEIGHT, _BITS} <= tags.keys():
            return None
        if len(set(tags[_BITS])) > 1 or len(set(tags.get(_SAMPLE_FORMAT, ()))) > 1:
            return None
    except (KeyError, IndexError, struct.error):
        return None
    return Bands(order=order, tags=tags, count=count)


def read_size(content: bytes) -> tuple[int, int]:
    """Return (height, width) of the first frame. KeyError or struct.error for a damaged directory."""
    tags = _read_directory(content, {b"II": "<", b"MM": ">"}[content[:2]])
    return tags[_HEIGHT][0], tags[_WIDTH][0]


def _read_directory(content: bytes, order: str) -> Tags:
    (start,) = struct.unpack_from(f"{order}I", content, 4)
    (entries,) = struct.unpack_from(f"{order}H", content, start)
    tags = {}
    for entry in range(entries):
        at = start + 2 + 12 * entry
        tag, field_type, number = struct.unpack_from(f"{order}HHI", content, at)
        if tag in tags:
            raise KeyError(tag)  # forged: repeated tags could keep the reader busy
        if field_type in _INTEGER_TYPES and tag in _KEPT and 0 < number <= _MAX_VALUES:
            layout, values_at = f"{order}{number}{_INTEGER_TYPES[field_type]}", at + 8
            if struct.calcsize(layout) > 4:
                (values_at,) = struct.unpack_from(f"{order}I", content, values_at)
            tags[tag] = struct.unpack_from(layout, content, values_at)
    return tags


def read_bands(content: bytes, bands: Bands, open_image: Open) -> np.ndarray:
    """Return (H, W, bands) in the type of the file."""
    compression, predictor, planes = (bands.tags.get(tag, (1,))[0] for tag in (_COMPRESSION, _PREDICTOR, _PLANES))
    if bands.order == ">" and bands.tags[_BITS][0] == 32 and compression != 1:
        raise ValueError("compressed big-endian 32-bit values are not supported")  # Pillow swaps their bytes

    def read(changes: Tags) -> np.ndarray:
        pixels = np.asarray(open_image(_as_gray(content, bands, changes)))
        return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)

    if planes != 1:
        return np.stack([read(_plane(bands, index)) for index in range(bands.count)], axis=2)
    height, width = bands.size
    wide = {tag: (bands.tags[tag][0] * bands.count,) for tag in (_WIDTH, _TILE_WIDTH) if tag in bands.tags}
    pixels = read({**wide, _PREDICTOR: (1,)}).reshape(height, width, bands.count)
    if predictor == 1 or compression not in _PREDICTING_COMPRESSIONS:
        return pixels
    if predictor != _HORIZONTAL_DIFFERENCES or pixels.dtype.kind == "f":
        raise ValueError(f"predictor {predictor} of {pixels.dtype} is not supported")
    step = bands.tags.get(_TILE_WIDTH, (width,))[0]
    tiles = [pixels[:, left : left + step] for left in range(0, width, step)]
    return np.concatenate([tile.cumsum(axis=1, dtype=pixels.dtype) for tile in tiles], axis=1)


def _plane(bands: Bands, index: int) -> Tags:
    """Return the strips or tiles of one of several planes."""
    data = {}
    for tag in (_STRIPS, _STRIP_BYTES, _TILES, _TILE_BYTES):
        if tag in bands.tags:
            each = len(bands.tags[tag]) // bands.count
            data[tag] = bands.tags[tag][index * each : (index + 1) * each]
    return data


def _as_gray(content: bytes, bands: Bands, changes: Tags) -> bytes:
    """Return the file with a directory appended that describes one band; all data stay at their offsets."""
    single = {tag: bands.tags[tag][:1] for tag in (_BITS, _SAMPLE_FORMAT) if tag in bands.tags}
    tags = {**bands.tags, **single, _PHOTOMETRIC: (_GRAY,), _SAMPLES: (1,), _PLANES: (1,), **changes}
    tags = {tag: values for tag, values in sorted(tags.items()) if values and tag != _EXTRA}
    start = len(content) + len(content) % 2
    arrays_start = start + 2 + 12 * len(tags) + 4
    entries, arrays = b"", b""
    for tag, values in tags.items():
        packed = struct.pack(f"{bands.order}{len(values)}I", *values)
        if len(values) > 1:
            offset = struct.pack(f"{bands.order}I", arrays_start + len(arrays))
            arrays += packed
            packed = offset
        entries += struct.pack(f"{bands.order}HHI", tag, 4, len(values)) + packed
    head = content[:4] + struct.pack(f"{bands.order}I", start) + content[8:] + b"\0" * (len(content) % 2)
    return head + struct.pack(f"{bands.order}H", len(tags)) + entries + b"\0\0\0\0" + arrays
