"""The sizes and positions of preprocessing: what is resized to which size, cropped and padded where. Needs no torch."""

from math import floor, sqrt

from vitral.preprocess import Preprocess

Size = tuple[int, int]
"""(height, width)."""


def resized_size(preprocess: Preprocess, original: Size, patch: Size) -> Size:
    """Return the (height, width) that the whole image is resized to, before it is cropped or padded."""
    (height, width), (to_height, to_width) = original, preprocess.size
    if preprocess.resize == "squash":
        return preprocess.size
    if preprocess.resize == "native":
        scale = min(1.0, sqrt(to_height * to_width / (height * width)))
        sides = ((height, patch[0]), (width, patch[1]))
        return tuple(max(1, round(side * scale / step)) * step for side, step in sides)  # type: ignore[return-value]
    if preprocess.resize == "pad":
        scale = min(to_height / height, to_width / width)
        return max(1, min(to_height, round(height * scale))), max(1, min(to_width, round(width * scale)))
    target = floor(to_height / preprocess.crop_fraction), floor(to_width / preprocess.crop_fraction)
    if target[0] * width >= target[1] * height:  # wide enough once the height fits
        return target[0], max(target[1], int(target[0] * width / height))
    return max(target[0], int(target[1] * height / width)), target[1]


def shrink_for(size: Size, target: Size, preprocess: Preprocess) -> int:
    """Return the factor by which a JPEG may be shrunk while decoding and still be at least `target`: 1, 2, 4 or 8.

    Without antialiasing it is 1, because resizing then picks single pixels of the file.
    """
    if not preprocess.antialias or preprocess.interpolation == "nearest":
        return 1
    for shrink in (8, 4, 2):
        if size[0] >= shrink * target[0] and size[1] >= shrink * target[1]:
            return shrink
    return 1


def corner_of(size: Size, target: Size) -> tuple[int, int]:
    """Return (top, left) of the center crop of an image."""
    top, left = (round((side - crop) / 2) for side, crop in zip(size, target, strict=True))
    return top, left


def border_of(size: Size, target: Size) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the border around a smaller image: (top, bottom), (left, right)."""
    rows, columns = (whole - side for side, whole in zip(size, target, strict=True))
    return (rows // 2, rows - rows // 2), (columns // 2, columns - columns // 2)
