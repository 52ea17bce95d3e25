"""Near-duplicates in a run: kept in one split, or listed if the dataset brings its own splits."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import vitral
from vitral.data.sources import open_dataset
from vitral.runs import Run

SETTINGS: dict[str, Any] = {"from_": "vit-cifar10", "tune": "probe", "device": "cpu", "progress": False}
DIGITS = ("3", "7")


def write_digits(folder: Path, count: int, *, skip: int = 0) -> Path:
    """Write digits as class folders: every image is different, and a trained network sees that."""
    for label in DIGITS:
        (folder / label).mkdir(parents=True)
        items = [item for item in open_dataset("builtin:digits").splits["train"] if item.label == int(label)]
        for number, item in enumerate(items[skip : skip + count]):
            Image.fromarray(np.asarray(item.source.read()).squeeze()).save(folder / label / f"{number:03d}.png")
    return folder


def copy_with_another_pixel(source: Path, target: Path) -> None:
    with Image.open(source) as image:
        image.putpixel((3, 3), 40)
        image.save(target)


def pairs_of(run: Run) -> list[dict[str, str]]:
    with (run.folder / "near-duplicates.csv").open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_pairs_across_given_splits_are_listed(tmp_path: Path) -> None:
    train = write_digits(tmp_path / "data" / "train", 20)
    test = write_digits(tmp_path / "data" / "test", 10, skip=20)
    copy_with_another_pixel(train / "3" / "000.png", test / "3" / "copy.png")
    run = vitral.train(tmp_path / "data", out=tmp_path / "run", **SETTINGS)
    (pair,) = [row for row in pairs_of(run) if "3/copy.png" in row["file"] and row["other"].endswith("3/000.png")]
    assert {pair["split"], pair["other_split"]} == {"train", "test"}
    assert run.test.images == 21  # the given split stays as it is
    assert not run.read_report().get("random_split")


def test_there_is_no_table_without_a_search(tmp_path: Path) -> None:
    data = write_digits(tmp_path / "data", 20)
    run = vitral.train(data, out=tmp_path / "run", near_duplicates="ignore", **SETTINGS)
    assert (run.folder / "label-errors.csv").is_file()
    assert not (run.folder / "near-duplicates.csv").exists()


def test_pairs_stay_in_one_split(tmp_path: Path) -> None:
    data = write_digits(tmp_path / "data", 40)
    for number in range(0, 40, 4):
        copy_with_another_pixel(data / "3" / f"{number:03d}.png", data / "3" / f"{number:03d}-copy.png")
    run = vitral.train(data, out=tmp_path / "run", **SETTINGS)
    pairs = [row for row in pairs_of(run) if "-copy" in row["file"] + row["other"]]
    assert len(pairs) >= 10
    assert all(row["split"] == row["other_split"] for row in pairs)
