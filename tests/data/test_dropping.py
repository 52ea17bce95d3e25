"""--drop: the images that a CSV file lists."""

from pathlib import Path

import pytest

import vitral
from tests.data.images import class_folders
from vitral.data.dropping import drop_images, without_dropped
from vitral.data.sources import open_dataset


@pytest.mark.parametrize(
    "content",
    [
        "file,label\na/000.png,b\n./b/001.png,a\n",
        "label;file\nx;a/000.png\nx;b/001.png\n\n",
        "\ufeffimage\na/000.png\nb/001.png\nb/001.png\n",
    ],
)
def test_the_column_file_or_the_first(tmp_path: Path, content: str) -> None:
    data = open_dataset(class_folders(tmp_path / "data", {"a": 3, "b": 3}))
    (tmp_path / "suspects.csv").write_text(content, encoding="utf-8")
    dropped = drop_images(data, tmp_path / "suspects.csv")
    assert dropped.dropped == {"a/000.png", "b/001.png"}
    assert not dropped.notes
    assert dropped.fingerprint() != data.fingerprint()
    assert len(without_dropped(dropped).splits["train"]) == 4


def test_unknown_names(tmp_path: Path) -> None:
    data = open_dataset(class_folders(tmp_path / "data", {"a": 3, "b": 3}))
    listed = tmp_path / "suspects.csv"
    listed.write_text("file\na/000.png\na/horse.png\nb/horse.png\n")
    assert drop_images(data, listed).notes == (f"Images in {listed} that are not in data: 2, such as a/horse.png.",)
    listed.write_text("file\nhorse.png\n")
    with pytest.raises(vitral.DataError, match="None of the 1 images .* expected names such as a/000.png"):
        drop_images(data, listed)
    for content in ("", "horse\n", "label,file\nx\n"):
        listed.write_text(content)
        with pytest.raises(vitral.DataError, match="lists no images"):
            drop_images(data, listed)
    with pytest.raises(vitral.DataError, match="not found"):
        drop_images(data, tmp_path / "nowhere.csv")


def test_a_run_without_suspects_drops_nothing(tmp_path: Path) -> None:
    data = open_dataset(class_folders(tmp_path / "data", {"a": 3, "b": 3}))
    listed = tmp_path / "label-errors.csv"
    listed.write_text("file,label,suggested\n")
    unchanged = drop_images(data, listed)
    assert unchanged.fingerprint() == data.fingerprint()
    assert unchanged.notes == (f"{listed} lists no images, so none is dropped.",)


def test_test_images_stay(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        class_folders(tmp_path, {"a": 3, "b": 3}, split=split)
    (tmp_path / "suspects.csv").write_text("file\ntrain/a/000.png\nval/a/000.png\ntest/a/000.png\n")
    result = vitral.scan(tmp_path, drop=tmp_path / "suspects.csv")
    assert result.splits == {"train": 5, "val": 5, "test": 6}
    assert result.dropped == 2
