"""Tables with cells that are empty, wrong or damaged: each is told, and none becomes a class or a training picture."""

import math
from pathlib import Path
from typing import Any

import pytest

import vitral
from tests.data.pictures import class_folders, encoded, photo
from tests.data.test_sources import keys
from vitral.data.dataset import DatasetIndex
from vitral.data.decode import BadImageError
from vitral.data.sources import open_dataset, split_off


def from_csv(folder: Path, text: str) -> DatasetIndex:
    (folder / "x.csv").write_text(text, encoding="utf-8")
    return open_dataset(folder / "x.csv")


def from_parquet(folder: Path, columns: dict[str, Any], **options: Any) -> DatasetIndex:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "x.parquet", **options)
    return open_dataset(folder / "x.parquet")


def test_splits_are_known_words_with_spaces_around_them(tmp_path: Path) -> None:
    data = from_csv(tmp_path, "image,label,split\na.png,a,Test \nb.png,b, train\nc.png,b,VALID\n")
    assert {split: len(items) for split, items in data.splits.items()} == {"test": 1, "train": 1, "val": 1}


@pytest.mark.parametrize("cell", ["holdout", "", "0"])
def test_splits_that_nobody_knows(cell: str, tmp_path: Path) -> None:
    with pytest.raises(vitral.DataError, match=rf"b.png has {f'split .{cell}.' if cell else 'no split'}.*validation"):
        from_csv(tmp_path, f"image,label,split\na.png,a,train\nb.png,b,{cell}\n")
    columns = {"path": ["a.png", "b.png"], "label": ["a", "b"], "split": ["train", cell or None]}
    with pytest.raises(vitral.DataError, match="b.png has"):
        from_parquet(tmp_path, columns)


def test_empty_labels_are_no_class(tmp_path: Path) -> None:
    data = from_csv(tmp_path, "image,label\na.png,a\nx.png,\nb.png,b\ny.png\n,b\n,\n")
    assert data.classes == ("a", "b")
    assert data.skipped == {
        "x.png": "label '' is no class",
        "y.png": "label '' is no class",
        "line 6": "no picture is named",
    }
    assert "2 (x.png: label '' is no class), 1 (line 6: no picture is named)" in data.notes[0]
    with pytest.raises(vitral.DataError, match="No row of the table x has a picture and a label"):
        from_csv(tmp_path, "image,label\nx.png,\n")


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["a", None, "b"], ("a", "b")),
        (["a", "  ", "b"], ("a", "b")),
        ([0.5, math.nan, 1.5], ("0.5", "1.5")),
        ([["a"], ["x", None], ["b", "a"]], ("a", "b")),
        ([["a"], None, ["b", "a"]], ("a", "b")),
    ],
)
def test_missing_labels_of_parquet(labels: list[Any], classes: tuple[str, ...], tmp_path: Path) -> None:
    data = from_parquet(tmp_path, {"path": ["a.png", "missing.png", "b.png"], "label": labels})
    assert data.classes == classes
    assert keys(data) == ["a.png", "b.png"]
    assert "is no class" in data.skipped["missing.png"]


def test_a_path_that_is_null(tmp_path: Path) -> None:
    data = from_parquet(tmp_path, {"path": ["a.png", None, "b.png"], "label": ["a", "x", "b"]})
    assert data.classes == ("a", "b")
    assert data.skipped == {"x/000001": "no picture is named"}


@pytest.mark.parametrize(
    ("cells", "labels", "note"),
    [
        (["polar bear|cat", "polar bear", ""], [("cat", "polar bear"), ("polar bear",), ()], False),
        (["cat;polar bear", "dog"], [("cat", "polar bear"), ("dog",)], True),
        (["cat dog", "dog"], [("cat", "dog"), ("dog",)], True),
        (["cat", "dog"], [("cat",), ("dog",)], False),
    ],
)
def test_several_labels_in_a_cell(cells: list[str], labels: list[tuple[str, ...]], note: bool, tmp_path: Path) -> None:
    data = from_csv(tmp_path, "image,labels\n" + "".join(f"{row}.png,{cell}\n" for row, cell in enumerate(cells)))
    found = [item.label for item in data.splits["train"]]
    assert [tuple(data.classes[k] for k in label) for label in found if isinstance(label, tuple)] == labels
    assert bool(data.notes) == note


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("image,label\na.png,a\nb.png,%s\n" % ("x" * 200_000), "cannot be read from line 3 on: field larger"),
        ('image,label\na.png,a\n"b.png,b\nc.png,c\n', "cannot be read from line 3 on.*a quote that is not closed"),
        ('image,label\na.png,a\n"b.png,b\nc.png,c\nd.png",d\n', "over several lines, from line 3 on"),
        ('image,label\na.png,a\nb.png,"b\nc.png,c"\n', "over several lines, from line 3 on"),
        ('"image,label\na.png,a\n', "cannot be read from line 1 on"),
        ("", "no column of pictures"),
    ],
)
def test_csv_that_cannot_be_read(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(vitral.DataError, match=reason):
        from_csv(tmp_path, text)


def test_odd_cells(tmp_path: Path) -> None:
    """A label of very many digits, a zero byte in a name, and a line separator of Unicode in another."""
    data = from_csv(tmp_path, f"image,label\na.png,{'7' * 5000}\nb\0.png,12\nc\u2028.png,12\n")
    assert data.classes == ("12", "7" * 5000)
    items = data.splits["train"]
    assert keys(data) == ["a.png", "b\0.png", "c\u2028.png"]
    assert sum(map(len, split_off(items))) == 3
    with pytest.raises(BadImageError, match="unreadable"):
        items[1].source.read()


def test_damaged_pages(tmp_path: Path) -> None:
    pictures = [encoded(photo(seed=number), "BMP") for number in range(4)]
    columns = {"image": pictures, "label": [f"class {number % 2}" for number in range(4)]}
    data = from_parquet(tmp_path, columns, compression="snappy", use_dictionary=False)
    content = (tmp_path / "x.parquet").read_bytes()
    place = content.index(pictures[0][60:90])
    (tmp_path / "x.parquet").write_bytes(content[: place - 60] + b"\xff" * 400 + content[place + 340 :])
    with pytest.raises(BadImageError, match="unreadable"):
        data.splits["train"][0].source.read()
    place = content.index(b"class 0")
    (tmp_path / "x.parquet").write_bytes(content[: place - 8] + b"\xff" * 40 + content[place + 32 :])
    with pytest.raises(vitral.DataError, match="is damaged"):
        open_dataset(tmp_path / "x.parquet")


def test_tables_of_real_pictures_still_work(tmp_path: Path) -> None:
    class_folders(tmp_path / "p", {"a": 3})
    data = from_csv(tmp_path, 'image,label\n"p/a/000.png","cat, or dog"\np/a/001.png,5" disk\n')
    assert data.classes == ('5" disk', "cat, or dog")
    assert all(item.source.read() for item in data.splits["train"])


@pytest.mark.parametrize("label", [[["a"]], {"a": 1}])
def test_labels_that_are_no_words(label: Any, tmp_path: Path) -> None:
    with pytest.raises(vitral.DataError, match="is no class"):
        from_parquet(tmp_path, {"path": ["a.png", "b.png"], "label": [label, label]})
