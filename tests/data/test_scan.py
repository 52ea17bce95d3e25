"""`vitral data` and `vitral.scan`: findings, and whether training would fail."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.test_commands import vitral as run
from tests.data.images import class_folders, photo, shard_members, write_shard
from vitral.data.contact_sheet import contact_sheet
from vitral.data.scan import Progress, Scan, scan, scan_events
from vitral.data.sources import open_dataset
from vitral.data.splits import choose_splits
from vitral.errors import DataError
from vitral.training.entry import train_events
from vitral.training.events import Finished


def test_a_good_dataset() -> None:
    result = scan("builtin:digits")
    assert result.can_train
    assert result.splits == {"train": 4000, "test": 1000}
    assert result.sizes["height_median"] == 28
    assert result.modes == {"gray": 5000}


def test_all_findings(tmp_path: Path) -> None:
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
    result = scan(tmp_path)
    assert list(result.unreadable) == ["train/a/broken.jpg"]
    assert ("train/a/000.png", "test/a/leaked.png") in result.leaked
    assert len(result.contradictions) == 1
    assert result.duplicates[0][:2] == ["train/a/000.png", "train/a/copy.png"]
    assert result.aspects["wide"] == 1
    assert result.aspects["tall"] == 1
    assert result.modes["L"] == 1
    words = " ".join(result.warnings + result.problems)
    for fragment in (
        "without training images: only held",
        "without images: nothing",
        "one training image: one",
        "only in upper and lower case",
    ):
        assert fragment in words, fragment
    assert "times as many images" in words
    assert not result.can_train


def test_a_listed_class_without_images(tmp_path: Path) -> None:
    write_shard(tmp_path / "x.tar", shard_members(6))
    (tmp_path / "classes.txt").write_text("cat\ndog\nunicorn\n")
    result = scan(tmp_path / "x.tar")
    assert "Classes without images: unicorn." in result.warnings
    assert result.can_train


def test_hostile_names_are_printed_harmlessly(tmp_path: Path) -> None:
    """Terminal escapes, console markup, and bytes that are not UTF-8."""
    names = ["a\x1b[31mRED", "[bold]dog[red]", "caf\udce9"]
    class_folders(tmp_path, dict.fromkeys(names, 8))
    (tmp_path / names[0] / "\udcff\x1b.jpg").write_bytes(b"no")
    (tmp_path / names[0] / "\udcfe.jpg").write_bytes(b"no")
    (tmp_path / names[0] / "x.\udcff").write_bytes(b"no")
    for shown in ("human", "json", "quiet"):
        done = run("data", str(tmp_path), "--format", shown)
        assert done.returncode == 2, done.stderr
        assert "training images are unreadable (expected at most 1)" in done.stdout
        assert "\x1b" not in done.stdout
        assert "[bold]dog[red]" in done.stdout or shown == "quiet"
        assert "caf\\" in done.stdout or shown == "quiet"
    assert "a\N{REPLACEMENT CHARACTER}[31mRED" in run("data", str(tmp_path)).stdout


def test_too_many_unreadable_images_are_a_problem(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 10, "b": 10})
    (tmp_path / "a" / "000.png").write_bytes(b"")
    assert scan(tmp_path).can_train  # training skips one image of a small dataset as well
    assert "1 image is unreadable; training skips it." in scan(tmp_path).warnings
    test = {item.key for item in choose_splits(open_dataset(tmp_path)).test}
    trained = [path for path in sorted(tmp_path.rglob("*.png")) if path.relative_to(tmp_path).as_posix() not in test]
    for path in trained[1:3]:
        path.write_bytes(b"bad " + path.name.encode())
    assert re.search(r"\d of \d+ training images are unreadable \(expected at most 1\)", scan(tmp_path).problems[0])
    assert scan(tmp_path, max_bad_fraction=0.2).can_train
    one = class_folders(tmp_path / "one", {"only": 5})
    assert "at least 2" in scan(one).problems[0]


def test_unreadable_images_of_other_splits_do_not_count_as_training_images(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", {"a": 4, "b": 4})
    class_folders(tmp_path / "test", {"a": 4, "b": 4})
    images = sorted((tmp_path / "test").rglob("*.png"))
    for image in images[:5]:
        image.write_bytes(b"bad")
    assert "5 images are unreadable; training skips them." in scan(tmp_path).warnings
    events = list(train_events(tmp_path, model="vit-pico4", steps=1, image_size=8, out=tmp_path / "run"))
    assert isinstance(events[-1], Finished)
    for image in images:
        image.write_bytes(b"bad")
    assert scan(tmp_path).problems == ["All 8 test images are unreadable. Replace them."]
    with pytest.raises(DataError, match="None of the 8 images"):
        list(train_events(tmp_path, model="vit-pico4", steps=1, image_size=8, out=tmp_path / "none"))


def test_the_command(tmp_path: Path) -> None:
    class_folders(tmp_path / "data", {"cat": 10, "a dog with a very long name indeed": 8})
    sheet = tmp_path / "sheet.png"
    done = run("data", str(tmp_path / "data"), "--sheet", str(sheet))
    assert done.returncode == 0, done.stderr
    assert "Ready to train." in done.stdout
    with Image.open(sheet) as drawn:
        assert drawn.width > 700
    result = json.loads(run("data", str(tmp_path / "data"), "--format", "json").stdout)
    assert result["can_train"] is True
    assert result["splits"] == {"train": 18}
    for image in (tmp_path / "data" / "cat").iterdir():
        image.write_bytes(b"")
    bad = run("data", str(tmp_path / "data"), "--format", "quiet")
    assert bad.returncode == 2
    assert "unreadable" in bad.stdout
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
    [("x.txt", ".png"), ("no/x.png", "does not exist"), ("keep.png", "already exists")],
)
def test_an_unusable_sheet_is_refused_before_the_scan(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "keep.png").write_bytes(b"my image")
    done = run("data", str(tmp_path / "nowhere"), "--sheet", str(tmp_path / name))
    assert done.returncode == 2
    assert reason in done.stderr
    assert (tmp_path / "keep.png").read_bytes() == b"my image"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keep.png"]


def test_progress_comes_before_the_result() -> None:
    events = list(scan_events(open_dataset("builtin:digits"), headers_only=True))
    assert [event for event in events[:-1] if not isinstance(event, Progress)] == []
    assert isinstance(events[-1], Scan)
    reported: list[Progress] = []
    assert scan("builtin:digits", headers_only=True, on_progress=reported.append) == events[-1]
    assert reported == events[:-1]
    assert reported[0] == Progress(done=64, total=5000)


def test_headers_only_misses_damaged_pixels(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 10, "b": 10})
    damaged = tmp_path / "a" / "000.png"
    damaged.write_bytes(damaged.read_bytes()[:-200])
    assert list(scan(tmp_path).unreadable) == ["a/000.png"]
    assert not scan(tmp_path, headers_only=True).unreadable
