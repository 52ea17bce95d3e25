"""A few headers speak for all pictures."""

from pathlib import Path

import numpy as np
import pytest

from tests.data.pictures import class_folders
from vitral.data.decode import Header
from vitral.data.items import natural_channels, sample_headers
from vitral.data.sources import open_data


def test_headers_come_from_everywhere_and_bad_pictures_are_passed_over(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 30, "b": 29}, size=(10, 12))
    class_folders(tmp_path, {"c": 40}, size=(30, 20))
    items = open_data(tmp_path).splits["train"]
    found = sample_headers(items, 50)
    assert len(found) == 50
    assert 0.35 < np.mean([header.height == 30 for header in found]) < 0.45  # 40 of 99, though they come last
    assert len(sample_headers(items, 1000)) == 99
    for item in items[:59]:
        (tmp_path / item.key).write_bytes(b"no picture")
    assert {(header.height, header.width) for header in sample_headers(items, 50)} == {(30, 20)}
    assert sample_headers((), 50) == []
    (digit,) = sample_headers(open_data("builtin:digits").splits["train"], 1)
    assert (digit.height, digit.width, digit.bands) == (28, 28, 1)


@pytest.mark.parametrize(
    ("bands", "channels"),
    [([], 3), ([1, 1], 1), ([1, 1, 3], 3), ([3, 3, 5], 3), ([5, 5, 3], 5), ([4], 4), ([1, 1, 5], 1), ([2, 2, 1], 2)],
)
def test_what_a_network_should_see(bands: list[int], channels: int) -> None:
    headers = [Header(format="NPY", height=8, width=8, mode="", bands=number) for number in bands]
    assert natural_channels(headers) == channels
