"""Read image headers and enforce limits before any pixel is decoded.

Each unusable image raises `BadImageError` with one of a few reasons, so that callers can count them.
"""

import io
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import prod
from threading import Lock
from types import ModuleType
from typing import Literal

import numpy as np
from PIL import Image, UnidentifiedImageError, features

from vitral.data import heif
from vitral.data.tiff import find_bands, read_size
from vitral.errors import DataError

Pixels = np.ndarray
"""uint8 (height, width, channels)."""
_PHOTO_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".avif", ".heic", ".heif", ".hif")
SUFFIXES = (*_PHOTO_SUFFIXES, ".gif", ".bmp", ".tif", ".tiff", ".npy")
MAX_BYTES = 256 * 2**20
MAX_PIXELS = 89_000_000
MAX_SIDE = 65_500
MAX_ASPECT = 100
PEEKED_BYTES = 2**16
"""Enough of a file for `check_start`."""
Reason = (
    Literal["missing", "unreadable", "empty", "unsupported", "truncated", "corrupt"]
    | Literal["too large", "too many pixels", "bad dimensions", "wrong channels"]
)
_MAGIC_BYTES = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"BM": "BMP",
    b"II*\x00": "TIFF",
    b"MM\x00*": "TIFF",
    b"\x93NUMPY": "NPY",
}
_PNG_METADATA = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")
_EXIF_ORIENTATION = 0x0112
_MAX_FRAMES = 256
_GRAY_MODES = ("1", "L", "LA", "La", "I", "F")


class BadImageError(DataError):
    """An image that cannot be used; `reason` is one of a few words."""

    def __init__(self, reason: Reason, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: Reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """Describe an image before it is decoded. Height and width are those of the upright image."""

    format: str
    height: int
    width: int
    mode: str
    bands: int = 3
    """1 for gray; 3 for color, with or without transparency; otherwise the bands of an array or TIFF."""
    orientation: int = 1
    """EXIF orientation, from 1 to 8; height and width are swapped in the file from 5 on."""
    profile: bytes | None = field(default=None, repr=False)
    """The embedded ICC profile."""


def read_header(content: bytes | Pixels) -> Header:
    """Return size, mode and orientation of an image file or of pixels, or raise BadImageError. Nothing is decoded."""
    if isinstance(content, np.ndarray):
        height, width, bands = content.shape
        mode = "gray" if bands == 1 else "color"
        return Header(format="built-in", height=height, width=width, mode=mode, bands=bands)
    check_bytes(len(content))
    name = check_start(content)
    tiff = find_bands(content) if name == "TIFF" else None
    if name == "NPY" or tiff:
        height, width, bands = (*tiff.size, tiff.count) if tiff else np.atleast_3d(read_npy(content)).shape
        header = Header(format=name, height=height, width=width, mode=f"{bands} bands", bands=bands)
    else:
        image = open_with_pillow(content, name)
        header = pillow_header(image, name, content)
        if name == "TIFF" and header.bands == 1:
            header = replace(header, bands=_count_frames(image))
    check_size(header.height, header.width, header.bands)
    return header


def find_format(content: bytes) -> str:
    """Return the format by the first bytes; file names are never trusted."""
    if not content:
        raise BadImageError("empty")
    for magic, name in _MAGIC_BYTES.items():
        if content.startswith(magic):
            return name
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "WEBP"
    if name := heif.find_format(content):
        return name
    raise BadImageError("unsupported", f"not an image file (starts with {content[:8]!r}). Convert it to JPEG or PNG")


def check_bytes(size: int) -> None:
    """Raise BadImageError if a file is too large to be read."""
    if size > MAX_BYTES:
        raise BadImageError("too large", f"{size:,} bytes; expected at most {MAX_BYTES:,}")


def check_start(content: bytes) -> str:
    """Return the format, or raise BadImageError if the first bytes of a file already show that it is not usable.

    The size that a file claims is checked before Pillow or NumPy allocate anything, or warn about it.
    """
    name = find_format(content)
    if name == "NPY":
        check_shape(_parse_npy_header(content)[0])
        return name
    if name == "PNG" and len(content) >= 24 and content[12:16] != b"IHDR":
        raise BadImageError("corrupt", "the header is not at the beginning")
    with suppress(struct.error, IndexError, KeyError):  # Pillow judges damaged headers
        height, width = claimed_size(content, name)
        if name == "PNG" or min(height, width) > 0:
            check_size(height, width)
    return name


def claimed_size(content: bytes, name: str) -> tuple[int, int]:
    """Return (height, width) from the first bytes of a file; (0, 0) if the format does not state them there."""
    width = height = 0
    if name == "JPEG":
        return _claimed_jpeg_size(content)
    if name == "TIFF":
        return read_size(content)
    if name in ("HEIF", "AVIF"):
        return heif.read_size(content)
    if name == "PNG":
        width, height = struct.unpack_from(">II", content, 16)
    elif name == "GIF":
        width, height = struct.unpack_from("<HH", content, 6)
    elif name == "WEBP" and content[12:16] == b"VP8X":
        width, height = (1 + int.from_bytes(content[at : at + 3], "little") for at in (24, 27))
    elif name == "BMP" and content[14] >= 40:
        width, height = struct.unpack_from("<ii", content, 18)
    return abs(height), abs(width)


def _claimed_jpeg_size(content: bytes) -> tuple[int, int]:
    """Return (height, width) of the first start-of-frame segment."""
    at = 2
    while content[at] == 0xFF:
        marker = content[at + 1]
        if marker in range(0xC0, 0xD0) and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", content, at + 5)
            return height, width
        is_bare = marker in (0x01, 0xFF) or marker in range(0xD0, 0xD9)  # without a length; 0xFF is padding
        at += (1 if marker == 0xFF else 2) if is_bare else 2 + struct.unpack_from(">H", content, at + 2)[0]
    return 0, 0


def check_shape(shape: tuple[int, ...]) -> None:
    """Raise BadImageError unless an array of this shape is an image within the limits."""
    if len(shape) not in (2, 3):
        raise BadImageError("unsupported", f"array of shape {shape}; expected (H, W) or (H, W, C)")
    bands = shape[2] if len(shape) == 3 else 1
    if bands < 1:
        raise BadImageError("bad dimensions", f"array of shape {shape} has no channels")
    check_size(shape[0], shape[1], bands)


def check_size(height: int, width: int, bands: int = 3) -> None:
    """Raise BadImageError if an image has no pixels, or more than the limits allow."""
    size = f"{width} x {height} pixels"
    if min(height, width) < 1 or max(height, width) > MAX_SIDE:
        raise BadImageError("bad dimensions", f"{size}; expected sides from 1 to {MAX_SIDE}")
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise BadImageError("bad dimensions", f"{size}; expected an aspect ratio of at most {MAX_ASPECT}")
    if height * width * max(3, bands) > 3 * MAX_PIXELS:
        limit = f"{MAX_PIXELS / 1e6:.0f} million pixels with 3 bands"
        raise BadImageError("too many pixels", f"{size} with {bands} bands; expected at most {limit}")


_PILLOW_LOCK = Lock()
_PILLOW_FILTER = ("ignore", None, UserWarning, re.compile(r"PIL\."), 0)


def open_with_pillow(content: bytes, name: str) -> Image.Image:
    """Open an image of a known format with Pillow, which does not decode it yet."""
    silence_pillow()
    with pillow_errors(content, name):
        if name == "HEIF":
            return _import_heif().HeifImageFile(io.BytesIO(content))
        if name == "AVIF" and not features.check("avif"):
            raise BadImageError("unsupported", "this build of Pillow reads no AVIF. Run: pip install --upgrade pillow")
        return Image.open(io.BytesIO(content), formats=[name])


def _import_heif() -> ModuleType:
    try:
        import pillow_heif
    except ImportError:
        raise BadImageError("unsupported", "HEIC needs pillow-heif. Run: pip install 'vitral[photos]'") from None
    return pillow_heif


@contextmanager
def pillow_errors(content: bytes | None = None, name: str = "") -> Iterator[None]:
    """Raise BadImageError instead of what Pillow's readers raise, which is nearly anything."""
    try:
        yield
    except BadImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImageError("too many pixels", str(error)) from error
    except Exception as error:
        is_cut_off = content is not None and ("truncated" in str(error) or _is_cut_off(content, name))
        detail = "unreadable header" if isinstance(error, UnidentifiedImageError) else str(error)
        raise BadImageError("truncated" if is_cut_off else "corrupt", detail) from error


def silence_pillow() -> None:
    """Ignore Pillow's warnings about damaged files, which vitral reports itself.

    The filter matches only Pillow's modules and stays installed: `catch_warnings` is not safe with threads.
    """
    if not warnings.filters or warnings.filters[0] != _PILLOW_FILTER:
        with _PILLOW_LOCK:
            warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")


def _is_cut_off(content: bytes, name: str) -> bool:
    """Return whether the end of the file is missing, or True for formats that do not mark their end."""
    if name == "JPEG":
        return b"\xff\xd9" not in content[-64:]
    if name == "PNG":
        return b"IEND" not in content[-64:]
    if name == "WEBP":
        return len(content) < int.from_bytes(content[4:8], "little") + 8
    if name == "GIF":
        return not content.rstrip(b"\0").endswith(b";")
    if name in ("HEIF", "AVIF"):
        return heif.is_cut_off(content)
    return True


def pillow_header(image: Image.Image, name: str, content: bytes | None = None) -> Header:
    """Return the header of an open Pillow image."""
    orientation = _read_orientation(image, name, content)
    width, height = image.size
    if orientation >= 5:
        height, width = width, height
    bands = 1 if image.mode in _GRAY_MODES or image.mode.startswith("I;16") else 3
    return Header(
        format=name,
        height=height,
        width=width,
        mode=image.mode,
        bands=bands,
        orientation=orientation,
        profile=image.info.get("icc_profile") or None,
    )


def _read_orientation(image: Image.Image, name: str, content: bytes | None) -> int:
    if name in ("TIFF", "HEIF"):  # Pillow and pillow-heif turn these themselves
        return 1
    # Pillow decodes a whole PNG to look for metadata after the pixels.
    is_bare = name == "PNG" and content is not None and not any(mark in content for mark in _PNG_METADATA)
    try:
        orientation = (Image.Image.getexif(image) if is_bare else image.getexif()).get(_EXIF_ORIENTATION, 1)
    except Exception:  # damaged metadata do not matter
        return 1
    return int(orientation) if orientation in range(1, 9) else 1


def _count_frames(image: Image.Image) -> int:
    """Return the number of frames, each of which is a band; 1 if the chain of frames is endless or broken."""
    for number in range(1, _MAX_FRAMES + 1):
        try:
            image.seek(number)
        except EOFError:
            return number
        except Exception:  # this frame is damaged
            break
    return 1


def read_npy(content: bytes) -> np.ndarray:
    """Return the array in a .npy file, without a copy, or raise BadImageError if its length does not match."""
    shape, is_fortran, dtype, start = _parse_npy_header(content)
    expected, length = prod(shape) * dtype.itemsize, len(content) - start
    if expected != length:
        raise BadImageError("truncated", f"shape {shape} needs {expected:,} bytes; the file has {length:,}")
    return np.frombuffer(content, dtype, offset=start).reshape(shape, order="F" if is_fortran else "C")


def _parse_npy_header(content: bytes) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Return shape, whether the order is Fortran's, dtype, and the offset of the values."""
    stream = io.BytesIO(content[:PEEKED_BYTES])
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(stream)
    except Exception as error:  # NumPy evaluates the header as a Python literal, which fails in many ways
        raise BadImageError("corrupt", str(error)) from error
    if dtype.hasobject or dtype.kind not in "buif":
        raise BadImageError("unsupported", f"array of {dtype}; expected numbers")
    return shape, is_fortran, dtype, stream.tell()
