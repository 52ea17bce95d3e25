"""From the bytes of a picture to pixels: uint8 (height, width, channels), upright, on a stated background.

What is allowed is decided by the content and the header, before any pixel is decoded. A file that cannot be used gives
a BadImageError.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from types import ModuleType

import numpy as np
from PIL import Image, UnidentifiedImageError

from vitral.data.limits import LIMITS, BadImageError, Limits, check_bytes
from vitral.data.tiff import Bands, find_bands, read_bands

Pixels = np.ndarray
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".npy")
_FORMATS = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"BM": "BMP",
    b"II*\x00": "TIFF",
    b"MM\x00*": "TIFF",
    b"\x93NUMPY": "NPY",
}
_UPRIGHT = {  # EXIF orientation: what puts the picture upright
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: x[::-1].swapaxes(0, 1),
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
    8: lambda x: x.swapaxes(0, 1)[::-1],
}
_PNG_METADATA = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")
_ORIENTATION = 0x0112
_MOST_FRAMES = 256
_GREY_MODES = ("1", "L", "LA", "La", "I", "F")


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a file says about its picture, before it is decoded; height and width as a person sees it."""

    format: str
    height: int
    width: int
    mode: str
    bands: int = 3
    """1: grey, 3: colours, transparent or not; else the bands of an array or a TIFF, as they are."""
    orientation: int = 1

    @property
    def is_turned(self) -> bool:
        return self.orientation >= 5


def find_format(content: bytes) -> str:
    if not content:
        raise BadImageError("empty")
    for magic, name in _FORMATS.items():
        if content.startswith(magic):
            return name
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "WEBP"
    raise BadImageError("unsupported", f"starts with {content[:8]!r}")


@contextmanager
def _silent() -> Iterator[None]:
    """Pillow warns of sizes, which are checked here, of odd metadata and of damage, reported as BadImageError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@_silent()
def read_header(content: bytes, limits: Limits = LIMITS) -> Header:
    """Size, mode and orientation; refuses what is too large before anything is decoded."""
    name = find_format(content)
    check_bytes(len(content), limits)
    if name == "NPY":
        shape, _, _ = _npy_header(content)
        header = _header_of_bands(name, (shape[0], shape[1]), shape[2] if len(shape) == 3 else 1)
    elif (bands := _tiff_bands(content, name)) is not None:
        header = _header_of_bands(name, bands.size, bands.count)
    else:
        if name == "PNG" and len(content) >= 24:  # Pillow first looks for pixels, which a liar need not have
            if content[12:16] != b"IHDR":
                raise BadImageError("corrupt", "the header is not at the beginning")
            width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
            _check_size(Header(format=name, height=height, width=width, mode=""), limits)
        image = _open(content, name)
        header = _header_of(image, name, content)
        if name == "TIFF" and header.bands == 1:
            header = replace(header, bands=_count_frames(image))
    _check_size(header, limits)
    return header


def _check_size(header: Header, limits: Limits) -> None:
    height, width = header.height, header.width
    seen = f"{width} x {height} pixels"
    if min(height, width) < 1 or max(height, width) > limits.side:
        raise BadImageError("bad dimensions", f"{seen}; a side is from 1 to {limits.side}")
    if max(height, width) > limits.aspect * min(height, width):
        raise BadImageError("bad dimensions", f"{seen}; at most {limits.aspect:g} times as long as wide")
    if height * width * max(3, header.bands) > 3 * limits.pixels:
        raise BadImageError("too many pixels", f"{seen}; at most {limits.pixels / 1e6:.0f} million of three bands")


def _open(content: bytes, name: str) -> Image.Image:
    try:
        return Image.open(io.BytesIO(content), formats=[name])
    except Image.DecompressionBombError as error:
        raise BadImageError("too many pixels", str(error)) from error
    except UnidentifiedImageError as error:
        raise BadImageError(
            "truncated" if _is_cut(content, name) else "corrupt", "the header cannot be read"
        ) from error
    except Exception as error:  # Pillow's readers raise nearly anything
        raise BadImageError("truncated" if _is_cut(content, name) else "corrupt", str(error)) from error


def _is_cut(content: bytes, name: str) -> bool:
    """Whether the end of the file is missing, for formats that mark it."""
    if name == "JPEG":
        return b"\xff\xd9" not in content[-64:]
    if name == "PNG":
        return b"IEND" not in content[-64:]
    if name == "WEBP":
        return len(content) < int.from_bytes(content[4:8], "little") + 8
    if name == "GIF":
        return not content.rstrip(b"\0").endswith(b";")
    return True


def _header_of(image: Image.Image, name: str, content: bytes | None = None) -> Header:
    orientation = 1
    try:
        # Pillow decodes a whole PNG to look for metadata behind the pixels.
        is_bare = name == "PNG" and content is not None and not any(mark in content for mark in _PNG_METADATA)
        found = (Image.Image.getexif(image) if is_bare else image.getexif()).get(_ORIENTATION, 1)
        orientation = found if found in _UPRIGHT and name != "TIFF" else 1  # Pillow turns TIFFs by itself
    except Exception:  # damaged metadata say nothing about the picture
        orientation = 1
    width, height = image.size
    if orientation >= 5:
        height, width = width, height
    bands = 1 if image.mode in _GREY_MODES or image.mode.startswith("I;16") else 3
    return Header(format=name, height=height, width=width, mode=image.mode, bands=bands, orientation=orientation)


def _header_of_bands(name: str, size: tuple[int, int], bands: int) -> Header:
    return Header(format=name, height=size[0], width=size[1], mode=f"{bands} bands", bands=bands)


def _tiff_bands(content: bytes, name: str) -> Bands | None:
    return find_bands(content) if name == "TIFF" else None


def _count_frames(image: Image.Image) -> int:
    """One for each band; a chain that does not end, or breaks, is none of bands."""
    number = 0
    try:
        while number < _MOST_FRAMES:
            number += 1
            image.seek(number)
    except EOFError:
        return number
    except Exception:  # what is behind the first frame is damaged
        return 1
    return 1


@_silent()
def decode(
    content: bytes,
    channels: int = 3,
    *,
    background: int = 255,
    shrink: int = 1,
    limits: Limits = LIMITS,
    header: Header | None = None,
) -> Pixels:
    """Pixels of a picture, upright.

    A JPEG can be decoded at 1 / ``shrink`` of its size, rounded up, which costs far less; shrink is 1, 2, 4 or 8, and
    has no effect on other formats."""
    header = header or read_header(content, limits)
    if header.format == "NPY":
        return _fit_channels(_decode_npy(content), channels)
    if (bands := _tiff_bands(content, header.format)) is not None:
        return _decode_bands(content, bands, channels)
    if header.format == "JPEG" and header.mode in ("RGB", "L") and channels in (1, 3):
        pixels = _decode_jpeg(content, header, channels, shrink)
        if pixels is not None:
            return _upright(pixels, header)
    pixels = _decode_with_pillow(content, header, channels, background, shrink)
    return _upright(pixels, header)


def _upright(pixels: Pixels, header: Header) -> Pixels:
    if header.orientation == 1:
        return pixels
    return np.ascontiguousarray(_UPRIGHT[header.orientation](pixels))


@cache
def fast_jpeg() -> ModuleType | None:
    """simplejpeg, where it is installed."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def _decode_jpeg(content: bytes, header: Header, channels: int, shrink: int) -> Pixels | None:
    """By simplejpeg; None when it is not there or does not like the file, which Pillow then judges."""
    simplejpeg = fast_jpeg()
    if simplejpeg is None or header.mode != {1: "L", 3: "RGB"}[channels]:
        return None
    height, width = _stored_size(header, shrink)
    try:
        colours = "GRAY" if channels == 1 else "RGB"
        return simplejpeg.decode_jpeg(content, colorspace=colours, min_height=height, min_width=width)
    except (ValueError, RuntimeError, MemoryError):
        return None


def _stored_size(header: Header, shrink: int) -> tuple[int, int]:
    """(height, width) as the file has it, before it is put upright."""
    sides = -(-header.height // shrink), -(-header.width // shrink)
    return (sides[1], sides[0]) if header.is_turned else sides


def _decode_with_pillow(content: bytes, header: Header, channels: int, background: int, shrink: int) -> Pixels:
    image = _open(content, header.format)
    try:
        if shrink > 1 and header.format == "JPEG":
            image.draft(None, (image.width // shrink, image.height // shrink))  # comes to the sides of _stored_size
        if channels not in (1, 3):
            return _bands(image, channels)
        image.load()
        return _convert(image, channels, background)
    except BadImageError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything
        cut = "truncated" in str(error) or _is_cut(content, header.format)
        raise BadImageError("truncated" if cut else "corrupt", str(error)) from error


def _convert(image: Image.Image, channels: int, background: int) -> Pixels:
    """Any mode to grey or RGB, without clipping 16 bits, transparent pixels over the background."""
    mode = "RGB" if channels == 3 else "L"
    if image.mode.startswith("I;16") or image.mode == "I":
        grey = np.asarray(image)
        if image.mode == "I" and not 0 <= grey.min(initial=0) <= grey.max(initial=0) < 2**16:
            raise BadImageError("unsupported", "numbers of 32 bits that are not from 0 to 65535")
        deep = grey.max(initial=0) > 255 or image.mode.startswith("I;16")
        grey = (grey >> 8 if deep else grey).clip(0, 255).astype(np.uint8)
        return np.repeat(grey[..., None], channels, axis=2)
    if image.mode == "F":
        raise BadImageError("unsupported", "pixels are floating-point numbers")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or (image.mode == "P" and "transparency" in image.info):
        image = image.convert("RGBA")
        canvas = Image.new("RGBA", image.size, (background, background, background, 255))
        image = Image.alpha_composite(canvas, image)
    elif image.mode in ("L", "RGB") and "transparency" in image.info:
        image = Image.alpha_composite(
            Image.new("RGBA", image.size, (background, background, background, 255)), image.convert("RGBA")
        )
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _bands(image: Image.Image, channels: int) -> Pixels:
    """As they are in the file: the bands of one frame, or frames of one band each."""
    frames = []
    for index in range(min(getattr(image, "n_frames", 1), channels)):
        image.seek(index)
        frame = np.asarray(image)
        frames.append(_to_bytes(frame[..., None] if frame.ndim == 2 else frame))
    pixels = frames[0] if frames[0].shape[2] == channels else np.concatenate(frames, axis=2)
    return _fit_channels(pixels, channels)


def _decode_bands(content: bytes, bands: Bands, channels: int) -> Pixels:
    try:
        pixels = _to_bytes(read_bands(content, bands, lambda changed: _open(changed, "TIFF")))
    except BadImageError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything
        raise BadImageError("corrupt", str(error)) from error
    return _fit_channels(pixels[..., :3] if bands.is_colour and channels in (1, 3) else pixels, channels)


def decode_visible(content: bytes, header: Header | None = None) -> Pixels:
    """RGB for eyes: of many bands the first three, of two the first."""
    header = header or read_header(content)
    if header.bands in (1, 3):
        return decode(content, header=header)
    pixels = decode(content, channels=header.bands, header=header)
    return pixels[..., :3] if header.bands > 3 else np.repeat(pixels[..., :1], 3, axis=2)


def _fit_channels(pixels: Pixels, channels: int) -> Pixels:
    if pixels.shape[2] == channels:
        return pixels
    if channels == 3 and pixels.shape[2] == 1:
        return np.repeat(pixels, 3, axis=2)
    if channels == 1 and pixels.shape[2] == 3:
        return np.asarray(Image.fromarray(pixels).convert("L"))[..., None]
    raise BadImageError("wrong channels", f"{pixels.shape[2]} bands, and {channels} are needed")


# ---- what is decoded already ----


def from_pillow(image: Image.Image, channels: int = 3, *, background: int = 255, limits: Limits = LIMITS) -> Pixels:
    """Pixels of somebody's Pillow image, upright."""
    header = _header_of(image, image.format or "image")
    _check_size(header, limits)
    try:
        pixels = _convert(image, channels, background) if channels in (1, 3) else _bands(image, channels)
    except BadImageError:
        raise
    except Exception as error:  # Pillow decodes now, and its decoders raise nearly anything
        raise BadImageError("corrupt", str(error)) from error
    return _upright(pixels, header)


def from_array(array: np.ndarray, channels: int = 3, *, background: int = 255, limits: Limits = LIMITS) -> Pixels:
    """Pixels of somebody's array (H, W) or (H, W, C): 8 bits, 16 bits, or numbers from 0 to 1."""
    if array.ndim not in (2, 3):
        raise BadImageError("unsupported", f"an array of shape {array.shape}; it should be (H, W) or (H, W, C)")
    pixels = _to_bytes(np.asarray(array))
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    _check_size(Header(format="array", height=pixels.shape[0], width=pixels.shape[1], mode=""), limits)
    if channels in (1, 3) and pixels.shape[2] in (3, 4) and pixels.shape[2] != channels:
        return from_pillow(Image.fromarray(np.ascontiguousarray(pixels)), channels, background=background)
    return _fit_channels(pixels, channels)


# ---- NumPy ----


def _npy_header(content: bytes) -> tuple[tuple[int, ...], np.dtype, int]:
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(stream)
    except Exception as error:  # NumPy evaluates the header as Python's own words, which fails in many ways
        raise BadImageError("corrupt", str(error)) from error
    if dtype.hasobject or dtype.kind not in "uif" or is_fortran or len(shape) not in (2, 3):
        raise BadImageError(
            "unsupported", f"an array of {dtype} with shape {shape}; it should be numbers (H, W) or (H, W, C)"
        )
    if prod(shape) * dtype.itemsize != len(content) - stream.tell():
        raise BadImageError("truncated", f"shape {shape} needs another number of bytes")
    return shape, dtype, stream.tell()


def _decode_npy(content: bytes) -> Pixels:
    shape, dtype, start = _npy_header(content)
    pixels = _to_bytes(np.frombuffer(content, dtype, offset=start).reshape(shape))
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _to_bytes(pixels: np.ndarray) -> Pixels:
    """8 bits as they are, 16 bits by their upper half, numbers from 0 to 1 times 255."""
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == np.uint16:
        return (pixels >> 8).astype(np.uint8)
    if pixels.dtype.kind == "f" and pixels.size and pixels.min() >= 0 and pixels.max() <= 1:
        return (pixels * 255).round().astype(np.uint8)
    raise BadImageError("unsupported", f"{pixels.dtype} with values outside of what a picture has")
