"""Splits by a hash of the names, and the choice between them and those of the dataset."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import connected_components

import vitral
from tests.data.images import class_folders
from vitral.data.dataset import FileSource, Item
from vitral.data.sources import open_dataset
from vitral.data.splits import Splits, choose_splits, find_equal, merge_groups, split_off


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


def digest(splits: Splits) -> str:
    names = "|".join(",".join(item.key for item in part) for part in (splits.train, splits.validation, splits.test))
    return hashlib.sha256(names.encode()).hexdigest()[:16]


def test_classes_with_a_single_training_image_are_reported(tmp_path: Path) -> None:
    data = open_dataset(class_folders(tmp_path, {"cats": 8, "dogs": 9, "owl": 1}))
    assert choose_splits(data).notes == ("Classes with a single training image: 1 (owl). Add more images.",)
    assert not choose_splits(open_dataset(class_folders(tmp_path / "more", {"cats": 8, "dogs": 9}))).notes


def test_splits_are_those_of_earlier_versions(tmp_path: Path) -> None:
    """A run of an earlier version is evaluated on the test images that it held out."""
    assert digest(choose_splits(open_dataset("builtin:digits"))) == "82b67b58a592d700"
    class_folders(tmp_path, {"a": 40, "b": 7, "c": 2, "one": 1})
    for number in range(6):
        (tmp_path / "b" / f"copy{number}.png").write_bytes((tmp_path / "a" / "003.png").read_bytes())
    data = open_dataset(tmp_path)
    assert digest(choose_splits(data)) == "92e0f9bfd17823b6"
    assert digest(choose_splits(data, val_fraction=0.3)) == "24bb15f1f7042585"
    single = choose_splits(data, groups={item.key: item.key for item in data.splits["train"]})
    assert digest(single) == "92e0f9bfd17823b6"  # every image is a group of its own


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(["1", "2", "3", "a"]), max_size=8), max_size=3
    )
)
def test_merged_groups_are_connected_components(mappings: list[dict[str, str]]) -> None:
    """scipy finds the same components in the graph of images and groups."""
    merged = merge_groups(*mappings)
    keys = sorted({key for mapping in mappings for key in mapping})
    assert sorted(merged) == keys
    nodes = {node: index for index, node in enumerate([(9, key) for key in keys])}
    edges = [((9, key), (number, name)) for number, mapping in enumerate(mappings) for key, name in mapping.items()]
    for _, name in edges:
        nodes.setdefault(name, len(nodes))
    graph = np.zeros((len(nodes), len(nodes)))
    for key, name in edges:
        graph[nodes[key], nodes[name]] = 1
    labels = connected_components(graph, directed=False)[1] if nodes else []
    for first in keys:
        for second in keys:
            together = labels[nodes[9, first]] == labels[nodes[9, second]]
            assert (merged[first] == merged[second]) == together
    for key in keys:  # named as in the first mapping that names it
        members = [other for other in keys if labels[nodes[9, other]] == labels[nodes[9, key]]]
        first = next(mapping for mapping in mappings if any(other in mapping for other in members))
        assert merged[key].rstrip("'") == min(first[other] for other in members if other in first)


def test_groups_are_not_divided(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 60, "b": 60})
    equal = (tmp_path / "a" / "000.png").read_bytes()
    (tmp_path / "b" / "059.png").write_bytes(equal)  # unites two groups
    data = open_dataset(tmp_path)
    groups = {item.key: item.key[:-5] for item in data.splits["train"]}  # a/00, a/01, ...: ten images each
    splits = choose_splits(data, groups=groups)
    sides = [{splits.groups[item.key] for item in part} for part in (splits.train, splits.validation, splits.test)]
    assert all(sides)
    assert sum(map(len, sides)) == len(set().union(*sides))
    assert splits.groups["a/000.png"] == splits.groups["b/059.png"] == splits.groups["b/050.png"]
    assert set(splits.groups) == set(groups)
    assert {item.label for item in splits.test} == {0, 1}
    assert "groups are not divided" in splits.reasons["test"]
    class_folders(tmp_path, {"a": 65, "b": 60})  # a new image does not move its group
    more = open_dataset(tmp_path)
    later = choose_splits(more, groups={item.key: item.key[:-5] for item in more.splits["train"]})
    assert {item.key for item in splits.test} <= {item.key for item in later.test}


def test_dropped_images_leave_training_but_not_the_test_split(tmp_path: Path) -> None:
    data = open_dataset(class_folders(tmp_path, {"a": 30, "b": 30}))
    before = choose_splits(data)
    dropped = frozenset(item.key for item in (*before.train[:3], *before.validation[:1], *before.test[:2]))
    after = choose_splits(replace(data, dropped=dropped))
    assert after.test == before.test
    assert not dropped & {item.key for item in (*after.train, *after.validation)}
    assert len(after.train) + len(after.validation) == len(before.train) + len(before.validation) - 4
    assert after.notes == (
        "Images dropped from the train and validation splits: 4.",
        "Images listed to drop that stay in the test split: 2.",
    )
    with pytest.raises(vitral.DataError, match="1 class with training images"):
        choose_splits(replace(data, dropped=frozenset(item.key for item in data.splits["train"] if item.label)))
