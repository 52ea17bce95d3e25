"""A contact sheet: some pictures of each class, as the network will see them or as they are."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitral.data.dataset import Item
from vitral.data.decode import BadImageError, decode_visible

CELL, GAP, LABEL, MOST_CLASSES = 96, 6, 150, 24
_PAPER, _INK = (255, 255, 255), (40, 40, 40)


def contact_sheet(items: Sequence[Item], classes: Sequence[str], columns: int = 8) -> Image.Image:
    """A row for each class, its name in front; at most 24 classes."""
    shown = list(classes[:MOST_CLASSES])
    height = max(1, len(shown)) * (CELL + GAP) + GAP
    sheet = Image.new("RGB", (LABEL + columns * (CELL + GAP) + GAP, height), _PAPER)
    draw, font = ImageDraw.Draw(sheet), load_font(14)
    for row, name in enumerate(shown):
        top = GAP + row * (CELL + GAP)
        draw.text((GAP, top + CELL // 2 - 8), _fit(draw, name, font), fill=_INK, font=font)
        for column, picture in enumerate(_pictures(items, row, columns)):
            left = LABEL + column * (CELL + GAP) + (CELL - picture.width) // 2
            sheet.paste(picture, (left, top + (CELL - picture.height) // 2))
    return sheet


def load_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The font that comes with matplotlib, which knows most alphabets; Pillow's own knows ASCII."""
    package = find_spec("matplotlib")
    if package is not None and package.origin:
        path = Path(package.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
        if path.is_file():
            return ImageFont.truetype(str(path), size - 1)
    return ImageFont.load_default(size=size)


def _fit(draw: ImageDraw.ImageDraw, name: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    name = " ".join(name.split())
    while name and draw.textlength(name, font=font) > LABEL - 2 * GAP:
        name = name[:-2] + "…"
    return name


def thumbnail(item: Item, size: int = CELL) -> Image.Image:
    """A picture, small; one that is smaller still is shown large, pixel by pixel."""
    content = item.source.read()
    pixels = decode_visible(content) if isinstance(content, bytes) else np.repeat(content[..., :1], 3, axis=2)
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    if max(picture.size) < size:
        scale = size // max(picture.size)
        return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
    picture.thumbnail((size, size))
    return picture


def _pictures(items: Sequence[Item], label: int, number: int) -> list[Image.Image]:
    found = []
    own = [item for item in items if item.label == label or (isinstance(item.label, tuple) and label in item.label)]
    for item in own[:: max(1, len(own) // number)]:
        try:
            found.append(thumbnail(item))
        except BadImageError:
            continue
        if len(found) == number:
            break
    return found
