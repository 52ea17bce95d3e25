"""Decode images: from the bytes of a file, a Pillow image or an array to uint8 (height, width, channels), upright."""

from functools import cache
from types import ModuleType

import numpy as np
from PIL import Image

from vitral.data.color import find_transform, to_srgb
from vitral.data.headers import (
    BadImageError,
    Header,
    Pixels,
    check_shape,
    check_size,
    open_with_pillow,
    pillow_errors,
    pillow_header,
    read_header,
    read_npy,
    silence_pillow,
)
from vitral.data.tiff import find_bands, read_bands

_UPRIGHT = {  # EXIF orientation: how to turn the stored pixels upright
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: x[::-1].swapaxes(0, 1),
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
    8: lambda x: x.swapaxes(0, 1)[::-1],
}


def decode(
    content: bytes | Pixels, channels: int = 3, *, background: int = 255, shrink: int = 1, header: Header | None = None
) -> Pixels:
    """Return the pixels of an image file, or raise BadImageError.

    They are upright, in sRGB if the file has an ICC profile, and show `background` through transparent pixels.
    A JPEG can be decoded at 1 / `shrink` of its size, rounded up, which is much faster. `shrink` is 1, 2, 4 or 8 and
    has no effect on other formats. Pixels are returned as they are, or with their first band for every channel.
    """
    if isinstance(content, np.ndarray):
        return content if content.shape[2] == channels else np.repeat(content[..., :1], channels, axis=2)
    header = header or read_header(content)
    if header.format == "NPY":
        return _fit_channels(np.ascontiguousarray(np.atleast_3d(_to_uint8(read_npy(content)))), channels)
    if header.format == "TIFF" and (bands := find_bands(content)) is not None:
        with pillow_errors():
            pixels = _to_uint8(read_bands(content, bands, lambda changed: open_with_pillow(changed, "TIFF")))
        return _fit_channels(pixels[..., :3] if bands.is_color and channels in (1, 3) else pixels, channels)
    pixels = _decode_jpeg(content, header, channels, shrink) if header.format == "JPEG" else None
    if pixels is None:
        image = open_with_pillow(content, header.format)
        with pillow_errors(content, header.format):
            if shrink > 1 and header.format == "JPEG":
                image.draft(None, (image.width // shrink, image.height // shrink))  # rounds up, as _decode_jpeg does
            image.load()
            pixels = _convert(image, channels, background, header.profile)
    elif header.profile and find_transform(header.profile, header.mode):
        image = Image.fromarray(pixels.squeeze(2) if channels == 1 else pixels)
        pixels = _convert(image, channels, background, header.profile)
    return _turn_upright(pixels, header)


def decode_visible(content: bytes | Pixels) -> Pixels:
    """Return RGB pixels to look at: the first three of many bands, the first of two."""
    header = read_header(content)
    if header.bands in (1, 3):
        return decode(content, header=header)
    pixels = decode(content, channels=header.bands, header=header)
    return pixels[..., :3] if header.bands > 3 else np.repeat(pixels[..., :1], 3, axis=2)


def _turn_upright(pixels: Pixels, header: Header) -> Pixels:
    if header.orientation == 1:
        return pixels
    return np.ascontiguousarray(_UPRIGHT[header.orientation](pixels))


@cache
def fast_jpeg() -> ModuleType | None:
    """Return simplejpeg, or None if it is not installed."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def _decode_jpeg(content: bytes, header: Header, channels: int, shrink: int) -> Pixels | None:
    """Decode with simplejpeg. Return None if it is missing or refuses the file, which Pillow then judges."""
    simplejpeg = fast_jpeg()
    colorspace = {("L", 1): "GRAY", ("RGB", 3): "RGB"}.get((header.mode, channels))
    if simplejpeg is None or colorspace is None:
        return None
    height, width = -(-header.height // shrink), -(-header.width // shrink)
    if header.orientation >= 5:
        height, width = width, height
    try:
        return simplejpeg.decode_jpeg(content, colorspace=colorspace, min_height=height, min_width=width)
    except (ValueError, RuntimeError, MemoryError):
        return None


def _convert(image: Image.Image, channels: int, background: int, profile: bytes | None) -> Pixels:
    """Convert any mode to gray or RGB. 16 bits are scaled, not clipped; transparent pixels show the background."""
    if channels not in (1, 3):
        return _read_frames(image, channels)
    if image.mode.startswith("I;16") or image.mode == "I":
        return np.repeat(_convert_deep_gray(image)[..., None], channels, axis=2)
    if image.mode == "F":
        raise BadImageError("unsupported", "floating-point pixels")
    if profile:
        image = to_srgb(image, profile)
    has_alpha = image.mode in ("RGBA", "LA", "PA", "RGBa", "La")
    if has_alpha or (image.mode in ("P", "L", "RGB") and "transparency" in image.info):
        canvas = Image.new("RGBA", image.size, (background, background, background, 255))
        image = Image.alpha_composite(canvas, image.convert("RGBA"))
    mode = "RGB" if channels == 3 else "L"
    return np.atleast_3d(np.asarray(image if image.mode == mode else image.convert(mode)))


def _convert_deep_gray(image: Image.Image) -> Pixels:
    """Return the upper 8 of 16 bits; numbers of 32 bits are accepted if they fit into 16."""
    gray = np.asarray(image)
    if image.mode == "I" and not 0 <= gray.min(initial=0) <= gray.max(initial=0) < 2**16:
        raise BadImageError("unsupported", f"32-bit values from {gray.min()} to {gray.max()}; expected 0 to 65535")
    is_deep = gray.max(initial=0) > 255 or image.mode.startswith("I;16")
    return (gray >> 8 if is_deep else gray).clip(0, 255).astype(np.uint8)


def _read_frames(image: Image.Image, channels: int) -> Pixels:
    """Return bands as they are in the file: those of the first frame, or one of each frame."""
    frames = []
    for index in range(min(getattr(image, "n_frames", 1), channels)):
        image.seek(index)
        frames.append(_to_uint8(np.atleast_3d(np.asarray(image))))
    pixels = frames[0] if frames[0].shape[2] == channels else np.concatenate(frames, axis=2)
    return _fit_channels(pixels, channels)


def _fit_channels(pixels: Pixels, channels: int) -> Pixels:
    if pixels.shape[2] == channels:
        return pixels
    if channels == 3 and pixels.shape[2] == 1:
        return np.repeat(pixels, 3, axis=2)
    if channels == 1 and pixels.shape[2] == 3:
        return np.asarray(Image.fromarray(pixels).convert("L"))[..., None]
    raise BadImageError("wrong channels", f"{pixels.shape[2]} bands; expected {channels}")


def from_pillow(image: Image.Image, channels: int = 3, *, background: int = 255) -> Pixels:
    """Return the pixels of a Pillow image, upright."""
    silence_pillow()
    header = pillow_header(image, image.format or "image")
    check_size(header.height, header.width, header.bands)
    with pillow_errors():  # Pillow may decode only now
        pixels = _convert(image, channels, background, header.profile)
    return _turn_upright(pixels, header)


def from_array(array: np.ndarray, channels: int = 3, *, background: int = 255) -> Pixels:
    """Return the pixels of an array (H, W) or (H, W, C), with values as in `_to_uint8`."""
    check_shape(array.shape)
    pixels = np.atleast_3d(_to_uint8(np.asarray(array)))
    if channels in (1, 3) and pixels.shape[2] in (3, 4) and pixels.shape[2] != channels:
        return from_pillow(Image.fromarray(np.ascontiguousarray(pixels)), channels, background=background)
    return _fit_channels(pixels, channels)


def _to_uint8(array: np.ndarray) -> Pixels:
    """Convert to 8 bits: uint16 keeps its upper 8, floats from 0 to 1 and booleans are scaled, other integers fit."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    if array.dtype == np.uint8:
        return array
    if kind == "b":
        return array.astype(np.uint8) * np.uint8(255)
    if kind == "u" and size == 2:
        return (array >> 8).astype(np.uint8)
    if kind not in "uif":
        raise BadImageError("unsupported", f"values of type {array.dtype}; expected numbers")
    top = 1 if kind == "f" else 255
    if not (array.size and array.min() >= 0 and array.max() <= top):
        values = f"values from {array.min():g} to {array.max():g}" if array.size else "no values"
        raise BadImageError("unsupported", f"{array.dtype} with {values}; expected 0 to {top}")
    return (array * 255).round().astype(np.uint8) if kind == "f" else array.astype(np.uint8)
