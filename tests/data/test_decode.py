"""Decode every kind of image, good and bad, and refuse bad ones for the right reason."""

import io
import struct
import tracemalloc
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.images import encoded, npy, photo, png_header
from vitral.data import decode as module
from vitral.data.decode import decode, from_array, from_pillow
from vitral.data.headers import BadImageError, read_header

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


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
def test_cut_off_jpegs(fraction: float) -> None:
    content = encoded(photo(200, 300), "JPEG", quality=90)
    assert reason_of(content[: max(4, int(len(content) * fraction))]) == "truncated"


@pytest.mark.parametrize("format", ["PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_other_cut_off_files(format: str) -> None:
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
    assert np.array_equal(decode(JPEG + b"PK\x03\x04 a zip after it" * 50), decode(JPEG))


@pytest.mark.parametrize(("width", "height"), [(30_000, 30_000), (12_000, 12_000)])
def test_too_many_pixels_are_refused_by_the_header(width: int, height: int) -> None:
    content = png_header(width, height)
    tracemalloc.start()
    assert reason_of(content) == "too many pixels"
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


def claim(format: str, width: int, height: int) -> bytes:
    """Return a small image file whose header claims another size."""
    content = bytearray(encoded(photo(), format, **({"lossless": True, "exif": b"Exif"} if format == "WEBP" else {})))
    if format == "JPEG":
        start = content.index(b"\xff\xc0") + 5
        content[start : start + 4] = struct.pack(">HH", height, width)
    elif format == "GIF":
        content[6:10] = struct.pack("<HH", width, height)
    elif format == "BMP":
        content[18:26] = struct.pack("<ii", width, height)
    elif format == "WEBP":
        content[24:30] = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    else:
        for tag, side in ((256, width), (257, height)):
            start = content.index(struct.pack("<H", tag), int.from_bytes(content[4:8], "little"))
            content[start : start + 12] = struct.pack("<HHII", tag, 4, 1, side)
    return bytes(content)


@pytest.mark.parametrize("format", ["JPEG", "GIF", "BMP", "WEBP", "TIFF"])
@pytest.mark.parametrize(("width", "height"), [(10_000, 10_000), (16_000, 16_000)])
def test_claimed_sizes_are_checked_before_pillow_opens_the_file(
    format: str, width: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow would warn about the first size and raise an error of its own for the second."""
    monkeypatch.setattr("PIL.Image.open", lambda *arguments, **options: pytest.fail("opened"))
    with pytest.raises(BadImageError, match=f"{width} x {height} pixels") as caught:
        read_header(claim(format, width, height))
    assert caught.value.reason == "too many pixels"


@pytest.mark.parametrize(("width", "height"), [(1, 200_000), (200_000, 1), (101, 1)])
def test_bad_dimensions(width: int, height: int) -> None:
    assert reason_of(png_header(width, height)) == "bad dimensions"


def test_no_dimensions() -> None:
    assert reason_of(png_header(0, 0)) in ("bad dimensions", "corrupt", "truncated")


def test_too_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitral.data.headers.MAX_BYTES", 10)
    with pytest.raises(BadImageError, match="too large"):
        read_header(JPEG)


def test_one_pixel() -> None:
    assert decode(encoded(Image.new("RGB", (1, 1), (9, 8, 7)), "PNG")).tolist() == [[[9, 8, 7]]]


def luma(pixels: np.ndarray) -> np.ndarray:
    """Return gray values by ITU-R 601, which JPEG and Pillow use."""
    return np.repeat((pixels @ np.array([0.299, 0.587, 0.114]))[..., None], 3, axis=2)


@pytest.mark.parametrize("mode", ["CMYK", "L", "RGB"])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpegs_have_the_pixels_that_were_stored(mode: str, progressive: bool) -> None:
    pixels = np.asarray(photo())
    stored = Image.fromarray(np.dstack([255 - pixels, np.zeros((40, 60), np.uint8)]), "CMYK")
    content = encoded(stored if mode == "CMYK" else photo().convert(mode), "JPEG", quality=95, progressive=progressive)
    expected = luma(pixels) if mode == "L" else pixels
    same(decode(content), expected, within=4)  # lossy, with colors at half the resolution
    same(decode(content, channels=1), luma(pixels)[..., :1], within=3)


@pytest.mark.parametrize("color", [(250, 10, 10), (10, 250, 10), (10, 10, 250), (90, 120, 200)])
@pytest.mark.parametrize("fast", [True, False])
def test_the_known_color_of_a_flat_jpeg(
    color: tuple[int, int, int], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fast:
        monkeypatch.setattr(module, "fast_jpeg", lambda: None)
    content = encoded(Image.new("RGB", (20, 30), color), "JPEG", quality=95)
    for shrink in (1, 2, 4, 8):
        pixels = decode(content, shrink=shrink)
        assert pixels.shape == (-(-30 // shrink), -(-20 // shrink), 3)
        assert np.abs(pixels.astype(int) - color).max() <= 3


def test_sixteen_bits_keep_their_upper_half() -> None:
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    content = encoded(Image.fromarray(ramp), "PNG")
    same(decode(content), np.repeat((ramp >> 8)[..., None], 3, axis=2), within=0)
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


def test_a_transparent_color_of_rgb() -> None:
    image = Image.new("RGB", (4, 4), (255, 0, 0))
    assert (decode(encoded(image, "PNG", transparency=(255, 0, 0)), background=7) == 7).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_turned_upright(orientation: int) -> None:
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
def test_pillow_shrinks_to_the_requested_sides(mode: str, shrink: int) -> None:
    content = encoded(photo(1001, 1003).convert(mode), "JPEG", quality=90)
    assert decode(content, shrink=shrink).shape == (-(-1001 // shrink), -(-1003 // shrink), 3)


def test_reading_a_header_decodes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(photo(40, 60), "PNG")
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: pytest.fail("decoded"))
    assert (read_header(content).height, read_header(content).width) == (40, 60)
    moved = content[:8] + b"\0\0\0\0tEXt" + zlib.crc32(b"tEXt").to_bytes(4, "big") + content[8:]
    with pytest.raises(BadImageError, match="not at the beginning"):
        read_header(moved)


def test_damaged_metadata_is_ignored() -> None:
    for extra in (
        dict(exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"),
        dict(icc_profile=b"not a profile"),
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
def test_every_format(format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    same(decode(encoded(photo(), format, **options)), np.asarray(photo()), within=6 if format == "JPEG" else 0)


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


@pytest.mark.parametrize("dtype", ["<i8", ">i8", ">u8", "<u4", ">i2", "<i4", "|u1"])
def test_integer_arrays_in_range(dtype: str) -> None:
    pixels = np.asarray(photo())
    assert np.array_equal(decode(npy(pixels.astype(dtype))), pixels)
    assert np.array_equal(from_array(pixels.astype(dtype)), pixels)


def test_byte_and_memory_order_do_not_matter() -> None:
    pixels = np.asarray(photo())
    assert np.array_equal(decode(npy(pixels.astype(">u2") << 8)), pixels)
    assert np.array_equal(decode(npy((pixels / 255).astype(">f4"))), pixels)
    assert np.array_equal(decode(npy(np.asfortranarray(pixels))), pixels)
    mask = pixels[..., 0] > 100
    assert np.array_equal(decode(npy(mask), channels=1)[..., 0], mask * 255)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.full((4, 4), 256, np.int64), "int64 with values from 256 to 256; expected 0 to 255"),
        (np.full((4, 4), -1, np.int16), "int16 with values from -1 to -1; expected 0 to 255"),
        (np.full((4, 4), 2.0), "float64 with values from 2 to 2; expected 0 to 1"),
        (np.full((4, 4), np.nan), "float64 with values from nan to nan; expected 0 to 1"),
        (np.zeros((4, 4), np.complex64), "complex64; expected numbers"),
        (np.zeros(4, np.uint8), r"shape \(4,\); expected \(H, W\)"),
        (np.zeros((2, 2, 2, 2), np.uint8), r"shape \(2, 2, 2, 2\)"),
    ],
)
def test_arrays_out_of_range(array: np.ndarray, reason: str) -> None:
    for read in (lambda: decode(npy(array)), lambda: from_array(array)):
        with pytest.raises(BadImageError, match=reason) as caught:
            read()
        assert caught.value.reason == "unsupported"


@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_too_large_arrays_cost_no_memory(dtype: type) -> None:
    array = np.broadcast_to(np.zeros(1, dtype), (15_000, 15_000))  # no memory of its own
    start = npy(np.zeros((15_000, 1), dtype)).replace(b"(15000, 1)", b"(15000, 15000)")[:1000]
    tracemalloc.start()
    with pytest.raises(BadImageError, match="too many pixels"):
        from_array(array)
    with pytest.raises(BadImageError, match="too many pixels"):
        read_header(start)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_threads_leave_the_warning_filters_alone() -> None:
    """catch_warnings is not safe with threads: it could leave a filter that ignores everything."""
    damaged = encoded(photo(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff")
    decode(damaged)
    filters = list(warnings.filters)
    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(decode, [damaged, JPEG] * 200))) == 400
    assert warnings.filters == filters
    with pytest.warns(RuntimeWarning, match="still visible"):
        warnings.warn("still visible", RuntimeWarning, stacklevel=1)


def test_warnings_of_other_modules_about_pillow_bombs_stay_visible() -> None:
    decode(JPEG)
    with pytest.warns(Image.DecompressionBombWarning):
        warnings.warn_explicit("large", Image.DecompressionBombWarning, "Image.py", 1, module="PIL.Image")


@pytest.mark.parametrize("header", [b"{'descr': (", b"{[]: 1}", b"{" * 60, b"\xff\xfe", b"{'descr': '|u1'}\n\n"])
def test_arrays_with_a_damaged_header(header: bytes) -> None:
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(12)
    assert reason_of(content) == "corrupt"


@pytest.mark.parametrize("format", ["TIFF", "PNG", "JPEG", "GIF"])
def test_damage_does_not_warn(format: str, recwarn: pytest.WarningsRecorder) -> None:
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


def test_pillow_decodes_jpegs_nearly_as_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(photo(300, 400), "JPEG", quality=90)
    fast = decode(content), decode(content, shrink=4)
    monkeypatch.setattr(module, "fast_jpeg", lambda: None)
    same(decode(content), fast[0], within=1)
    same(decode(content, shrink=4), fast[1], within=2)


def test_damaged_bytes_raise_bad_image_error_only(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    files = [encoded(photo(), format) for format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")] + [
        npy(np.asarray(photo()))
    ]
    for number in range(600):
        content = bytearray(files[number % len(files)])
        for _ in range(int(random.integers(1, 20))):
            content[int(random.integers(len(content)))] = int(random.integers(256))
        if number % 3 == 0:
            content = content[: int(random.integers(1, len(content)))]
        with suppress(BadImageError):
            assert decode(bytes(content)).dtype == np.uint8
