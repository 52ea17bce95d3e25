"""`vitral train` with unusable datasets, wrong arguments and closed streams."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitral
from tests.cli.conftest import TINY
from tests.cli.typed import typed
from tests.data.images import class_folders
from vitral.errors import ConfigError, DataError, VitralError
from vitral.training.events import Event, Finished, Warned


def test_test_images_are_read_before_training(tmp_path: Path) -> None:
    for split in ("train", "test"):
        class_folders(tmp_path, {"red": 6, "green": 6}, size=(16, 16), split=split)
    for image in (tmp_path / "test").rglob("*.png"):
        image.write_bytes(b"not an image")
    with pytest.raises(DataError, match="test"):
        list(vitral.train_events(tmp_path, out=tmp_path / "run", **TINY))
    assert not (tmp_path / "run").exists()


def test_every_unreadable_image_is_listed(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        class_folders(tmp_path / "data", {"red": 8, "green": 8}, size=(16, 16), split=split)
        (tmp_path / "data" / split / "red" / "003.png").write_bytes(b"")
    events = list(vitral.train_events(tmp_path / "data", out=tmp_path / "run", **TINY))
    listed = (tmp_path / "run" / "skipped.txt").read_text().splitlines()
    expected = [f"{split}/red/003.png" for split in ("test", "train", "val")]
    assert sorted(line.split("\t")[0] for line in listed) == expected
    warnings = " ".join(event.message for event in events if isinstance(event, Warned))
    assert "read" in warnings
    assert json.loads((tmp_path / "run" / "report.json").read_text())["bad_images"] == 3


def test_a_misspelled_checkpoint_fails_first(photos: Path, tmp_path: Path) -> None:
    events = vitral.train_events(photos, from_="dinov2-s41", out=tmp_path / "run")
    with pytest.raises(VitralError, match="dinov2-s41"):
        next(iter(events))


def test_ctrl_c_before_the_first_step_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> Iterator[Event]:
        yield Warned(message="The features take long.")
        raise KeyboardInterrupt

    monkeypatch.setattr(vitral, "train_events", interrupted)
    done = typed("train", "my photos", "--from", "vit-cifar10")
    assert done.returncode == 130
    assert "Nothing is saved yet, except finished features in the cache." in done.stderr
    assert done.stderr.endswith("\n  vitral train 'my photos' --from vit-cifar10\n")


def test_val_must_have_one_label_per_image_too(photos: Path, tmp_path: Path) -> None:
    rows = [f"{photos}/red/00{number}.png,red|green\n" for number in range(5)]
    (tmp_path / "val.csv").write_text("image,labels\n" + "".join(rows))
    with pytest.raises(DataError, match="label"):
        list(vitral.train_events(photos, val=str(tmp_path / "val.csv"), out=tmp_path / "run", **TINY))


def test_a_run_outlives_its_terminal(photos: Path, tmp_path: Path) -> None:
    options = ["--model", "vit-pico4", "--image-size", "16", "--steps", "12", "--batch-size", "8", "--out"]
    command = [sys.executable, "-m", "vitral", "train", str(photos), *options]
    process = subprocess.Popen([*command, str(tmp_path / "run")], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stderr is not None
    process.stderr.readline()
    process.stderr.close()  # as `2>&1 | head -1` does
    assert process.wait(timeout=120) == 0
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_closed_standard_output_is_one_sentence() -> None:
    done = subprocess.run(
        f"{sys.executable} -m vitral models >&-", shell=True, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "Standard output is closed" in done.stderr
    assert done.stderr.count("\n") == 1


def test_python_checks_arguments_at_the_call_and_writes_the_report(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'outt'"):
        vitral.train_events(photos, outt="x")
    with pytest.raises(ConfigError, match=r"optim\.eps"):
        vitral.train_events(photos, eps=1.0)
    *_, finished = vitral.train_events(photos, out=tmp_path / "run", **TINY)
    assert isinstance(finished, Finished)
    assert (finished.folder / "report.html").is_file()
    with pytest.raises(ConfigError, match="never overwritten") as caught:
        vitral.train_events(photos, out=tmp_path / "run", **TINY)
    assert "--resume" not in str(caught.value)  # the run is finished
