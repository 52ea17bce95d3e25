"""Every kind of picture, good and bad: the table of bad inputs, and what becomes of each."""

import io
import tracemalloc
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.pictures import encoded, photo, png_header
from vitral.data import decode as module
from vitral.data.decode import BadImageError, Limits, decode, from_pillow, read_header

JPEG = encoded(photo(), "JPEG", quality=95)


def reason_of(content: bytes) -> str:
    with pytest.raises(BadImageError) as caught:
        decode(content)
    return caught.value.reason


def same(first: np.ndarray, second: np.ndarray, within: float = 2.0) -> None:
    assert first.shape == second.shape
    assert np.abs(first.astype(float) - second.astype(float)).mean() <= within


def test_empty() -> None:
    assert reason_of(b"") == "empty"


@pytest.mark.parametrize(
    "content",
    [
        b"hello",
        b"<html></html>",
        b"<svg xmlns='x'/>",
        b"%!PS-Adobe-3.0 EPSF-3.0",
        b"%PDF-1.4",
        b"8BPS\x00\x01" + b"\0" * 40,
        b"SIMPLE  =                    T",
        b"\x00\x00\x01\x00\x01\x00",
        b"RIFF\x00\x00\x00\x00WAVE",
    ],
)
def test_other_types(content: bytes) -> None:
    assert reason_of(content) == "unsupported"


@pytest.mark.parametrize("part", [0.01, 0.5, 0.99])
def test_cut_jpegs(part: float) -> None:
    content = encoded(photo(200, 300), "JPEG", quality=90)
    assert reason_of(content[: max(4, int(len(content) * part))]) == "truncated"


@pytest.mark.parametrize("format", ["PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_other_cut_files(format: str) -> None:
    content = encoded(photo(100, 100), format)
    assert reason_of(content[: len(content) // 2]) in ("truncated", "corrupt")


def test_flipped_bytes_that_the_decoder_reports() -> None:
    content = bytearray(encoded(photo(100, 100), "PNG"))
    content[len(content) // 2] ^= 0xFF
    assert reason_of(bytes(content)) == "corrupt"
    broken = bytearray(encoded(photo(100, 100), "JPEG"))
    broken[20:60] = b"\xff" * 40  # the tables
    assert reason_of(bytes(broken)) in ("corrupt", "truncated")


def test_trailing_bytes_do_not_matter() -> None:
    assert np.array_equal(decode(JPEG + b"PK\x03\x04 a zip behind it" * 50), decode(JPEG))


@pytest.mark.parametrize(("width", "height"), [(30_000, 30_000), (12_000, 12_000)])
def test_too_many_pixels_are_seen_in_the_header(width: int, height: int) -> None:
    content = png_header(width, height)
    tracemalloc.start()
    assert reason_of(content) == "too many pixels"
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


@pytest.mark.parametrize(("width", "height"), [(1, 200_000), (200_000, 1), (101, 1)])
def test_bad_dimensions(width: int, height: int) -> None:
    assert reason_of(png_header(width, height)) == "bad dimensions"


def test_no_dimensions() -> None:
    assert reason_of(png_header(0, 0)) in ("bad dimensions", "corrupt", "truncated")


def test_too_many_bytes() -> None:
    with pytest.raises(BadImageError, match="too large"):
        read_header(JPEG, Limits(bytes=10))


def test_one_pixel() -> None:
    assert decode(encoded(Image.new("RGB", (1, 1), (9, 8, 7)), "PNG")).tolist() == [[[9, 8, 7]]]


@pytest.mark.parametrize("mode", ["CMYK", "L", "RGB"])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpegs_are_what_pillow_makes_of_them(mode: str, progressive: bool) -> None:
    content = encoded(photo().convert(mode), "JPEG", quality=92, progressive=progressive)
    same(decode(content), np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))


def test_sixteen_bits_are_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    content = encoded(Image.fromarray(ramp), "PNG")
    same(decode(content), np.repeat((ramp >> 8)[..., None], 3, axis=2), within=1)
    assert decode(content, channels=1).shape == (64, 64, 1)


@pytest.mark.parametrize("background", [0, 255])
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_show_the_background(mode: str, background: int) -> None:
    image = Image.new("RGBA", (8, 8), (200, 10, 10, 0))
    image.paste((0, 0, 200, 255), (0, 0, 4, 8))
    content = encoded(image.quantize(4) if mode == "P" else image.convert(mode), "PNG")
    pixels = decode(content, background=background)
    assert np.abs(pixels[:, 6].astype(int) - background).max() <= 2
    assert pixels[0, 1].astype(int).sum() < 450


def test_a_transparent_colour_of_rgb() -> None:
    image = Image.new("RGB", (4, 4), (255, 0, 0))
    assert (decode(encoded(image, "PNG", transparency=(255, 0, 0)), background=7) == 7).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_comes_out_upright(orientation: int) -> None:
    upright = photo(24, 36)
    turn = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(turn[orientation]) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(stored, "PNG", exif=exif)
    assert np.array_equal(decode(content), np.asarray(upright))
    header = read_header(content)
    assert (header.height, header.width) == (24, 36)
    as_tiff = encoded(stored, "TIFF", exif=exif)
    assert np.array_equal(decode(as_tiff), np.asarray(upright))
    assert (read_header(as_tiff).height, read_header(as_tiff).width) == (24, 36)
    assert np.array_equal(from_pillow(Image.open(io.BytesIO(as_tiff))), np.asarray(upright))
    as_jpeg = encoded(stored, "JPEG", quality=95, exif=exif)
    same(decode(as_jpeg), np.asarray(upright), within=4)
    assert decode(as_jpeg, shrink=2).shape == (12, 18, 3)


@pytest.mark.parametrize("mode", ["L", "CMYK"])
@pytest.mark.parametrize("shrink", [2, 4, 8])
def test_what_pillow_shrinks_has_the_sides_that_were_asked_for(mode: str, shrink: int) -> None:
    content = encoded(photo(1001, 1003).convert(mode), "JPEG", quality=90)
    assert decode(content, shrink=shrink).shape == (-(-1001 // shrink), -(-1003 // shrink), 3)


def test_a_header_costs_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(photo(40, 60), "PNG")
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: pytest.fail("it was decoded"))
    assert (read_header(content).height, read_header(content).width) == (40, 60)
    moved = content[:8] + b"\0\0\0\0tEXt" + zlib.crc32(b"tEXt").to_bytes(4, "big") + content[8:]
    with pytest.raises(BadImageError, match="not at the beginning"):
        read_header(moved)


def test_damaged_metadata_are_passed_over() -> None:
    for extra in (
        dict(exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"),
        dict(icc_profile=b"no profile"),
        dict(exif=b"x" * 60_000),
    ):
        assert decode(encoded(photo(), "JPEG", **extra)).shape == (40, 60, 3)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation(format: str) -> None:
    frames = [Image.new("RGB", (16, 16), (10 * i % 256, 5, 200)) for i in range(50)]
    content = encoded(frames[0], format, save_all=True, append_images=frames[1:], lossless=True)
    same(decode(content), np.asarray(frames[0]), within=3)


def test_text_chunks_that_are_bombs() -> None:
    plain = encoded(photo(), "PNG")
    bomb = b"zTXtkey\0\0" + zlib.compress(b"\0" * 50_000_000)
    chunk = (len(bomb) - 4).to_bytes(4, "big") + bomb + zlib.crc32(bomb).to_bytes(4, "big")
    content = plain[:33] + chunk + plain[33:]
    tracemalloc.start()
    with suppress(BadImageError):
        assert decode(content).shape == (40, 60, 3)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP", "TIFF"])
def test_every_type_of_picture(format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    same(decode(encoded(photo(), format, **options)), np.asarray(photo()), within=6)


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def test_arrays() -> None:
    pixels = np.asarray(photo())
    assert np.array_equal(decode(npy(pixels)), pixels)
    assert np.array_equal(decode(npy(pixels.astype(np.uint16) << 8)), pixels)
    same(decode(npy(pixels / 255.0)), pixels, within=0.01)
    bands = np.zeros((8, 9, 5), np.uint8)
    assert decode(npy(bands), channels=5).shape == (8, 9, 5)
    with pytest.raises(BadImageError, match="5 bands"):
        decode(npy(bands))
    for bad in (npy(np.array([{}], dtype=object)), npy(np.zeros((2, 2, 2, 2))), npy(pixels)[:-5], npy(pixels * 3.0)):
        with pytest.raises(BadImageError):
            decode(bad)


@pytest.mark.parametrize("header", [b"{'descr': (", b"{[]: 1}", b"{" * 60, b"\xff\xfe", b"{'descr': '|u1'}\n\n"])
def test_arrays_with_a_damaged_header(header: bytes) -> None:
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(12)
    assert reason_of(content) == "corrupt"


@pytest.mark.parametrize("format", ["TIFF", "PNG", "JPEG", "GIF"])
def test_damage_is_told_once_and_not_by_warnings(format: str, recwarn: pytest.WarningsRecorder) -> None:
    random = np.random.default_rng(0)
    whole, refused = encoded(photo(), format), 0
    for number in range(150):
        content = bytearray(whole)
        for _ in range(3):
            content[-int(random.integers(1, 200)) if number % 2 else int(random.integers(200))] = 255
        try:
            decode(bytes(content[: -number % 20 or None]))
        except BadImageError:
            refused += 1
    assert refused > 20
    assert not recwarn.list


def test_many_bands_of_a_tiff() -> None:
    frames = [Image.new("L", (6, 4), 40 * i) for i in range(5)]
    content = encoded(frames[0], "TIFF", save_all=True, append_images=frames[1:])
    pixels = decode(content, channels=5)
    assert pixels[0, 0].tolist() == [0, 40, 80, 120, 160]
    with pytest.raises(BadImageError, match="wrong channels"):
        decode(content, channels=7)


def test_without_simplejpeg_it_is_nearly_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(photo(300, 400), "JPEG", quality=90)
    fast = decode(content), decode(content, shrink=4)
    monkeypatch.setattr(module, "fast_jpeg", lambda: None)
    same(decode(content), fast[0], within=1)
    same(decode(content, shrink=4), fast[1], within=2)


def test_fuzz_never_raises_anything_else(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    kinds = [encoded(photo(), format) for format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")] + [
        npy(np.asarray(photo()))
    ]
    for number in range(600):
        content = bytearray(kinds[number % len(kinds)])
        for _ in range(int(random.integers(1, 20))):
            content[int(random.integers(len(content)))] = int(random.integers(256))
        if number % 3 == 0:
            content = content[: int(random.integers(1, len(content)))]
        with suppress(BadImageError):
            assert decode(bytes(content)).dtype == np.uint8
