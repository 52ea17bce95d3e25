"""--group-by: groups by a column or a pattern, their errors, and warnings about groups that are already divided."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

import vitral
from tests.data.images import class_folders, encoded, photo
from vitral.data.dataset import DatasetIndex
from vitral.data.grouping import group_images
from vitral.data.sources import open_dataset


@pytest.fixture
def bursts(tmp_path: Path) -> Path:
    """Two classes of four bursts with three photos each."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(12):
            photo(8, 8, seed=number).save(tmp_path / name / f"{name}{number // 3}_{number % 3}.png")
    return tmp_path


def write_table(folder: Path, columns: dict[str, list[str]], kind: str) -> DatasetIndex:
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "table.parquet")
    else:
        rows = [columns, *zip(*columns.values(), strict=True)]
        (folder / "table.csv").write_text("\n".join(",".join(row) for row in rows))
    return open_dataset(folder / f"table.{kind}")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [(r"([^/]+)_\d+\.png$", "cat0"), (r"[a-z]+\d", "cat0"), (r"^(?:cat|dog)/(.+)_", "cat0"), (r"\d(?=_)", "0")],
)
def test_patterns(bursts: Path, pattern: str, expected: str) -> None:
    data = group_images(open_dataset(bursts), pattern)
    assert {data.groups[f"cat/cat0_{number}.png"] for number in range(3)} == {expected}
    assert len(set(data.groups.values())) == (8 if expected == "cat0" else 4)
    assert not data.notes


def test_images_without_a_group_are_counted(bursts: Path) -> None:
    data = group_images(open_dataset(bursts), r"(dog\d)_")
    assert data.groups["cat/cat0_0.png"] == "cat/cat0_0.png"
    assert data.notes == ("12 of 24 images are in no group of --group-by, such as cat/cat0_0.png.",)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns(tmp_path: Path, kind: str) -> None:
    columns = {
        "image": [f"{number}.png" for number in range(6)],
        "label": ["a", "b"] * 3,
        "patient": ["p1", "p1", "p2", "p2", " p1 ", ""],
    }
    table = write_table(tmp_path, columns, kind)
    data = group_images(table, "patient")
    assert list(data.groups.values()) == ["p1", "p1", "p2", "p2", "p1", "5.png"]
    assert "1 of 6 images are in no group" in data.notes[0]
    assert len(set(group_images(table, r"^([0-2])").groups.values())) == 6  # a pattern works on tables, too
    with pytest.raises(vitral.DataError, match=r"no column 'pateint' \(it has image, label, patient\).*'patient'"):
        group_images(table, "pateint")


def test_columns_of_embedded_images(tmp_path: Path) -> None:
    images = [{"bytes": encoded(photo(8, 8, seed), "PNG")} for seed in range(4)]
    columns = {"image": images, "label": [0, 1, 0, 1], "burst": [7, 7, 8, None]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "table.parquet")
    data = group_images(open_dataset(tmp_path / "table.parquet"), "burst")
    assert list(data.groups.values()) == ["7", "7", "8", "table/000003"]


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        (r"([^/]+", "not a regular expression"),
        (r"(horse)\d", "matches none of the 24 images, such as cat/cat0_0.png"),
        (r"png$", r"all training images into one group \(png\)"),
        ("patient", "matches none of the 24 images"),
    ],
)
def test_errors(bursts: Path, pattern: str, problem: str) -> None:
    with pytest.raises(vitral.VitralError, match=problem) as caught:
        group_images(open_dataset(bursts), pattern)
    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_groups_that_cannot_be_held_out_or_are_divided_already(tmp_path: Path) -> None:
    for split in ("train", "test"):
        class_folders(tmp_path / "own", {"a": 12, "b": 12}, split=split)
    data = group_images(open_dataset(tmp_path / "own"), r"(\w/\d\d)")
    assert data.notes == (
        "4 groups have images in train and in test (a/00, a/01, b/00 and more); scores will be inflated.",
    )
    data = group_images(open_dataset(class_folders(tmp_path / "single", {"a": 12, "b": 5})), r"(\w/\d\d)")
    assert data.notes == ("Classes with one group, of which no image can be held out: b.",)
