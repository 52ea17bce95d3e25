"""Photos as phones make them, in bursts: check them, train on them with groups and without some, evaluate, resume."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.typed import typed
from tests.data.images import as_heic, encoded, photo
from tests.data.profiles import DISPLAY_P3, rgb_profile
from vitral.data.sources import open_dataset
from vitral.data.splits import choose_splits

BURST = r"(IMG\d+)_\d"
TRAIN = ("--model", "vit-pico4", "--image-size", "16", "--steps", "4", "--batch-size", "8", "--workers", "0")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of twelve bursts with three photos each: HEIC, AVIF and JPEG."""
    folder, profile = tmp_path_factory.mktemp("photos"), rgb_profile(DISPLAY_P3)
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir()
        for number in range(36):
            pixels = np.asarray(photo(24, 32, seed=number + 100 * label)) * ([1, 0.6, 0.3] if label else [0.3, 0.6, 1])
            image = Image.fromarray(pixels.astype(np.uint8))
            suffix = ("HEIC", "avif", "jpg")[number % 3]
            kind = {"avif": "AVIF", "jpg": "JPEG"}.get(suffix)
            content = encoded(image, kind, icc_profile=profile) if kind else as_heic(image, icc_profile=profile)
            (folder / name / f"IMG{number // 3 + 50 * label}_{number % 3}.{suffix}").write_bytes(content)
    return folder


def test_phone_photos_in_bursts(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = open_dataset(photos)
    random_split = choose_splits(data)
    suspects = [random_split.train[0].key, random_split.train[1].key, random_split.test[0].key, "cat/unknown.jpg"]
    listed = tmp_path / "suspects.csv"
    listed.write_text("file,label\n" + "".join(f"{key},cat\n" for key in suspects))
    done = typed("data", str(photos), "--group-by", BURST, "--drop", "suspects.csv", "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["formats"]) == {"HEIF", "AVIF", "JPEG"}
    assert (found["groups"], found["dropped"], found["splits"]) == (24, 3, {"train": 69})

    options = ("--group-by", BURST, "--drop", "suspects.csv", "--out", "run")
    done = typed("train", str(photos), *TRAIN, *options)
    assert done.returncode == 0, done.stderr
    assert "Images in suspects.csv that are not in" in done.stderr
    assert "Images dropped from the train and validation splits: " in done.stderr
    report, manifest = (json.loads(Path("run", name).read_text()) for name in ("report.json", "manifest.json"))
    assert manifest["dropped"] == sorted(suspects[:3])
    assert any("Images dropped" in note for note in report["data"]["notes"])
    assert "groups are not divided" in report["data"]["reasons"]["test"]
    groups = {item.key: item.key.split("/")[1].split("_")[0] for item in data.splits["train"]}
    test = {item.key for item in choose_splits(data, groups=groups).test}
    assert report["test"]["images"] == len(test)
    assert sum(report["data"]["images"].values()) == 72 - len(set(suspects[:3]) - test)

    listed.rename("elsewhere.csv")  # the run remembers what it dropped
    done = typed("evaluate", "run", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["top1"] == report["test"]["top1"]
    done = typed("predict", "run", str(photos / "cat"), "--format", "json")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 36

    Path("run", "report.json").unlink()  # as if the run had been killed before its end
    done = typed("train", "--resume", "run")
    assert (done.returncode, "suspects.csv not found" in done.stderr) == (2, True)
    listed.write_text("file\n" + suspects[0])
    done = typed("train", "--resume", "run")
    assert (done.returncode, "not the one that" in done.stderr) == (2, True)
    Path("elsewhere.csv").rename(listed)
    done = typed("train", "--resume", "run", "--drop", str(listed), "--group-by", BURST)
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("run", "report.json").read_text())["test"]["loss"] == report["test"]["loss"]
    done = typed("train", "--resume", "run", "--group-by", "other")
    assert (done.returncode, "group_by" in done.stderr) == (2, True)


def test_bad_options(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (("--group-by", "([^/]+"), ("--group-by", "horse"), ("--drop", "nowhere.csv"), ("--group-by", " ")):
        done = typed("train", str(photos), *TRAIN, *words)
        assert done.returncode == 2
        assert done.stderr.count("\n") < 30
        assert "vitral: " in done.stderr
        assert "Traceback" not in done.stderr
    assert not Path("runs").exists()
