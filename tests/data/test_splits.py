"""Splits by a hash of the names, and the choice between them and those of the dataset."""

from pathlib import Path

import numpy as np
import pytest

import vitral
from tests.data.images import class_folders
from vitral.data.dataset import FileSource, Item
from vitral.data.sources import open_dataset
from vitral.data.splits import choose_splits, find_equal, split_off


def test_the_split_is_stable_and_keeps_duplicates_together(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 40, "b": 40, "one": 1})
    copy = (tmp_path / "a" / "000.png").read_bytes()
    for number in range(10):
        (tmp_path / "a" / f"copy{number}.png").write_bytes(copy)
    items = open_dataset(tmp_path).splits["train"]
    _, part = split_off(items)
    assert 0.08 < len(part) / len(items) < 0.4
    chosen = {item.key for item in part}
    copies = {f"a/copy{i}.png" for i in range(10)} | {"a/000.png"}
    assert copies <= chosen or not copies & chosen
    assert "one/000.png" not in chosen
    class_folders(tmp_path, {"a": 60, "b": 40, "one": 1})
    _, later = split_off(open_dataset(tmp_path).splits["train"])
    moved = chosen ^ {item.key for item in later if item.key in {i.key for i in items}}
    assert not moved
    for label in (0, 1):
        assert {item.label for item in part} >= {label}


def test_images_of_several_labels_are_held_out_like_others() -> None:
    random = np.random.default_rng(0)
    labels = [tuple(np.flatnonzero(random.random(20) < 0.15).tolist()) or (0,) for _ in range(1000)]
    items = [Item(f"{number}.png", label, FileSource("nowhere")) for number, label in enumerate(labels)]
    rest, part = split_off(items)
    assert 150 < len(part) < 250
    of_each = [sum(len(item.label) for item in side) / len(side) for side in (rest, part)]  # type: ignore[arg-type]
    assert of_each[0] == pytest.approx(of_each[1], abs=0.35)


def test_large_files_are_equal_only_as_a_whole(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 4})
    for number, first in enumerate((b"1", b"1", b"2")):  # equal size and equal last bytes
        (tmp_path / "a" / f"large{number}.png").write_bytes(first + bytes(20_000))
    leaders = find_equal(open_dataset(tmp_path).splits["train"])
    assert leaders["a/large1.png"] == "a/large0.png"
    assert leaders["a/large2.png"] == "a/large2.png"


def test_a_dataset_without_splits_gets_three() -> None:
    data = open_dataset("builtin:digits")
    splits = choose_splits(data)
    assert splits.test == data.splits["test"]
    assert splits.reasons["test"] == "the dataset's test split"
    assert 0.08 < len(splits.validation) / 4000 < 0.12
    assert set(splits.train).isdisjoint(splits.validation)
    assert len(splits.train) + len(splits.validation) == 4000


def test_the_val_split_is_the_test_split_unless_there_is_one(tmp_path: Path) -> None:
    for split in ("train", "val"):
        class_folders(tmp_path, {"a": 10, "b": 10}, split=split)
    data = open_dataset(tmp_path)
    assert choose_splits(data).test == data.splits["val"]
    class_folders(tmp_path, {"a": 3, "b": 3}, split="test")
    data = open_dataset(tmp_path)
    splits = choose_splits(data)
    assert (splits.validation, splits.test) == (data.splits["val"], data.splits["test"])


def test_another_dataset_is_relabeled_by_class_name(tmp_path: Path) -> None:
    data = open_dataset(class_folders(tmp_path / "one", {"a": 6, "b": 6, "c": 6}))
    other = open_dataset(class_folders(tmp_path / "two", {"c": 2, "b": 1}))
    splits = choose_splits(data, other)
    assert [item.label for item in splits.test] == [1, 2, 2]
    assert "--val" in splits.reasons["test"]
    unknown = open_dataset(class_folders(tmp_path / "three", {"a": 2, "zebra": 2}))
    with pytest.raises(vitral.DataError, match="zebra"):
        choose_splits(data, unknown)


def test_too_few_images_are_used_twice(tmp_path: Path) -> None:
    splits = choose_splits(open_dataset(class_folders(tmp_path, {"a": 1, "b": 1})))
    assert len(splits.train) == len(splits.validation) == len(splits.test) == 2
    assert "too few" in splits.reasons["test"]
