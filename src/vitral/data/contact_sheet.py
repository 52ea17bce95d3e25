"""Draw contact sheets: some images of each class."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitral.data.dataset import Item
from vitral.data.decode import decode_visible
from vitral.data.headers import BadImageError

CELL, GAP, LABEL_WIDTH, MAX_CLASSES = 96, 6, 150, 24
_PAPER, _INK = (255, 255, 255), (40, 40, 40)
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def contact_sheet(items: Sequence[Item], classes: Sequence[str], columns: int = 8) -> Image.Image:
    """Return an image with one row per class, for at most 24 classes: its name and some of its images."""
    names = list(classes[:MAX_CLASSES])
    height = max(1, len(names)) * (CELL + GAP) + GAP
    sheet = Image.new("RGB", (LABEL_WIDTH + columns * (CELL + GAP) + GAP, height), _PAPER)
    draw, font = ImageDraw.Draw(sheet), load_font(14)
    for row, name in enumerate(names):
        top = GAP + row * (CELL + GAP)
        draw.text((GAP, top + CELL // 2 - 8), _shorten(draw, name, font), fill=_INK, font=font)
        for column, image in enumerate(islice(_thumbnails(items, row, columns), columns)):
            left = LABEL_WIDTH + column * (CELL + GAP) + (CELL - image.width) // 2
            sheet.paste(image, (left, top + (CELL - image.height) // 2))
    return sheet


def load_font(size: int) -> Font:
    """Return the font that comes with matplotlib, which has most alphabets, or Pillow's own, which has ASCII."""
    package = find_spec("matplotlib")
    if package is not None and package.origin:
        path = Path(package.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
        if path.is_file():
            return ImageFont.truetype(str(path), size - 1)
    return ImageFont.load_default(size=size)


def thumbnail(item: Item, size: int = CELL) -> Image.Image:
    """Return an image at a small size. Smaller images are enlarged, pixel by pixel."""
    image = Image.fromarray(np.ascontiguousarray(decode_visible(item.source.read())))
    if max(image.size) < size:
        scale = size // max(image.size)
        return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    image.thumbnail((size, size))
    return image


def _thumbnails(items: Sequence[Item], label: int, count: int) -> Iterator[Image.Image]:
    """Yield readable images of a class, evenly spaced so that `count` of them cover it."""
    members = [item for item in items if label in item.labels]
    for item in members[:: max(1, len(members) // count)]:
        with suppress(BadImageError):
            yield thumbnail(item)


def _shorten(draw: ImageDraw.ImageDraw, name: str, font: Font) -> str:
    name = " ".join(name.split())
    while name and draw.textlength(name, font=font) > LABEL_WIDTH - 2 * GAP:
        name = name[:-2] + "…"
    return name
