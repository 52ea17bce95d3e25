"""Images, class folders and shards for the tests."""

import io
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pillow_heif
from PIL import Image

from vitral.data.dataset import DatasetIndex


def photo(height: int = 40, width: int = 60, seed: int = 0) -> Image.Image:
    """Return an image of smooth colors with some noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (7 + i + seed % 5) + y / (5 + i)) * 90 + 128 for i in range(3)]
    pixels = np.stack(waves, axis=-1) + random.normal(0, 4, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    """Return the bytes of an image file."""
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def as_heic(image: Image.Image, quality: int = 90, **options: Any) -> bytes:
    """Return the bytes of a HEIC file. HEIC is not registered with Pillow, which vitral must not need."""
    stream = io.BytesIO()
    pillow_heif.from_pillow(image).save(stream, quality=quality, **options)
    return stream.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Return a PNG that claims a size and has no pixels."""
    chunk = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = b"IHDR" + chunk
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(chunk)) + body + struct.pack(">I", zlib.crc32(body))


def class_folders(folder: Path, classes: dict[str, int], size: tuple[int, int] = (32, 32), split: str = "") -> Path:
    """Write class folders. Every class has its own mean color, so that it can be learned."""
    for number, (name, count) in enumerate(classes.items()):
        home = folder / split / name
        home.mkdir(parents=True, exist_ok=True)
        for index in range(count):
            random = np.random.default_rng(1000 * number + index + zlib.crc32(split.encode()))
            pixels = random.integers(0, 60, (*size, 3), dtype=np.uint8)
            pixels[..., number % 3] += np.uint8(120 + 10 * (number // 3))
            Image.fromarray(pixels).save(home / f"{index:03d}.png")
    return folder


def npy(array: np.ndarray) -> bytes:
    """Return the bytes of a .npy file."""
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def write_shard(path: Path, members: list[tuple[str, bytes]]) -> None:
    """Write a tar shard with these members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as shard:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))


def shard_members(count: int, start: int = 0) -> list[tuple[str, bytes]]:
    """Return images and labels of two classes, by turns."""
    members = []
    for number in range(start, start + count):
        members += [
            (f"k{number:03d}.png", encoded(photo(seed=number), "PNG")),
            (f"k{number:03d}.cls", str(number % 2).encode()),
        ]
    return members


def keys(data: DatasetIndex, split: str = "train") -> list[str]:
    """Return the keys of a split."""
    return [item.key for item in data.splits[split]]
