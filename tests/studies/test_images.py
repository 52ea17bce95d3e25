"""Subsets and canvases of a dataset, written as shards."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageChops

import vitral
from vitral.data.sources import open_dataset
from vitral.studies.images import dataset_for, on_canvas, open_with_test_split


def test_a_canvas_keeps_every_pixel_of_the_image() -> None:
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    canvas = on_canvas(image, 9, random.Random(0))
    assert canvas.size == (9, 9)
    box = ImageChops.difference(canvas, Image.new("RGB", (9, 9), (127,) * 3)).getbbox()
    assert box is not None
    assert (box[2] - box[0], box[3] - box[1]) == (4, 4)
    assert canvas.crop(box).tobytes() == image.tobytes()
    with pytest.raises(vitral.DataError, match="canvas=3.*4 x 4"):
        on_canvas(image, 3, random.Random(0))


def test_a_subset_has_equally_many_images_per_class(digits: Path, tmp_path: Path) -> None:
    folder = dataset_for(str(digits), tmp_path, images=50)
    subset = open_dataset(folder)
    assert Counter(item.label for item in subset.splits["train"]) == dict.fromkeys(range(10), 5)
    assert len(subset.splits["test"]) == 50
    assert dataset_for(str(digits), tmp_path, images=50) == folder
    assert [path.name for path in (tmp_path / "data").iterdir()] == [Path(folder).name]  # no temporary folder is left
    assert dataset_for(str(digits), tmp_path) == str(digits)
    with pytest.raises(vitral.DataError, match="images=9.*10 classes"):
        dataset_for(str(digits), tmp_path, images=9)


def test_images_without_a_file_are_written_too(tmp_path: Path) -> None:
    canvas = open_dataset(dataset_for("builtin:digits", tmp_path, images=10, canvas=30))
    assert len(canvas.splits["train"]) == 10


def test_a_study_needs_a_test_split(digits: Path) -> None:
    (digits / "test-000.tar").unlink()
    with pytest.raises(vitral.DataError, match="digits has no test split"):
        open_with_test_split(digits)
