"""Forty kinds of files that claim to be images and cannot be read, with names that a dataset includes."""

import struct
import zlib

import numpy as np

from tests.data.images import encoded, npy, photo, png_header


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _damaged(content: bytes, start: int, count: int = 200) -> bytes:
    return content[:start] + b"\xff" * count + content[start + count :]


def bad_images() -> dict[str, bytes]:
    """Return the content of each file by its name, whose suffix is that of the format it claims."""
    image = photo(64, 96)
    jpeg, png, webp = encoded(image, "JPEG"), encoded(image, "PNG"), encoded(image, "WEBP")
    gif, bmp, tiff = encoded(image, "GIF"), encoded(image, "BMP"), encoded(image, "TIFF")
    head = png_header(64, 96)
    files = {"empty.jpg": b"", "one-byte.png": b"\x89", "zeros.jpg": bytes(4096), "text.jpg": b"not an image\n" * 9}
    files["noise.jpg"] = np.random.default_rng(0).bytes(3000)
    files |= {"page.png": b"<!doctype html><html></html>", "drawing.png": b"<svg xmlns='http://www.w3.org/2000/svg'/>"}
    files |= {
        "document.jpg": b"%PDF-1.7\n" + bytes(99),
        "script.png": b"%!PS-Adobe-3.0 EPSF-3.0\n",
        "zip.webp": b"PK\3\4",
    }
    files |= {"layers.png": b"8BPS\0\1" + bytes(99), "stars.jpg": b"SIMPLE  =                    T" + bytes(99)}
    for name, content in {"jpg": jpeg, "png": png, "webp": webp, "gif": gif, "bmp": bmp, "tif": tiff}.items():
        files[f"first-bytes.{name}"] = content[:20]
        files[f"half.{name}"] = content[: len(content) // 2]
    files |= {"tenth.jpg": jpeg[: len(jpeg) // 10], "no-end.jpg": jpeg[:-40], "tail.png": png[:-60]}
    files |= {"huge.png": png_header(30_000, 30_000), "no-data.png": head, "flat.png": png_header(0, 10)}
    files |= {
        "line.png": png_header(200_000, 1),
        "bad-zlib.png": head + _chunk(b"IDAT", b"\1" * 60) + _chunk(b"IEND", b""),
    }
    files |= {"bad-sum.png": _damaged(png, 60, 20), "bad-header.png": png[:20] + b"\xff\xff\xff" + png[23:]}
    files |= {"no-markers.jpg": jpeg[:2] + b"\0" * 500, "end-only.jpg": b"\xff\xd8\xff\xd9"}
    files |= {"bad-riff.webp": webp[:4] + b"\xff" * 40, "objects.npy": npy(np.array([{}], dtype=object))}
    files |= {"line.npy": npy(np.zeros(9, np.uint8)), "claims.npy": npy(np.zeros((4, 4, 3), np.uint8))[:-30]}
    return files
