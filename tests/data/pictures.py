"""Pictures for the tests, made by Pillow: good ones of every kind, and bad ones."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def photo(height: int = 40, width: int = 60, seed: int = 0) -> Image.Image:
    """Smooth colours and some noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (7 + i + seed % 5) + y / (5 + i)) * 90 + 128 for i in range(3)]
    pixels = np.stack(waves, axis=-1) + random.normal(0, 4, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has no pixels."""
    chunk = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = b"IHDR" + chunk
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(chunk)) + body + struct.pack(">I", zlib.crc32(body))


def class_folders(folder: Path, classes: dict[str, int], size: tuple[int, int] = (32, 32), split: str = "") -> Path:
    """A folder of class folders; every class has its own mean colour, so that it can be learnt."""
    for number, (name, count) in enumerate(classes.items()):
        place = folder / split / name
        place.mkdir(parents=True, exist_ok=True)
        for index in range(count):
            random = np.random.default_rng(1000 * number + index + zlib.crc32(split.encode()))
            pixels = random.integers(0, 60, (*size, 3), dtype=np.uint8)
            pixels[..., number % 3] += np.uint8(120 + 10 * (number // 3))
            Image.fromarray(pixels).save(place / f"{index:03d}.png")
    return folder
