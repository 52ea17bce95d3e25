"""Convert colors to sRGB, which models expect, from the ICC profile of a file. Phones write Display P3."""

import io
from functools import lru_cache

import numpy as np
from PIL import Image, ImageCms

_MODES = {"RGB": "RGB", "RGBA": "RGBA", "CMYK": "RGB", "L": "RGB"}
"""Modes that a profile can describe, and the mode after the conversion."""
_SMALLEST_CHANGE = 3
"""A profile that changes no color by as many of 255 levels is sRGB itself, in one of its many versions."""


def to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Return the image in sRGB; the same image if the profile is sRGB, damaged, or not one for this mode."""
    is_keyed = "transparency" in image.info and image.mode in ("P", "RGB")  # colors that stand for transparency
    mode = "RGBA" if is_keyed else "RGB" if image.mode == "P" else image.mode
    transform = find_transform(profile, mode)
    return image if transform is None else transform.apply(image if image.mode == mode else image.convert(mode))


@lru_cache(maxsize=16)
def find_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the conversion of a profile's colors to sRGB, or None if there is nothing to convert."""
    if mode not in _MODES:
        return None
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
        transform = ImageCms.ImageCmsTransform(source, srgb, mode, _MODES[mode])
        return transform if mode == "CMYK" or _changes_colors(transform, mode) else None
    except (OSError, ValueError, ImportError):  # a damaged profile, or a Pillow without LittleCMS
        return None


def _changes_colors(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    levels = np.arange(0, 256, 15, dtype=np.uint8)
    colors = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(len(levels), -1, 3)
    sample = Image.fromarray(levels[None] if mode == "L" else colors).convert(mode)
    before, after = (np.asarray(image.convert("RGB"), dtype=int) for image in (sample, transform.apply(sample)))
    return bool(np.abs(before - after).max() >= _SMALLEST_CHANGE)
