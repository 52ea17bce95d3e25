"""TIFFs of many bands, as instruments and satellites make them. Pillow reads one band, three or four; so the file's
directory is written anew, which makes the same bytes one or several grey pictures, and those it does read.

    bands side by side in each pixel (chunky)    -> one grey picture, as many times as wide
    one band after the other (separate planes)   -> a grey picture for each
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _COLOUR, _SAMPLES, _PLANES = 256, 257, 258, 259, 262, 277, 284
_STRIPS, _ROWS, _STRIP_BYTES, _PREDICTOR = 273, 278, 279, 317
_TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES = 322, 323, 324, 325
_EXTRA, _KIND = 338, 339
_KEPT = (
    *(_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _COLOUR, _STRIPS, _SAMPLES, _ROWS, _STRIP_BYTES, _PLANES, _PREDICTOR),
    *(_TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES, _KIND),
)
_WHOLE_NUMBERS = {1: "B", 3: "H", 4: "I"}
_GREY, _RGB = 1, 2
_DIFFERENCES = 2
_KNOWS_PREDICTORS = (5, 8, 32946, 50000)  # LZW, deflate twice, Zstandard: the others pass them over
_MOST_VALUES = 1_000_000

Tags = Mapping[int, tuple[int, ...]]
Open = Callable[[bytes], Image.Image]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bands:
    """A TIFF that Pillow would not read as it is."""

    order: str
    tags: Tags
    count: int

    @property
    def size(self) -> tuple[int, int]:
        return self.tags[_HEIGHT][0], self.tags[_WIDTH][0]

    @property
    def is_colour(self) -> bool:
        """Whether the first three are red, green and blue."""
        return self.tags[_COLOUR][0] == _RGB


def find_bands(content: bytes) -> Bands | None:
    """None: a picture of one band, colours or transparency, or a damaged one, all of which Pillow knows how to tell."""
    try:
        order = {b"II": "<", b"MM": ">"}[content[:2]]
        tags = _read_directory(content, order)
        count, colour, extra = tags.get(_SAMPLES, (1,))[0], tags[_COLOUR][0], tags.get(_EXTRA, ())
        own = {_GREY: 1, _RGB: 3}.get(colour, count)
        is_transparent = count == own + 1 and extra != (0,)
        if count <= own or is_transparent or not {_WIDTH, _HEIGHT, _BITS} <= tags.keys():
            return None
        if len(set(tags[_BITS])) > 1 or len(set(tags.get(_KIND, ()))) > 1:
            return None
    except (KeyError, IndexError, struct.error):
        return None
    return Bands(order=order, tags=tags, count=count)


def _read_directory(content: bytes, order: str) -> Tags:
    (place,) = struct.unpack_from(f"{order}I", content, 4)
    (entries,) = struct.unpack_from(f"{order}H", content, place)
    tags = {}
    for entry in range(entries):
        at = place + 2 + 12 * entry
        tag, kind, number = struct.unpack_from(f"{order}HHI", content, at)
        if tag in tags:
            raise KeyError(tag)  # a directory has each once, and a liar could keep us busy
        if kind in _WHOLE_NUMBERS and tag in (*_KEPT, _EXTRA) and 0 < number <= _MOST_VALUES:
            layout = f"{order}{number}{_WHOLE_NUMBERS[kind]}"
            if struct.calcsize(layout) > 4:
                (at,) = struct.unpack_from(f"{order}I", content, at + 8)
                tags[tag] = struct.unpack_from(layout, content, at)
            else:
                tags[tag] = struct.unpack_from(layout, content, at + 8)
    return tags


def read_bands(content: bytes, bands: Bands, open_picture: Open) -> np.ndarray:
    """(H, W, bands), in the type of the file."""
    if bands.order == ">" and bands.tags[_BITS][0] == 32 and bands.tags.get(_COMPRESSION, (1,))[0] != 1:
        raise ValueError("compressed 32-bit numbers with the large end first are not read")  # Pillow turns them around
    if bands.tags.get(_PLANES, (1,))[0] == 1:
        return _read_chunky(content, bands, open_picture)
    planes = [_as_array(open_picture(_written(content, _plane(bands, index)))) for index in range(bands.count)]
    return np.stack(planes, axis=2)


def _read_chunky(content: bytes, bands: Bands, open_picture: Open) -> np.ndarray:
    height, width = bands.size
    wide = {tag: (bands.tags[tag][0] * bands.count,) for tag in (_WIDTH, _TILE_WIDTH) if tag in bands.tags}
    flat = _grey(bands, {**wide, _PREDICTOR: (1,)})
    pixels = _as_array(open_picture(_written(content, flat))).reshape(height, width, bands.count)
    compression, predictor = (bands.tags.get(tag, (1,))[0] for tag in (_COMPRESSION, _PREDICTOR))
    if predictor == 1 or compression not in _KNOWS_PREDICTORS:
        return pixels
    if predictor != _DIFFERENCES or pixels.dtype.kind == "f":
        raise ValueError(f"predictor {predictor} of {pixels.dtype} is not read")
    step = bands.tags.get(_TILE_WIDTH, (width,))[0]
    parts = [pixels[:, left : left + step] for left in range(0, width, step)]
    return np.concatenate([part.cumsum(axis=1, dtype=pixels.dtype) for part in parts], axis=1)


def _plane(bands: Bands, index: int) -> Bands:
    """One of several planes: its own strips or tiles."""
    own = {}
    for tag in (_STRIPS, _STRIP_BYTES, _TILES, _TILE_BYTES):
        if tag in bands.tags:
            each = len(bands.tags[tag]) // bands.count
            own[tag] = bands.tags[tag][index * each : (index + 1) * each]
    return _grey(bands, own)


def _grey(bands: Bands, changes: Tags) -> Bands:
    """The same file as a picture of one band."""
    one = {tag: bands.tags[tag][:1] for tag in (_BITS, _KIND) if tag in bands.tags}
    tags = {**bands.tags, **one, _COLOUR: (_GREY,), _SAMPLES: (1,), _PLANES: (1,), **changes}
    return replace(bands, count=1, tags={tag: values for tag, values in tags.items() if tag in _KEPT and values})


def _written(content: bytes, bands: Bands) -> bytes:
    """The file with another directory at its end; all data stay where they are."""
    start = len(content) + len(content) % 2
    rest = start + 2 + 12 * len(bands.tags) + 4
    entries, arrays = b"", b""
    for tag, values in sorted(bands.tags.items()):
        packed = struct.pack(f"{bands.order}{len(values)}I", *values)
        if len(values) > 1:
            place = struct.pack(f"{bands.order}I", rest + len(arrays))
            arrays += packed
            packed = place
        entries += struct.pack(f"{bands.order}HHI", tag, 4, len(values)) + packed
    head = content[:4] + struct.pack(f"{bands.order}I", start) + content[8:] + b"\0" * (len(content) % 2)
    return head + struct.pack(f"{bands.order}H", len(bands.tags)) + entries + b"\0\0\0\0" + arrays


def _as_array(picture: Image.Image) -> np.ndarray:
    pixels = np.asarray(picture)
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
