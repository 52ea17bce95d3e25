"""Label maps and ReaL's lists: read as they are meant, or refused."""

import json
from pathlib import Path

import pytest

from vitral import DataError
from vitral.data.dataset import FileSource, Item
from vitral.evaluation.label_map import read_label_map, read_real, renumber

LABELS = ("tabby", "hound")
CLASSES = ("cat", "dog")


def numbers(path: Path, classes: tuple[str, ...] = CLASSES) -> list[object]:
    items = [Item(f"{name}.png", number, FileSource("x.png")) for number, name in enumerate(classes)]
    return [item.label for item in renumber(items, classes, LABELS, has_names=True, label_map=path)]


def test_names_that_the_model_does_not_know_are_never_an_order(tmp_path: Path) -> None:
    (tmp_path / "map.csv").write_text("dog,Hund\ncat,Katze\n")
    with pytest.raises(DataError, match=r"'Hund' is none of the model's 2 labels \(tabby, hound\)"):
        numbers(tmp_path / "map.csv")
    (tmp_path / "synsets.txt").write_text("n02 a cat\nn01 a dog\n")  # ImageNet's list is in the model's order
    assert numbers(tmp_path / "synsets.txt", ("n01", "n02")) == [1, 0]


def test_names_with_commas(tmp_path: Path) -> None:
    (tmp_path / "map.csv").write_text('n01,"tench, Tinca tinca"\n"tabby, cat",281\n\nn02,tench, Tinca tinca\n')
    rows = [("n01", "tench, Tinca tinca"), ("tabby, cat", "281"), ("n02", "tench, Tinca tinca")]
    assert read_label_map(tmp_path / "map.csv") == rows
    (tmp_path / "map.tsv").write_text("one\ntwo, 2\n")
    assert read_label_map(tmp_path / "map.tsv") == [("one", 0), ("two, 2", 1)]
    (tmp_path / "long.csv").write_text("x" * 200_000)
    with pytest.raises(DataError, match=r"long\.csv is no table: field larger"):
        read_label_map(tmp_path / "long.csv")


@pytest.mark.parametrize(
    ("name", "text"), [("map.csv", "cat,tabby\ndog,hound\ncat,hound\n"), ("map.json", '["cat", "cat"]')]
)
def test_a_class_has_one_label(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match="the class 'cat' is 'tabby' in one line"):
        numbers(tmp_path / name)
    (tmp_path / "twice.csv").write_text("cat,tabby\ndog,hound\ncat,tabby\n")
    assert numbers(tmp_path / "twice.csv") == [0, 1]


def test_true_is_no_label(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text('{"cat": true, "dog": false}')
    with pytest.raises(DataError, match="from class to label"):
        read_label_map(tmp_path / "map.json")


def test_the_mark_that_excel_begins_with(tmp_path: Path) -> None:
    (tmp_path / "map.csv").write_text("cat,tabby\ndog,hound\n", encoding="utf-8-sig")
    assert numbers(tmp_path / "map.csv") == [0, 1]
    (tmp_path / "map.json").write_text('{"cat": 0, "dog": 1}', encoding="utf-8-sig")
    assert numbers(tmp_path / "map.json") == [0, 1]


def test_no_true_label_for_any_picture(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text(json.dumps({"a.png": [], "b.png": []}))
    with pytest.raises(DataError, match="no label for any of the 2 pictures"):
        read_real(tmp_path / "real.json", ["a.png", "b.png"], 2)
    (tmp_path / "real.json").write_text(json.dumps({"a.png": [], "b.png": [1]}))
    assert read_real(tmp_path / "real.json", ["a.png", "b.png"], 2) == [(), (1,)]


def test_a_name_that_two_labels_share_is_told() -> None:
    """As ImageNet's crane, a bird and a machine."""
    items = [Item("crane.png", 0, FileSource("x.png"))]
    with pytest.raises(DataError, match=r"2 of the model's labels are called 'crane'\. Give --label-map"):
        renumber(items, ("crane", "dog"), ("crane", "dog", "crane"), has_names=True)
