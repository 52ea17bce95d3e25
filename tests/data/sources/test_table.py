"""Tables, also with cells that are empty, wrong or damaged: none of these becomes a class or a training image."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

import vitral
from tests.data.images import class_folders, encoded, keys, photo
from vitral.data.dataset import DatasetIndex
from vitral.data.decode import BadImageError
from vitral.data.sources import open_dataset
from vitral.data.splits import split_off


def from_csv(folder: Path, text: str) -> DatasetIndex:
    (folder / "x.csv").write_text(text, encoding="utf-8")
    return open_dataset(folder / "x.csv")


def from_parquet(folder: Path, columns: dict[str, Any], **options: Any) -> DatasetIndex:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "x.parquet", **options)
    return open_dataset(folder / "x.parquet")


def test_split_names_may_have_spaces_and_capitals(tmp_path: Path) -> None:
    data = from_csv(tmp_path, "image,label,split\na.png,a,Test \nb.png,b, train\nc.png,b,VALID\n")
    assert {split: len(items) for split, items in data.splits.items()} == {"test": 1, "train": 1, "val": 1}


@pytest.mark.parametrize("cell", ["holdout", "", "0"])
def test_unknown_splits(cell: str, tmp_path: Path) -> None:
    with pytest.raises(
        vitral.DataError,
        match=rf"b.png in the table x has {f'the unknown split .{cell}.' if cell else 'no split'}.*validation",
    ):
        from_csv(tmp_path, f"image,label,split\na.png,a,train\nb.png,b,{cell}\n")
    columns = {"path": ["a.png", "b.png"], "label": ["a", "b"], "split": ["train", cell or None]}
    with pytest.raises(vitral.DataError, match="b.png in the table x has"):
        from_parquet(tmp_path, columns)


def test_empty_labels_are_not_a_class(tmp_path: Path) -> None:
    data = from_csv(tmp_path, "image,label\na.png,a\nx.png,\nb.png,b\ny.png\n,b\n,\n")
    assert data.classes == ("a", "b")
    assert data.skipped == {
        "x.png": "label '' is not a class",
        "y.png": "label '' is not a class",
        "line 6": "the row names no image",
    }
    assert "2 (x.png: label '' is not a class), 1 (line 6: the row names no image)" in data.notes[0]
    with pytest.raises(vitral.DataError, match="No row of the table x has an image and a label"):
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
    assert "is not a class" in data.skipped["missing.png"]


def test_a_path_that_is_null(tmp_path: Path) -> None:
    data = from_parquet(tmp_path, {"path": ["a.png", None, "b.png"], "label": ["a", "x", "b"]})
    assert data.classes == ("a", "b")
    assert data.skipped == {"x/000001": "the row names no image"}


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
    indices = [item.label for item in data.splits["train"]]
    assert [tuple(data.classes[k] for k in label) for label in indices if isinstance(label, tuple)] == labels
    assert bool(data.notes) == note


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("image,label\na.png,a\nb.png,%s\n" % ("x" * 200_000), "Line 3 of .*: field larger"),
        ('image,label\na.png,a\n"b.png,b\nc.png,c\n', "Line 3 of .*a quote that is not closed"),
        ('image,label\na.png,a\n"b.png,b\nc.png,c\nd.png",d\n', "several lines, from line 3"),
        ('image,label\na.png,a\nb.png,"b\nc.png,c"\n', "several lines, from line 3"),
        ('"image,label\na.png,a\n', "Line 1 of"),
        ("", "no column of images"),
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
    images = [encoded(photo(seed=number), "BMP") for number in range(4)]
    columns = {"image": images, "label": [f"class {number % 2}" for number in range(4)]}
    data = from_parquet(tmp_path, columns, compression="snappy", use_dictionary=False)
    content = (tmp_path / "x.parquet").read_bytes()
    start = content.index(images[0][60:90])
    (tmp_path / "x.parquet").write_bytes(content[: start - 60] + b"\xff" * 400 + content[start + 340 :])
    with pytest.raises(BadImageError, match="unreadable"):
        data.splits["train"][0].source.read()
    start = content.index(b"class 0")
    (tmp_path / "x.parquet").write_bytes(content[: start - 8] + b"\xff" * 40 + content[start + 32 :])
    with pytest.raises(vitral.DataError, match="is damaged"):
        open_dataset(tmp_path / "x.parquet")


def test_quotes_and_commas_in_labels(tmp_path: Path) -> None:
    class_folders(tmp_path / "p", {"a": 3})
    data = from_csv(tmp_path, 'image,label\n"p/a/000.png","cat, or dog"\np/a/001.png,5" disk\n')
    assert data.classes == ('5" disk', "cat, or dog")
    assert all(item.source.read() for item in data.splits["train"])


@pytest.mark.parametrize("label", [[["a"]], {"a": 1}])
def test_labels_of_other_types(label: Any, tmp_path: Path) -> None:
    with pytest.raises(vitral.DataError, match="is not a class"):
        from_parquet(tmp_path, {"path": ["a.png", "b.png"], "label": [label, label]})


def write_csv(path: Path, rows: list[dict[str, str]], delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv(delimiter: str, tmp_path: Path) -> None:
    class_folders(tmp_path / "images", {"a": 2})
    rows = [
        {"File": "images/a/000.png", "Label": "cat", "split": "train"},
        {"File": "images/a/001.png", "Label": "dog", "split": "test"},
    ]
    write_csv(tmp_path / "x.csv", rows, delimiter)
    data = open_dataset(tmp_path / "x.csv")
    assert data.classes == ("cat", "dog")
    assert keys(data) == ["images/a/000.png"]
    assert len(data.splits["test"]) == 1
    assert data.splits["train"][0].source.read()


def test_multi_label_csv(tmp_path: Path) -> None:
    write_csv(tmp_path / "x.csv", [{"image": "a.png", "labels": "cat|dog"}, {"image": "b.png", "labels": ""}])
    data = open_dataset(tmp_path / "x.csv")
    assert data.multi_label
    assert data.splits["train"][0].label == (0, 1)
    assert data.splits["train"][1].label == ()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"image": "a", "path": "b", "label": "c"}, "several columns of images"),
        ({"image": "a"}, "no column of labels"),
        ({"label": "a"}, "no column of images"),
    ],
)
def test_missing_and_ambiguous_columns(row: dict[str, str], reason: str, tmp_path: Path) -> None:
    write_csv(tmp_path / "x.csv", [row])
    with pytest.raises(vitral.DataError, match=reason):
        open_dataset(tmp_path / "x.csv")


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    images = [encoded(photo(seed=i), "PNG") for i in range(3)]
    table = pyarrow.table({"image": [{"bytes": content, "path": "x.png"} for content in images], "label": [1, 0, 1]})
    metadata = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(metadata)})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    data = open_dataset(tmp_path / "x.parquet")
    assert data.classes == ("cat", "dog")
    assert [item.label for item in data.splits["train"]] == [1, 0, 1]
    assert data.splits["train"][2].source.read() == images[2]
    two = table.append_column("second", pyarrow.array(images))
    pyarrow.parquet.write_table(two, tmp_path / "two.parquet")
    with pytest.raises(vitral.DataError, match="several columns of images"):
        open_dataset(tmp_path / "two.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(vitral.DataError, match="not a Parquet"):
        open_dataset(tmp_path / "bad.parquet")
