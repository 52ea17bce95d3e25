"""Folders of images as people have them: odd names, links, splits, and folders that cannot be read."""

import os
from pathlib import Path

import pytest

import vitral
from tests.data.images import class_folders, keys, photo
from vitral.data.dataset import class_counts
from vitral.data.sources import open_dataset
from vitral.data.splits import split_off


def test_class_folders_with_odd_contents(tmp_path: Path) -> None:
    class_folders(tmp_path, {"class2": 2, "class10": 3, "Größe ü": 1})
    (tmp_path / "class2" / ".hidden.png").write_bytes(b"x")
    (tmp_path / "class2" / "notes.txt").write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / "class10" / "deep" / "deeper").mkdir(parents=True)
    photo().save(tmp_path / "class10" / "deep" / "deeper" / "x.JPG")
    (tmp_path / "class10" / "deep" / "loop").symlink_to(tmp_path / "class10")
    (tmp_path / "empty").mkdir()
    data = open_dataset(tmp_path)
    assert set(data.classes) == {"Größe ü", "class2", "class10"}
    assert data.classes.index("class2") < data.classes.index("class10")
    assert sum(class_counts(data.splits["train"], 3)) == 7
    assert data.notes == (
        "Skipped a class folder without images: empty.",
        "Skipped files that are not images: 1 file (.txt).",
    )


def test_links_do_not_mix_classes(tmp_path: Path) -> None:
    data, pool = tmp_path / "data", class_folders(tmp_path / "pool", {"more": 2, "lions": 4}, size=(20, 20))
    class_folders(data, {"cat": 3, "dog": 5})
    (data / "cat" / "up").symlink_to("..")
    (data / "cat" / "deep").mkdir()
    (data / "cat" / "deep" / "beside").symlink_to(data / "dog")
    (data / "cat" / "far").symlink_to(tmp_path)
    (data / "cat" / "more").symlink_to(pool / "more")  # outside the dataset, so it belongs to this class
    (data / "lion").symlink_to(pool / "lions")
    (data / "kitten").symlink_to("cat")
    index = open_dataset(data)
    counts = dict(zip(index.classes, class_counts(index.splits["train"], 3), strict=True))
    assert counts == {"cat": 5, "dog": 5, "lion": 4}
    links = ["cat/deep/beside", "cat/far", "cat/up", "kitten"]
    assert sorted(index.notes) == [f"Skipped a link to other classes: {link}." for link in links]


def test_a_split_may_be_a_link_to_another(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 3, "b": 2}, split="train")
    (tmp_path / "val").symlink_to("train")
    (tmp_path / "test").mkdir()
    for name in "ab":
        (tmp_path / "test" / name).symlink_to(tmp_path / "train" / name)
    data = open_dataset(tmp_path)
    assert {split: len(items) for split, items in data.splits.items()} == {"train": 5, "val": 5, "test": 5}
    assert not data.notes


def test_names_that_are_not_utf8_and_equal_names(tmp_path: Path) -> None:
    class_folders(tmp_path, {"caf\udce9": 12, "gr\u00fcn": 2, "gru\u0308n": 3})
    (tmp_path / "caf\udce9" / "000.png").rename(tmp_path / "caf\udce9" / "\udcff.png")
    data = open_dataset(tmp_path)
    assert data.classes == ("caf\\xe9", "gr\u00fcn")
    assert class_counts(data.splits["train"], 2) == [12, 5]
    assert "caf\\xe9/\\xff.png" in keys(data)
    assert all(item.source.read() for item in data.splits["train"])
    assert sum(map(len, split_off(data.splits["train"]))) == 17
    assert len(data.fingerprint()) == 64


def test_split_folders(tmp_path: Path) -> None:
    for split, number in (("train", 3), ("Validation", 2), ("test", 1)):
        class_folders(tmp_path, {"a": number, "b": number}, split=split)
    data = open_dataset(tmp_path)
    assert {split: len(items) for split, items in data.splits.items()} == {"train": 6, "val": 4, "test": 2}
    assert keys(data)[0] == "train/a/000.png"


def test_a_class_called_test_is_a_class(tmp_path: Path) -> None:
    data = open_dataset(class_folders(tmp_path, {"test": 2, "cat": 2}))
    assert data.classes == ("cat", "test")


def test_a_class_called_train_is_a_class(tmp_path: Path) -> None:
    data = open_dataset(class_folders(tmp_path, {"bus": 2, "car": 2, "train": 3}))
    assert data.classes == ("bus", "car", "train")
    assert len(open_dataset(tmp_path, labeled=False).splits["train"]) == 7
    class_folders(tmp_path / "train", {"a": 2, "b": 2})  # with folders inside, it is a split
    assert open_dataset(tmp_path).classes == ("a", "b")


def test_splits_without_labels_stay_apart(tmp_path: Path) -> None:
    for name, number in (("train", 3), ("test", 2), ("masks", 4)):
        (tmp_path / name).mkdir()
        for index in range(number):
            photo(seed=index).save(tmp_path / name / f"{index}.png")
    data = open_dataset(tmp_path, labeled=False)
    assert {split: len(items) for split, items in data.splits.items()} == {"train": 3, "test": 2}


def test_images_outside_of_class_folders_are_noted(tmp_path: Path) -> None:
    class_folders(tmp_path, {"cat": 2, "dog": 2}, split="train")
    (tmp_path / "test").mkdir()
    for number in range(3):  # without labels, as in competitions
        photo().save(tmp_path / "test" / f"{number}.png")
    assert open_dataset(tmp_path).notes == ("Skipped 3 images of test in no class folder.",)
    photo().save(tmp_path / "train" / "x.png")
    assert "Skipped 1 image of train in no class folder." in open_dataset(tmp_path).notes


@pytest.mark.parametrize("name", ["nothing", "empty", "loose"])
def test_folders_without_a_dataset(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    if name != "nothing":
        folder.mkdir()
    if name == "loose":
        photo().save(folder / "x.png")
    with pytest.raises(
        vitral.DataError, match={"nothing": "not found", "empty": "no images", "loose": "no class folders"}[name]
    ):
        open_dataset(folder)


def unlisted(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make a folder unlistable. (File permissions do not stop root.)"""
    scandir = os.scandir

    def refuse(path: str | Path = ".") -> "os._ScandirIterator[str]":
        if os.path.realpath(path) == os.path.realpath(folder):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)  # pyright: ignore[reportReturnType]

    monkeypatch.setattr(os, "scandir", refuse)


@pytest.mark.parametrize("name", ["", "dog", "dog/more"])
@pytest.mark.parametrize("labeled", [True, False])
def test_a_folder_that_cannot_be_listed_is_an_error(
    name: str, labeled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class_folders(tmp_path, {"cat": 3, "dog": 3, "dog/more": 3})
    unlisted(monkeypatch, tmp_path / name)
    with pytest.raises(vitral.DataError, match="Permission denied") as caught:
        open_dataset(tmp_path, labeled=labeled)
    assert str(tmp_path / name) in str(caught.value)


def test_circular_and_broken_links_are_skipped_and_listed(tmp_path: Path) -> None:
    class_folders(tmp_path, {"cat": 3, "dog": 3})
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "cat" / "again").symlink_to("again")
    (tmp_path / "cat" / "self.png").symlink_to("self.png")
    data = open_dataset(tmp_path)
    assert data.classes == ("cat", "dog")
    assert data.skipped.keys() == {"gone", "loop", "loop.png"}
    assert sum("leads nowhere" in note for note in data.notes) == 3
    assert len(data.splits["train"]) == 7  # cat/self.png is listed as unreadable when it is read
    result = vitral.scan(tmp_path)
    assert list(result.unreadable) == ["cat/self.png"]
    assert sum("leads nowhere" in warning for warning in result.warnings) == 3
