"""Label maps and ReaL labels: read as intended, or refused."""

import json
from pathlib import Path

import pytest

import vitral
from tests.data.images import class_folders
from vitral import DataError
from vitral.evaluation.label_map import match_classes, read_label_map, read_real

LABELS = ("tabby", "hound")
CLASSES = ("cat", "dog")


def indices(path: Path, classes: tuple[str, ...] = CLASSES) -> list[int]:
    return match_classes(classes, LABELS, has_names=True, label_map=path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("map.json", '{"n01": "red", "n02": "green"}'),
        ("map.json", '{"n01": 2, "n02": 1}'),
        ("map.txt", "n01 2\nn02 1\n"),
        ("map.txt", "n01 red\nn02 green\n"),
        ("map.csv", "n01,red\nn02,green\n"),
        ("synsets.txt", "n00 Azure, Blue\nn02 Green one\nn01 Red one\n"),
    ],
)
def test_formats_of_label_maps(run: Path, tmp_path: Path, name: str, text: str) -> None:
    """The model's labels are blue, green, red."""
    assert vitral.load(run / "model.safetensors").labels == ("blue", "green", "red")
    data = class_folders(tmp_path / "data", {"n01": 5, "n02": 5}, size=(16, 16))
    (tmp_path / name).write_text(text)
    assert vitral.evaluate(run, data, label_map=tmp_path / name).scores.top1 == 1.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"n01": "red"}', "'n02'"),
        ('{"n01": "pink", "n02": "red"}', "'pink' is not one of the model's 3 labels"),
        ('{"n01": 7, "n02": 1}', "7 is not one of"),
        ('{"n01": "red", "n02": "green", "n03": "bleu"}', "'bleu'"),  # a typo, even where the class is not needed
        ("[[1]]", "no line for the class"),
        ('{"n01": []}', "JSON object"),
        ("{", "not valid JSON"),
    ],
)
def test_label_maps_that_do_not_fit(run: Path, tmp_path: Path, text: str, reason: str) -> None:
    data = class_folders(tmp_path / "data", {"n01": 2, "n02": 2}, size=(16, 16))
    (tmp_path / "map.json").write_text(text)
    with pytest.raises(DataError, match=reason):
        vitral.evaluate(run, data, label_map=tmp_path / "map.json")


def test_a_missing_file_and_spaces(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.json"):
        read_label_map(tmp_path / "nothing.json")
    (tmp_path / "spaces.csv").write_text("golden retriever, 207\n")
    assert read_label_map(tmp_path / "spaces.csv") == [("golden retriever", "207")]


def test_unknown_names_are_never_taken_for_an_order(tmp_path: Path) -> None:
    (tmp_path / "map.csv").write_text("dog,Hund\ncat,Katze\n")
    with pytest.raises(DataError, match=r"'Hund' is not one of the model's 2 labels \(tabby, hound\)"):
        indices(tmp_path / "map.csv")
    (tmp_path / "synsets.txt").write_text("n02 a cat\nn01 a dog\n")  # ImageNet's list is in the model's order
    assert indices(tmp_path / "synsets.txt", ("n01", "n02")) == [1, 0]


def test_names_with_commas(tmp_path: Path) -> None:
    (tmp_path / "map.csv").write_text('n01,"tench, Tinca tinca"\n"tabby, cat",281\n\nn02,tench, Tinca tinca\n')
    rows = [("n01", "tench, Tinca tinca"), ("tabby, cat", "281"), ("n02", "tench, Tinca tinca")]
    assert read_label_map(tmp_path / "map.csv") == rows
    (tmp_path / "map.tsv").write_text("one\ntwo, 2\n")
    assert read_label_map(tmp_path / "map.tsv") == [("one", 0), ("two, 2", 1)]
    (tmp_path / "long.csv").write_text("x" * 200_000)
    with pytest.raises(DataError, match=r"long\.csv.*field larger"):
        read_label_map(tmp_path / "long.csv")


@pytest.mark.parametrize(
    ("name", "text"), [("map.csv", "cat,tabby\ndog,hound\ncat,hound\n"), ("map.json", '["cat", "cat"]')]
)
def test_a_class_has_one_label(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match="class 'cat' to both 'tabby' and"):
        indices(tmp_path / name)
    (tmp_path / "twice.csv").write_text("cat,tabby\ndog,hound\ncat,tabby\n")
    assert indices(tmp_path / "twice.csv") == [0, 1]


def test_booleans_are_not_labels(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text('{"cat": true, "dog": false}')
    with pytest.raises(DataError, match="not a label map"):
        read_label_map(tmp_path / "map.json")


def test_the_byte_order_mark_of_excel(tmp_path: Path) -> None:
    (tmp_path / "map.csv").write_text("cat,tabby\ndog,hound\n", encoding="utf-8-sig")
    assert indices(tmp_path / "map.csv") == [0, 1]
    (tmp_path / "map.json").write_text('{"cat": 0, "dog": 1}', encoding="utf-8-sig")
    assert indices(tmp_path / "map.json") == [0, 1]


def test_real_labels_for_no_image(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text(json.dumps({"a.png": [], "b.png": []}))
    with pytest.raises(DataError, match="any of the 2 images"):
        read_real(tmp_path / "real.json", ["a.png", "b.png"], 2)
    (tmp_path / "real.json").write_text(json.dumps({"a.png": [], "b.png": [1]}))
    assert read_real(tmp_path / "real.json", ["a.png", "b.png"], 2) == [(), (1,)]


def test_a_name_of_two_labels_needs_a_label_map() -> None:
    """As ImageNet's crane, a bird and a machine."""
    with pytest.raises(DataError, match=r"2 of its labels are named 'crane'.*--label-map"):
        match_classes(("crane", "dog"), ("crane", "dog", "crane"), has_names=True)
