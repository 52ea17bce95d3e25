"""TIFFs of many bands in the layouts that instruments write, built here byte by byte."""

import io
import struct
import zlib
from itertools import product

import numpy as np
import pytest
from PIL import Image

from tests.data.images import encoded, photo
from vitral.data.decode import decode, decode_visible
from vitral.data.headers import BadImageError, read_header
from vitral.data.tiff import find_bands


def write_tiff(
    pixels: np.ndarray,
    *,
    order: str = "<",
    photometric: int = 1,
    planes: bool = False,
    rows: int | None = None,
    tile: int | None = None,
    deflate: bool = False,
    predictor: int = 1,
    extra: int = 0,
) -> bytes:
    """Return (H, W, bands) as a TIFF of strips or tiles, by the TIFF 6.0 specification."""
    height, width, bands = pixels.shape
    planes_or_all = [pixels[..., [band]] for band in range(bands)] if planes else [pixels]
    step_y, step_x = (tile, tile) if tile else (rows or height, width)
    blocks = []
    for plane, top, left in product(planes_or_all, range(0, height, step_y), range(0, width, step_x)):
        block = plane[top : top + step_y, left : left + step_x]
        if tile:
            block = np.pad(block, ((0, tile - block.shape[0]), (0, tile - block.shape[1]), (0, 0)))
        if predictor == 2:
            block = np.diff(block, axis=1, prepend=np.zeros_like(block[:, :1]))
        content = block.astype(block.dtype.newbyteorder(order)).tobytes()
        blocks.append(zlib.compress(content) if deflate else content)
    offsets = np.cumsum([8, *map(len, blocks)]).tolist()
    where, lengths = (324, 325) if tile else (273, 279)
    tags = {
        256: [width],
        257: [height],
        258: [8 * pixels.dtype.itemsize] * bands,
        259: [8 if deflate else 1],
        262: [photometric],
        where: offsets[:-1],
        277: [bands],
        lengths: list(map(len, blocks)),
        284: [2 if planes else 1],
        317: [predictor],
        338: [extra] * (bands - (3 if photometric == 2 else 1)),
        339: [{"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]] * bands,
    }
    tags |= {322: [tile], 323: [tile]} if tile else {278: [step_y]}
    tags = {tag: values for tag, values in tags.items() if values}
    directory, arrays = b"", b""
    arrays_start = offsets[-1] + 2 + 12 * len(tags) + 4
    for tag, values in sorted(tags.items()):
        packed = struct.pack(f"{order}{len(values)}I", *values)
        if len(values) > 1:
            packed, arrays = struct.pack(f"{order}I", arrays_start + len(arrays)), arrays + packed
        directory += struct.pack(f"{order}HHI", tag, 4, len(values)) + packed
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, offsets[-1])
    return head + b"".join(blocks) + struct.pack(f"{order}H", len(tags)) + directory + b"\0" * 4 + arrays


def bands_of(kind: str, bands: int = 5) -> np.ndarray:
    random = np.random.default_rng(bands)
    if kind == "float32":
        return random.random((37, 53, bands), np.float32)
    return random.integers(0, 2 ** (8 * np.dtype(kind).itemsize), (37, 53, bands), dtype=kind)


def as_bytes(pixels: np.ndarray) -> np.ndarray:
    if pixels.dtype.kind == "f":
        return (pixels * 255).round().astype(np.uint8)
    return (pixels >> 8 * (pixels.dtype.itemsize - 1)).astype(np.uint8)


@pytest.mark.parametrize("kind", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("blocks", [{}, {"rows": 7}, {"tile": 16}])
def test_plain_layouts(kind: str, planes: bool, order: str, blocks: dict[str, int]) -> None:
    pixels = bands_of(kind)
    content = write_tiff(pixels, order=order, planes=planes, **blocks)
    header = read_header(content)
    assert (header.height, header.width, header.bands) == (37, 53, 5)
    assert np.array_equal(decode(content, channels=5), as_bytes(pixels))


@pytest.mark.parametrize("kind", ["uint8", "uint16"])
@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize("predictor", [1, 2])
@pytest.mark.parametrize("blocks", [{}, {"rows": 7}, {"tile": 16}])
def test_compressed_layouts(kind: str, planes: bool, predictor: int, blocks: dict[str, int]) -> None:
    pixels = bands_of(kind)
    content = write_tiff(pixels, planes=planes, deflate=True, predictor=predictor, **blocks)
    assert np.array_equal(decode(content, channels=5), as_bytes(pixels))


def test_pillow_agrees_on_what_it_can_read() -> None:
    """Pillow reads the same bytes described as a gray or an RGB image, so the writer of this test is correct."""
    pixels = bands_of("uint8", 3)
    for planes, deflate in product([False, True], [False, True]):
        content = write_tiff(pixels, photometric=2, planes=planes, deflate=deflate)
        assert find_bands(content) is None
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(content))), pixels)


@pytest.mark.parametrize("bands", [2, 4, 13])
def test_other_numbers_of_bands(bands: int) -> None:
    pixels = bands_of("uint8", bands)
    content = write_tiff(pixels)
    assert read_header(content).bands == bands
    assert np.array_equal(decode(content, channels=bands), pixels)
    with pytest.raises(BadImageError, match=f"{bands} bands; expected 3"):
        decode(content)


def test_photometrics_and_more() -> None:
    """Red, green, blue and infrared are four bands, or a color image for three channels. Alpha is not a band."""
    pixels = bands_of("uint8", 4)
    content = write_tiff(pixels, photometric=2)
    assert read_header(content).bands == 4
    assert np.array_equal(decode(content, channels=4), pixels)
    assert np.array_equal(decode(content), pixels[..., :3])
    assert decode(content, channels=1).shape == (37, 53, 1)
    transparent = write_tiff(pixels, photometric=2, extra=2)
    assert read_header(transparent).bands == 3
    assert find_bands(encoded(photo().convert("RGBA"), "TIFF")) is None
    assert find_bands(encoded(photo().convert("LA"), "TIFF")) is None


def test_for_eyes() -> None:
    pixels = bands_of("uint8", 5)
    assert np.array_equal(decode_visible(write_tiff(pixels)), pixels[..., :3])
    two = bands_of("uint8", 2)
    assert np.array_equal(decode_visible(write_tiff(two)), np.repeat(two[..., :1], 3, axis=2))
    assert decode_visible(encoded(photo(), "PNG")).shape == (40, 60, 3)


def test_frames_are_bands_and_an_endless_chain_of_them_is_not() -> None:
    frames = [Image.new("L", (6, 4), 40 * i) for i in range(5)]
    content = encoded(frames[0], "TIFF", save_all=True, append_images=frames[1:])
    assert read_header(content).bands == 5
    many = encoded(frames[0], "TIFF", save_all=True, append_images=frames[:1] * 300)
    assert read_header(many).bands == 1
    assert decode(many).shape == (4, 6, 3)


def test_damaged_and_unsupported_files_are_refused() -> None:
    pixels = bands_of("float32")
    with pytest.raises(BadImageError, match="big-endian"):
        decode(write_tiff(pixels, order=">", deflate=True), channels=5)
    with pytest.raises(BadImageError, match="predictor 3"):
        decode(write_tiff(pixels, deflate=True, predictor=3), channels=5)
    huge = write_tiff(np.zeros((1, 1, 5), np.uint8)).replace(
        struct.pack("<HHII", 256, 4, 1, 1), struct.pack("<HHII", 256, 4, 1, 60_000)
    )
    with pytest.raises(BadImageError, match="bad dimensions"):
        read_header(huge)
    tall = huge.replace(struct.pack("<HHII", 257, 4, 1, 1), struct.pack("<HHII", 257, 4, 1, 1_000))
    with pytest.raises(BadImageError, match="too many pixels"):  # 60 million, but of five bands
        read_header(tall)


@pytest.mark.parametrize("tag", [256, 257, 258, 262, 277])
def test_tags_without_a_value(tag: int) -> None:
    content = write_tiff(bands_of("uint8"))
    at = content.rindex(struct.pack("<HH", tag, 4))
    with pytest.raises(BadImageError):
        decode(content[: at + 4] + struct.pack("<I", 0) + content[at + 8 :], channels=5)


def test_fuzz_never_raises_anything_else() -> None:
    random = np.random.default_rng(0)
    kinds = [write_tiff(bands_of("uint8")), write_tiff(bands_of("uint16"), planes=True, deflate=True, tile=16)]
    refused = 0
    for number in range(400):
        content = bytearray(kinds[number % len(kinds)])
        for _ in range(int(random.integers(1, 8))):  # mostly in the directory, at the end
            content[-int(random.integers(1, 500)) if number % 3 else int(random.integers(8))] = int(
                random.integers(256)
            )
        try:
            assert decode(bytes(content), channels=5).dtype == np.uint8
        except BadImageError:
            refused += 1
    assert refused > 100
