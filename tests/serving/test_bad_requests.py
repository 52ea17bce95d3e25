"""Bad images and requests, each with its exact status, against a real server.

The rows are those that servers for models have failed on: decompression bombs, endless bodies, foreign sites.
"""

import base64
import json
import os
import signal
import socket
import struct
import time
import zlib
from io import BytesIO

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.data.images import as_heic, encoded, photo, png_header
from tests.serving.servers import RunningServer, request, resident, running, wait_for
from vitral.serving.settings import Limits

IMAGE = photo(240, 320)
JPEG, PNG, WEBP = (encoded(IMAGE, name) for name in ("JPEG", "PNG", "WEBP"))
MB = 1_000_000


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def with_chunk(kind: bytes, content: bytes) -> bytes:
    """Return the PNG with another chunk after its header."""
    return PNG[:33] + chunk(kind, content) + PNG[33:]


def check(response: httpx.Response, status: int, *codes: str) -> None:
    assert response.status_code == status, response.text
    if status >= 400:
        error = response.json()["error"]
        assert set(error) == {"code", "message"}
        assert not codes or error["code"] in codes
        assert "/" not in error["message"].replace("/api/", ""), "a path in an error"
        assert "Traceback" not in response.text


def probabilities(server: RunningServer, content: bytes) -> dict[str, float]:
    response = server.post(content, params={"top_k": 10})
    check(response, 200)
    return {row["label"]: row["probability"] for row in response.json()["predictions"][0]["top"]}


def test_empty(server: RunningServer) -> None:
    check(server.post(b""), 400, "empty")
    check(httpx.post(f"{server.url}/api/predict", files={"images": b""}), 400, "empty")


OTHER_TYPES = {
    "text": b"hello world",
    "html": b"<!doctype html><html></html>",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n",
    "pdf": b"%PDF-1.7\n",
    "psd": b"8BPS\0\1" + bytes(99),
    "fits": b"SIMPLE  =                    T" + bytes(99),
    "ico": b"\0\0\1\0\1\0" + bytes(99),
    "tiff": encoded(IMAGE, "TIFF"),
    "bmp": encoded(IMAGE, "BMP"),
    "gif": encoded(IMAGE, "GIF", save_all=True, append_images=[IMAGE] * 3),
    "npy": b"\x93NUMPY\x01\x00" + bytes(118),
    "zip": b"PK\3\4" + bytes(99),
    "avif": encoded(IMAGE, "AVIF"),
    "heic": as_heic(IMAGE),
    "jpeg 2000": encoded(IMAGE, "JPEG2000"),
}


@pytest.mark.parametrize("name", OTHER_TYPES)
def test_other_types(server: RunningServer, name: str) -> None:
    check(server.post(OTHER_TYPES[name], headers={"Content-Type": "image/jpeg"}), 415, "unsupported")


@pytest.mark.parametrize("part", [0.01, 0.5, 0.99])
def test_truncated(server: RunningServer, part: float) -> None:
    for content in (JPEG, PNG, WEBP):
        check(server.post(content[: int(len(content) * part)]), 422, "truncated")


def test_corrupt(server: RunningServer) -> None:
    damaged = JPEG[:200] + bytes(byte ^ 0x5A for byte in JPEG[200:600]) + JPEG[600:]
    with pytest.raises(Exception):  # noqa: B017, PT011 (the decoder has to report it)
        Image.open(BytesIO(damaged)).load()
    check(server.post(damaged), 422, "corrupt")


def test_trailing_bytes(server: RunningServer) -> None:
    assert probabilities(server, JPEG + b"PK\3\4" + bytes(999)) == probabilities(server, JPEG)


def zeros_png() -> bytes:
    """Return a PNG of 12,000 x 12,000 black pixels, which has 140 kB."""
    compressor, row = zlib.compressobj(9), bytes(12001)
    body = b"".join(compressor.compress(row * 100) for _ in range(120)) + compressor.flush()
    return png_gray(12_000, 12_000) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def png_gray(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))


@pytest.mark.parametrize("content", [png_header(30_000, 30_000), zeros_png()], ids=["header only", "zeros"])
def test_too_many_pixels(server: RunningServer, content: bytes) -> None:
    with server.client() as client:
        client.get("/healthz")
        before, fastest = server.memory(), 9.0
        for _ in range(5):
            start = time.monotonic()
            check(client.post("/api/predict", content=content), 413, "too_many_pixels")
            fastest = min(fastest, time.monotonic() - start)
        assert fastest < 0.05
        assert server.memory() - before < 5 * MB


@pytest.mark.parametrize("size", [(0, 0), (200_000, 1), (1, 200_000), (1010, 10), (17_000, 1000)])
def test_bad_dimensions(server: RunningServer, size: tuple[int, int]) -> None:
    check(server.post(png_header(*size)), 422, "bad_dimensions")


def test_one_pixel(server: RunningServer) -> None:
    check(server.post(encoded(Image.new("RGB", (1, 1), "red"), "PNG")), 200)


def test_color_modes(server: RunningServer) -> None:
    """Modes of JPEG give what Pillow's conversion to RGB gives."""
    modes = {"cmyk": IMAGE.convert("CMYK"), "gray": IMAGE.convert("L")}
    files = {name: encoded(image, "JPEG", quality=95) for name, image in modes.items()}
    files |= {"progressive": encoded(IMAGE, "JPEG", progressive=True)}
    adobe = files["cmyk"].index(b"\xff\xee")  # without this segment the colors are not inverted
    files["plain cmyk"] = files["cmyk"][:adobe] + files["cmyk"][adobe + 16 :]
    for content in files.values():
        as_rgb = encoded(Image.open(BytesIO(content)).convert("RGB"), "PNG")
        expected, got = probabilities(server, as_rgb), probabilities(server, content)
        assert max(abs(expected[label] - got[label]) for label in expected) < 0.02  # within rounding of the colors


def test_deep_gray(server: RunningServer) -> None:
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    deep = probabilities(server, encoded(Image.fromarray(ramp), "PNG"))
    gray = probabilities(server, encoded(Image.fromarray((ramp >> 8).astype(np.uint8)), "PNG"))
    assert max(abs(deep[label] - gray[label]) for label in gray) < 1e-6


def test_transparency(server: RunningServer) -> None:
    """Transparent pixels show the white background of the model's preprocessing."""
    mask = Image.fromarray((np.indices((240, 320)).sum(0) % 256).astype(np.uint8))
    transparent = IMAGE.copy()
    transparent.putalpha(mask)
    white = Image.new("RGB", IMAGE.size, "white")
    white.paste(IMAGE, mask=mask)
    palette = IMAGE.quantize(16)
    hidden = np.isin(np.asarray(palette), (2, 3))
    shown = Image.fromarray(np.where(hidden[..., None], 255, np.asarray(palette.convert("RGB"))).astype(np.uint8))
    files = {
        "RGBA": (encoded(transparent, "PNG"), white),
        "LA": (encoded(transparent.convert("LA"), "PNG"), white.convert("L")),
        "P": (encoded(palette, "PNG", transparency=bytes([255, 255, 0, 0])), shown),
    }
    for name, (content, image) in files.items():
        expected, got = probabilities(server, encoded(image, "PNG")), probabilities(server, content)
        assert max(abs(expected[label] - got[label]) for label in expected) < 0.01, name  # rounding of the blend


def test_orientations(server: RunningServer) -> None:
    """All eight orientations of the same image give the same probabilities."""
    pixels = np.asarray(IMAGE)
    turned = {1: pixels, 2: pixels[:, ::-1], 3: pixels[::-1, ::-1], 4: pixels[::-1], 5: pixels.swapaxes(0, 1)}
    turned |= {6: pixels.swapaxes(0, 1)[:, ::-1][::-1, ::-1], 7: pixels.swapaxes(0, 1)[::-1, ::-1]}
    turned |= {8: pixels.swapaxes(0, 1)[::-1][::-1, ::-1]}
    expected = probabilities(server, encoded(IMAGE, "PNG"))
    for orientation, stored in turned.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        got = probabilities(server, encoded(Image.fromarray(stored), "PNG", exif=exif.tobytes()))
        assert max(abs(expected[label] - got[label]) for label in expected) < 1e-4, orientation


def test_odd_metadata(server: RunningServer) -> None:
    loop = b"Exif\0\0II*\0\x08\0\0\0\1\0\x69\x87\4\0\1\0\0\0\x08\0\0\0\x08\0\0\0"  # an IFD that contains itself
    exif = b"Exif\0\0" + bytes(60_000)
    for options in (dict(icc_profile=b"not a profile"), dict(exif=exif), dict(exif=loop), dict(xmp=bytes(60_000))):
        assert probabilities(server, encoded(IMAGE, "JPEG", **options)) == probabilities(server, JPEG)


@pytest.mark.parametrize("format", ["WEBP", "PNG"])
def test_animations_show_the_first_frame(server: RunningServer, format: str) -> None:
    frames = [Image.new("RGB", (32, 32), (number % 256, 0, 0)) for number in range(1000)]
    content = encoded(
        photo(32, 32), format, save_all=True, append_images=frames, **({} if format == "PNG" else {"lossless": True})
    )
    fastest = 9.0
    for _ in range(3):
        start = time.monotonic()
        got = probabilities(server, content)
        fastest = min(fastest, time.monotonic() - start)
    assert fastest < 1
    expected = probabilities(server, encoded(photo(32, 32), "PNG"))
    assert max(abs(expected[label] - got[label]) for label in expected) < 1e-4


def test_many_scans(server: RunningServer) -> None:
    """A progressive JPEG with thousands of scans is refused: each takes the time of all pixels."""
    progressive = encoded(Image.new("L", (4000, 4000), 128), "JPEG", progressive=True)
    check(server.post(progressive), 200)
    scan = progressive[progressive.rindex(b"\xff\xda") : -2]
    start = time.monotonic()
    check(server.post(progressive[:-2] + scan * 100_000 + b"\xff\xd9"), 422, "corrupt")
    assert time.monotonic() - start < 2


def test_compressed_metadata(server: RunningServer) -> None:
    bomb = zlib.compress(bytes(200 * MB), 9)
    for content in (with_chunk(b"zTXt", b"Comment\0\0" + bomb), with_chunk(b"iCCP", b"icc\0\0" + bomb)):
        before = sum(map(resident, server.worker_pids()))
        assert server.post(content).status_code in (200, 422)
        assert sum(map(resident, server.worker_pids())) - before < 20 * MB


MULTIPART = "multipart/form-data; boundary="


def part(content: bytes, name: str = "a.jpg", boundary: str = "b") -> bytes:
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="images"; filename="{name}"\r\n\r\n'
    return head.encode() + content + b"\r\n"


def test_multipart(server: RunningServer) -> None:
    def post(body: bytes, content_type: str) -> httpx.Response:
        return server.post(body, headers={"Content-Type": content_type})

    body = part(JPEG) + b"--b--\r\n"
    check(post(body, MULTIPART + "b"), 200)
    check(post(body, "multipart/form-data"), 400, "bad_boundary")
    check(post(body, MULTIPART + "b" * 71), 400, "bad_boundary")
    assert server.exchange(request(body, f"Content-Type: {MULTIPART}{'b' * MB}")).status == 431  # a head of 1 MB
    check(post(part(b"x") * 10_000 + b"--b--\r\n", MULTIPART + "b"), 400, "too_many_images")
    check(post(part(JPEG)[:-200], MULTIPART + "b"), 400, "bad_multipart")
    check(post(b"--b--\r\n", MULTIPART + "b"), 400, "no_image")
    response = post(part(JPEG, name="../../etc/passwd") + b"--b--\r\n", MULTIPART + "b")
    check(response, 200)
    assert response.json()["predictions"][0]["file"] == "../../etc/passwd"  # shown, never opened


@pytest.mark.parametrize("url", ["http://169.254.169.254/", "file:///etc/passwd"])
def test_addresses_are_not_images(server: RunningServer, url: str) -> None:
    check(
        server.post(json.dumps({"url": url}).encode(), headers={"Content-Type": "application/json"}),
        400,
        "unknown_field",
    )


def test_json(server: RunningServer) -> None:
    image = base64.b64encode(JPEG).decode()

    def post(text: str) -> httpx.Response:
        return server.post(text.encode(), headers={"Content-Type": "application/json"})

    check(post(json.dumps({"image": image, "top_k": 3})), 200)
    check(post(json.dumps({"images": [image, image]})), 200)
    check(post(json.dumps({"image": image[:-7] + "*!*"})), 400, "bad_base64")
    check(post("[" * 10_000), 400, "bad_json")
    check(post('{"image": ' + "[" * 100_000), 400, "bad_json")
    check(post('{"image": "", "top_k": NaN}'), 400, "bad_json")
    start = time.monotonic()
    check(post('{"images": [' + '"",' * 3_000_000 + '""]}'), 400, "bad_json")
    assert time.monotonic() - start < 2
    for value in (-1, 0, 10**9, "a", True, 1.5, None, []):
        check(post(json.dumps({"image": image, "top_k": value})), 400, "invalid_parameter")
    for value in ("-1", "1000000000", "a", "nan", ""):
        check(server.post(JPEG, params={"top_k": value}), 400, "invalid_parameter")


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:1", "http://127.0.0.1.evil.example"]
)
def test_foreign_origin(server: RunningServer, origin: str) -> None:
    check(server.post(JPEG, headers={"Origin": origin}), 403, "foreign_origin")
    check(server.post(JPEG, headers={"Origin": server.url}), 200)
    check(server.post(JPEG, headers={"Sec-Fetch-Site": "cross-site"}), 403, "foreign_origin")


def test_deadlines_are_those_of_the_documentation() -> None:
    limits = Limits()
    assert (limits.head_seconds, limits.body_seconds, limits.body) == (10, 30, 10 * 2**20)
    assert (limits.pixels, limits.side) == (40_000_000, 16_384)


def test_client_leaves(server: RunningServer) -> None:
    """Images of clients that left are dropped from the queue and counted."""
    with running(max_queue=64, max_per_client=64) as slow:
        (worker,) = slow.worker_pids()
        os.kill(worker, signal.SIGSTOP)
        connections = [socket.create_connection(("127.0.0.1", slow.port)) for _ in range(20)]
        for connection in connections:
            connection.sendall(request(JPEG))
        wait_for(lambda: slow.metric("vitral_pending_images") == 20)
        for connection in connections:
            connection.close()
        wait_for(lambda: slow.metric("vitral_pending_images") == 0)
        os.kill(worker, signal.SIGCONT)
        assert slow.metric("vitral_dropped_images_total") == 20
        check(slow.post(JPEG), 200)
