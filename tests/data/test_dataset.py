"""Items, their sources, headers and names, and the fingerprints of a dataset."""

import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import vitral
from tests.data.images import class_folders, encoded, npy, photo, png_header, shard_members, write_shard
from vitral.data.dataset import (
    FileSource,
    TableSource,
    TarSource,
    check_classes,
    class_counts,
    natural_channels,
    natural_order,
    sample_headers,
)
from vitral.data.headers import BadImageError, Header
from vitral.data.sources import open_dataset
from vitral.files import as_text
from vitral.runs import Run


def test_headers_are_sampled_evenly_and_bad_images_skipped(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 30, "b": 29}, size=(10, 12))
    class_folders(tmp_path, {"c": 40}, size=(30, 20))
    items = open_dataset(tmp_path).splits["train"]
    headers = sample_headers(items, 50)
    assert len(headers) == 50
    assert 0.35 < np.mean([header.height == 30 for header in headers]) < 0.45  # 40 of 99, though they come last
    assert len(sample_headers(items, 1000)) == 99
    for item in items[:59]:
        (tmp_path / item.key).write_bytes(b"not an image")
    assert {(header.height, header.width) for header in sample_headers(items, 50)} == {(30, 20)}
    assert sample_headers((), 50) == []
    (digit,) = sample_headers(open_dataset("builtin:digits").splits["train"], 1)
    assert (digit.height, digit.width, digit.bands) == (28, 28, 1)


@pytest.mark.parametrize(
    ("bands", "channels"),
    [([], 3), ([1, 1], 1), ([1, 1, 3], 3), ([3, 3, 5], 3), ([5, 5, 3], 5), ([4], 4), ([1, 1, 5], 1), ([2, 2, 1], 2)],
)
def test_channels_of_a_model(bands: list[int], channels: int) -> None:
    headers = [Header(format="NPY", height=8, width=8, mode="", bands=number) for number in bands]
    assert natural_channels(headers) == channels


@pytest.mark.parametrize("kind", ["device", "link to a device", "pipe", "folder"])
def test_only_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    if kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(BadImageError, match="unreadable: not a regular file"):
        FileSource("/dev/zero" if kind == "device" else str(path)).read()


def test_links_to_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"content")
    (tmp_path / "link").symlink_to("x")
    (tmp_path / "broken").symlink_to("nowhere")
    assert FileSource(str(tmp_path / "link")).read() == b"content"
    with pytest.raises(BadImageError, match="missing"):
        FileSource(str(tmp_path / "broken")).read()


def test_the_order_of_names() -> None:
    """The order of equal numbers must not be that of a set, which changes."""
    orders = {tuple(sorted(order, key=natural_order)) for order in permutations(["1", "01", "001", "2", "10"])}
    assert orders == {("001", "01", "1", "2", "10")}
    names = ["2", "10", "9" * 5000, "a", "a1b2", "a1b10", "b"]
    assert sorted(["b", "a1b10", "a", *names[:3], "a1b2"], key=natural_order) == names


@pytest.mark.parametrize(("name", "text"), [("café", "café"), ("caf\udce9", "caf\\xe9"), ("\ud800", "\\ud800")])
def test_names_become_text(name: str, text: str) -> None:
    assert as_text(name) == text
    assert text.encode()


def test_one_line_per_skipped_image_whatever_its_name(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(2):
        run.add_skipped("caf\udce9\r\n.png", "corrupt: over\ntwo lines")
        run.add_skipped("x.png", "empty")
    assert run.skipped.read_bytes() == b"caf\\udce9\\r\\n.png\tcorrupt: over\\ntwo lines\nx.png\tempty\n"


def test_digits() -> None:
    data = open_dataset("builtin:digits")
    assert {split: len(items) for split, items in data.splits.items()} == {"train": 4000, "test": 1000}
    assert class_counts(data.splits["test"], 10) == [100] * 10
    content = data.splits["train"][0].source.read()
    assert isinstance(content, np.ndarray)
    assert content.shape == (28, 28, 1)
    with pytest.raises(vitral.DataError, match="builtin:digits"):
        open_dataset("builtin:letters")


def test_fingerprints(tmp_path: Path) -> None:
    first = open_dataset(class_folders(tmp_path, {"a": 2, "b": 2})).fingerprint()
    assert open_dataset(tmp_path).fingerprint() == first
    class_folders(tmp_path, {"a": 3})
    assert open_dataset(tmp_path).fingerprint() != first


def test_the_content_fingerprint_notices_changed_files(tmp_path: Path) -> None:
    data = open_dataset(class_folders(tmp_path / "folder", {"a": 2, "b": 2}))
    names, content = data.fingerprint(), data.content_fingerprint()
    assert open_dataset(tmp_path / "folder").content_fingerprint() == content
    changed = tmp_path / "folder" / "a" / "000.png"
    photo(seed=7).save(changed)
    assert open_dataset(tmp_path / "folder").fingerprint() == names
    assert open_dataset(tmp_path / "folder").content_fingerprint() != content
    changed.unlink()
    assert data.content_fingerprint() != content  # a missing file is not an error


def test_the_content_fingerprint_of_shards_and_digits(tmp_path: Path) -> None:
    write_shard(tmp_path / "x.tar", shard_members(4))
    first = open_dataset(tmp_path / "x.tar").content_fingerprint()
    os.utime(tmp_path / "x.tar", (1, 1))
    assert open_dataset(tmp_path / "x.tar").content_fingerprint() != first
    digits = open_dataset("builtin:digits")
    assert digits.content_fingerprint() == digits.content_fingerprint()


def test_the_name_fingerprint_keeps_its_value() -> None:
    """Runs that began before must still recognize their data."""
    expected = "6df8e8779c5cb44ebbc3013bb801c137b54b80d0700df54d7298d7da16df5fcf"
    assert open_dataset("builtin:digits").fingerprint() == expected


@pytest.mark.parametrize("content", [npy(np.zeros((15_000, 15_000), np.uint8)[:1]), png_header(30_000, 30_000)])
def test_large_files_are_refused_by_their_first_bytes(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitral.data.dataset._PEEK_ABOVE", 10)
    path = tmp_path / "x"
    path.write_bytes(content.replace(b"(1, 15000)", b"(15000, 15000)").ljust(200_000, b"\0"))
    with pytest.raises(BadImageError, match="too many pixels"):
        FileSource(str(path)).read()
    path.write_bytes(encoded(photo(), "PNG"))
    assert FileSource(str(path)).read() == encoded(photo(), "PNG")


@pytest.mark.parametrize(("classes", "is_usable"), [({"a": 2}, False), ({"a": 2, "b": 1}, True)])
def test_classification_needs_two_classes(classes: dict[str, int], is_usable: bool, tmp_path: Path) -> None:
    data = open_dataset(class_folders(tmp_path, classes))
    if is_usable:
        check_classes(data)
    else:
        with pytest.raises(vitral.DataError, match="1 class .*at least 2"):
            check_classes(data)


@pytest.mark.parametrize("form", ["shard", "table"])
def test_threads_read_the_images_that_they_ask_for(tmp_path: Path, form: str) -> None:
    random = np.random.default_rng(0)
    contents = [random.bytes(size) for size in random.integers(20_000, 60_000, 60).tolist()]
    if form == "shard":
        write_shard(tmp_path / "train.tar", [(f"{number:02}.bin", content) for number, content in enumerate(contents)])
        with tarfile.open(tmp_path / "train.tar") as shard:
            sources = [TarSource(str(tmp_path / "train.tar"), info.offset_data, info.size) for info in shard]
    else:
        table = pyarrow.table({"image": contents})
        pyarrow.parquet.write_table(table, tmp_path / "train.parquet", row_group_size=4)
        sources = [TableSource(str(tmp_path / "train.parquet"), "image", row) for row in range(len(contents))]
    order = random.integers(0, len(contents), 3000).tolist()
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda index: sources[index].read(), order))
    assert all(content == contents[index] for content, index in zip(read, order, strict=True))
