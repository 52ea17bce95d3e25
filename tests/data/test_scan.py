"""What ``vitral data`` finds, and whether training can go on."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.test_commands import vitral as run
from tests.data.pictures import class_folders, photo
from tests.data.test_sources import samples, write_shard
from vitral.data.contact_sheet import contact_sheet
from vitral.data.scan import Scan, scan
from vitral.data.sources import open_dataset


def look(folder: Path | str) -> Scan:
    found = list(scan(open_dataset(folder)))[-1]
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
        "Left out, as there is no picture in it: nothing",
        "one training picture: one",
        "capitals only",
    ):
        assert part in words, part
    assert "times the pictures" in words
    assert not found.can_train


def test_a_class_that_is_listed_and_has_no_picture(tmp_path: Path) -> None:
    write_shard(tmp_path / "x.tar", samples(6))
    (tmp_path / "classes.txt").write_text("cat\ndog\nunicorn\n")
    found = look(tmp_path / "x.tar")
    assert "Classes without a picture: unicorn." in found.warnings
    assert found.can_train


def test_names_of_all_kinds_are_shown_and_do_nothing(tmp_path: Path) -> None:
    """Escapes of a terminal, markup of the console's own, and bytes that are no UTF-8."""
    names = ["a\x1b[31mRED", "[bold]dog[red]", "caf\udce9"]
    class_folders(tmp_path, dict.fromkeys(names, 8))
    (tmp_path / names[0] / "\udcff\x1b.jpg").write_bytes(b"no")
    (tmp_path / names[0] / "x.\udcff").write_bytes(b"no")
    for shown in ("human", "json", "quiet"):
        done = run("data", str(tmp_path), "--format", shown)
        assert done.returncode == 2, done.stderr
        assert "1 of 25 pictures cannot be read" in done.stdout
        assert "\x1b" not in done.stdout
        assert "[bold]dog[red]" in done.stdout or shown == "quiet"
        assert "caf\\" in done.stdout or shown == "quiet"
    assert "a\N{REPLACEMENT CHARACTER}[31mRED" in run("data", str(tmp_path)).stdout


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
    data = open_dataset("builtin:digits")
    sheet = np.asarray(contact_sheet(data.splits["train"], data.classes))
    assert sheet.shape[0] > 10 * 96
    assert (sheet[:, 200:] < 60).any()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("x.txt", "must end in .png"), ("no/x.png", "cannot be written"), ("keep.png", "is there already")],
)
def test_sheets_that_cannot_be_written_are_told_first(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "keep.png").write_bytes(b"a picture of mine")
    done = run("data", str(tmp_path / "nowhere"), "--sheet", str(tmp_path / name))
    assert done.returncode == 2
    assert reason in done.stderr
    assert (tmp_path / "keep.png").read_bytes() == b"a picture of mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keep.png"]
