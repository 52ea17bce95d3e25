"""A few headers speak for all pictures."""

import os
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from tests.data.pictures import class_folders
from vitral.data.dataset import FileSource, natural_channels, natural_order, sample_headers
from vitral.data.decode import BadImageError, Header
from vitral.data.sources import open_dataset
from vitral.files import as_text
from vitral.runs import Run


def test_headers_come_from_everywhere_and_bad_pictures_are_passed_over(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 30, "b": 29}, size=(10, 12))
    class_folders(tmp_path, {"c": 40}, size=(30, 20))
    items = open_dataset(tmp_path).splits["train"]
    found = sample_headers(items, 50)
    assert len(found) == 50
    assert 0.35 < np.mean([header.height == 30 for header in found]) < 0.45  # 40 of 99, though they come last
    assert len(sample_headers(items, 1000)) == 99
    for item in items[:59]:
        (tmp_path / item.key).write_bytes(b"no picture")
    assert {(header.height, header.width) for header in sample_headers(items, 50)} == {(30, 20)}
    assert sample_headers((), 50) == []
    (digit,) = sample_headers(open_dataset("builtin:digits").splits["train"], 1)
    assert (digit.height, digit.width, digit.bands) == (28, 28, 1)


@pytest.mark.parametrize(
    ("bands", "channels"),
    [([], 3), ([1, 1], 1), ([1, 1, 3], 3), ([3, 3, 5], 3), ([5, 5, 3], 5), ([4], 4), ([1, 1, 5], 1), ([2, 2, 1], 2)],
)
def test_what_a_network_should_see(bands: list[int], channels: int) -> None:
    headers = [Header(format="NPY", height=8, width=8, mode="", bands=number) for number in bands]
    assert natural_channels(headers) == channels


@pytest.mark.parametrize("kind", ["device", "link to a device", "pipe", "folder"])
def test_what_is_no_regular_file_is_not_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    if kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(BadImageError, match="unreadable: no regular file"):
        FileSource("/dev/zero" if kind == "device" else str(path)).read()


def test_links_to_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"content")
    (tmp_path / "link").symlink_to("x")
    (tmp_path / "broken").symlink_to("nowhere")
    assert FileSource(str(tmp_path / "link")).read() == b"content"
    with pytest.raises(BadImageError, match="missing"):
        FileSource(str(tmp_path / "broken")).read()


def test_the_order_of_names() -> None:
    """Never that of a set, which is another one each time."""
    orders = {tuple(sorted(order, key=natural_order)) for order in permutations(["1", "01", "001", "2", "10"])}
    assert orders == {("001", "01", "1", "2", "10")}
    names = ["2", "10", "9" * 5000, "a", "a1b2", "a1b10", "b"]
    assert sorted(["b", "a1b10", "a", *names[:3], "a1b2"], key=natural_order) == names


@pytest.mark.parametrize(("name", "text"), [("café", "café"), ("caf\udce9", "caf\\xe9"), ("\ud800", "\\ud800")])
def test_names_become_text(name: str, text: str) -> None:
    assert as_text(name) == text
    assert text.encode()


def test_a_line_for_each_skipped_picture_whatever_its_name(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(2):
        run.add_skipped("caf\udce9\r\n.png", "corrupt: over\ntwo lines")
        run.add_skipped("x.png", "empty")
    assert run.skipped.read_bytes() == b"caf\\udce9\\r\\n.png\tcorrupt: over\\ntwo lines\nx.png\tempty\n"
