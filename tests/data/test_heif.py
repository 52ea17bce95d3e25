"""HEIC and AVIF, as phones write them: upright, within the limits, and refused for the right reason."""

import builtins
import io
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageOps

import vitral
from tests.cli.typed import typed
from tests.data.images import as_heic, encoded, photo
from vitral.data import heif
from vitral.data.decode import decode, from_pillow
from vitral.data.headers import BadImageError, read_header
from vitral.data.scan import scan

FILES = {"HEIF": as_heic(photo(96, 128)), "AVIF": encoded(photo(96, 128), "AVIF")}


def same(first: np.ndarray, second: np.ndarray) -> None:
    """Compare lossy pixels, with colors at half the resolution; a turned image differs by more than 50."""
    assert first.shape == second.shape
    assert np.abs(first.astype(float) - second.astype(float)).mean() <= 7


def exif_of(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_turned_once(orientation: int) -> None:
    """Encoders store the orientation in a box of its own; phones repeat it in EXIF."""
    image, exif = photo(96, 128), exif_of(orientation)
    content = as_heic(image, exif=exif)
    assert exif[-20:] in content or orientation == 1  # EXIF is still there
    reference = pillow_heif.open_heif(content).to_pillow()
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded(image, "PNG", exif=exif))))
    same(np.asarray(reference), np.asarray(expected))  # pillow-heif turns it upright
    assert np.array_equal(decode(content), np.asarray(reference))
    avif = encoded(image, "AVIF", exif=exif)
    reference = ImageOps.exif_transpose(Image.open(io.BytesIO(avif)))
    same(np.asarray(reference), np.asarray(expected))
    assert np.array_equal(decode(avif), np.asarray(reference))
    assert np.array_equal(from_pillow(Image.open(io.BytesIO(avif))), np.asarray(reference))
    for file in (content, avif):
        header = read_header(file)
        assert (header.height, header.width) == decode(file).shape[:2] == np.asarray(expected).shape[:2]


@pytest.mark.parametrize("format", FILES)
def test_pixels_gray_and_transparency(format: str) -> None:
    def write(image: Image.Image) -> bytes:
        return as_heic(image) if format == "HEIF" else encoded(image, format)

    same(decode(FILES[format]), np.asarray(photo(96, 128)))
    assert read_header(FILES[format]).format == format
    gray = photo(96, 128).convert("L")
    same(decode(write(gray), channels=1)[..., 0], np.asarray(gray))
    clear = photo(96, 128)
    clear.putalpha(0)
    assert np.abs(decode(write(clear), background=9).astype(int) - 9).max() <= 2


def test_deep_colors_and_tiles() -> None:
    deep = np.asarray(photo(96, 128)).astype(np.uint16) << 8
    stream = io.BytesIO()
    pillow_heif.from_bytes("RGB;16", (128, 96), deep.tobytes()).save(stream, quality=90)
    same(decode(stream.getvalue()), np.asarray(photo(96, 128)))
    tiled = as_heic(photo(200, 300), tile_size=128)  # as Apple stores photos
    same(decode(tiled), np.asarray(photo(200, 300)))
    assert heif.read_size(tiled) == (200, 300)


@pytest.mark.parametrize("format", FILES)
@pytest.mark.parametrize("fraction", [0.005, 0.1, 0.5, 0.99])
def test_cut_off_files(format: str, fraction: float) -> None:
    content = FILES[format]
    with pytest.raises(BadImageError) as caught:
        decode(content[: max(16, int(len(content) * fraction))])
    assert caught.value.reason == "truncated"


def claim(format: str, width: int, height: int) -> bytes:
    """Return an image file whose header claims another size."""
    return FILES[format].replace(struct.pack(">II", 128, 96), struct.pack(">II", width, height))


@pytest.mark.parametrize("format", FILES)
def test_claimed_sizes_are_checked_before_the_file_is_opened(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.Image.open", lambda *arguments, **options: pytest.fail("opened"))
    monkeypatch.setattr("pillow_heif.HeifImageFile", lambda *arguments: pytest.fail("opened"))
    for size, reason in (((10_000, 10_000), "too many pixels"), ((70_000, 9), "bad dimensions")):
        with pytest.raises(BadImageError) as caught:
            read_header(claim(format, *size))
        assert caught.value.reason == reason


def test_damaged_bytes_raise_bad_image_error_only() -> None:
    random = np.random.default_rng(0)
    for number in range(150):
        content = bytearray(list(FILES.values())[number % 2])
        end = 400 if number % 4 < 2 else len(content)  # the boxes, or anything
        for _ in range(int(random.integers(1, 8))):
            content[int(random.integers(end))] = int(random.integers(256))
        with suppress(BadImageError):
            assert decode(bytes(content)).dtype == np.uint8


def test_boxes_without_end_are_left() -> None:
    deep = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"".join(
        struct.pack(">I4s", 12 * (3000 - number), b"meta") + bytes(4) for number in range(3000)
    )
    assert heif.read_size(deep) == (0, 0)
    assert heif.read_size(b"\0\0\0\x08free" * 100_000) == (0, 0)
    assert heif.find_format(b"\xff\xff\xff\xffftypisom" + bytes(300)) is None  # a film


def test_pillow_does_not_learn_heic() -> None:
    """Other code of the same process opens the same files as before."""
    decode(FILES["HEIF"])
    with pytest.raises(Image.UnidentifiedImageError):
        Image.open(io.BytesIO(FILES["HEIF"]))


@pytest.fixture
def without_heif(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "pillow_heif":
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)


@pytest.mark.usefixtures("without_heif")
def test_a_missing_package_is_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "IMG_0001.HEIC").write_bytes(FILES["HEIF"])
        photo().save(tmp_path / name / "1.jpg")
    result = scan(tmp_path)
    assert set(result.unreadable) == {"a/IMG_0001.HEIC", "b/IMG_0001.HEIC"}
    assert all("pip install 'vitral[photos]'" in reason for reason in result.unreadable.values())
    assert decode(FILES["AVIF"]).shape == (96, 128, 3)
    done = typed("predict", "vit-cifar10", str(tmp_path / "a"), "--format", "json")
    assert done.returncode == 3
    assert "pip install 'vitral[photos]'" in done.stdout


def test_predictors_read_bytes_and_files(tmp_path: Path) -> None:
    predictor = vitral.Predictor("vit-cifar10")
    path = tmp_path / "IMG_0001.HEIC"
    path.write_bytes(as_heic(photo(96, 128), exif=exif_of(6)))
    reference = pillow_heif.open_heif(path).to_pillow()
    expected = predictor(reference)
    for image in (path, path.read_bytes()):
        assert predictor(image).probability == pytest.approx(expected.probability, abs=1e-6)
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded(photo(96, 128), "AVIF", exif=exif_of(6)))))
    avif = predictor(encoded(photo(96, 128), "AVIF", exif=exif_of(6)))
    assert avif.probability == pytest.approx(predictor(turned).probability, abs=1e-6)
