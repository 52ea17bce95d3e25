"""What ``vitral data`` finds, and whether training can go on."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitral
from tests.cli.test_commands import vitral as run
from tests.data.pictures import class_folders, photo
from vitral.data.scan import Scan, scan
from vitral.data.sheet import contact_sheet
from vitral.data.sources import open_data


def look(folder: Path | str) -> Scan:
    found = list(scan(open_data(folder)))[-1]
    assert isinstance(found, Scan)
    return found


def test_a_good_dataset() -> None:
    found = look("builtin:digits")
    assert found.can_train
    assert found.splits == {"train": 4000, "test": 1000}
    assert found.sizes["height_median"] == 28
    assert found.modes == {"grey": 5000}


def test_all_that_can_be_wrong(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 60, "b": 60, "A": 12, "one": 1}, split="train")
    class_folders(tmp_path, {"a": 4, "only held": 2}, split="test")
    (tmp_path / "train" / "nothing").mkdir()
    photo(40, 90).save(tmp_path / "train" / "b" / "wide.jpg")
    photo(90, 40).convert("L").save(tmp_path / "train" / "b" / "tall.png")
    (tmp_path / "train" / "a" / "broken.jpg").write_bytes(b"\xff\xd8\xff no")
    original = (tmp_path / "train" / "a" / "000.png").read_bytes()
    (tmp_path / "train" / "a" / "copy.png").write_bytes(original)
    (tmp_path / "train" / "b" / "other label.png").write_bytes(original)
    (tmp_path / "test" / "a" / "leaked.png").write_bytes(original)
    found = look(tmp_path)
    assert list(found.unreadable) == ["train/a/broken.jpg"]
    assert ("train/a/000.png", "test/a/leaked.png") in found.leaked
    assert len(found.contradictions) == 1
    assert found.duplicates[0][:2] == ["train/a/000.png", "train/a/copy.png"]
    assert found.aspects["wide"] == 1
    assert found.aspects["tall"] == 1
    assert found.modes["L"] == 1
    words = " ".join(found.warnings + found.problems)
    for part in (
        "never trained on: only held",
        "without a picture: nothing",
        "one training picture: one",
        "capitals only",
    ):
        assert part in words, part
    assert "times the pictures" in words
    assert not found.can_train


def test_too_many_bad_ones_stop(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 10, "b": 10})
    (tmp_path / "a" / "000.png").write_bytes(b"")
    assert "cannot be read" in look(tmp_path).problems[0]
    one = class_folders(tmp_path / "one", {"only": 5})
    assert "two" in look(one).problems[0]


def test_the_command(tmp_path: Path) -> None:
    class_folders(tmp_path / "data", {"cat": 10, "a dog with a very long name indeed": 8})
    sheet = tmp_path / "sheet.png"
    done = run("data", str(tmp_path / "data"), "--sheet", str(sheet))
    assert done.returncode == 0, done.stderr
    assert "Training can go on." in done.stdout
    with Image.open(sheet) as drawn:
        assert drawn.width > 700
    found = json.loads(run("data", str(tmp_path / "data"), "--format", "json").stdout)
    assert found["can_train"] is True
    assert found["splits"] == {"train": 18}
    (tmp_path / "data" / "cat" / "000.png").write_bytes(b"")
    bad = run("data", str(tmp_path / "data"), "--format", "quiet")
    assert bad.returncode == 2
    assert "cannot be read" in bad.stdout
    missing = run("data", str(tmp_path / "nowhere"))
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1


def test_the_sheet_shows_every_class() -> None:
    data = open_data("builtin:digits")
    sheet = np.asarray(contact_sheet(data.splits["train"], data.classes))
    assert sheet.shape[0] > 10 * 96
    assert (sheet[:, 200:] < 60).any()


def test_a_sheet_of_another_kind(tmp_path: Path) -> None:
    assert run("data", "builtin:digits", "--sheet", str(tmp_path / "x.txt")).returncode == 2
    with pytest.raises(vitral.DataError):
        open_data(tmp_path)
