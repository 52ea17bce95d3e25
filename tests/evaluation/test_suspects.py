"""Suspects of a dataset of photos with planted errors and copies, through `vitral data --from`."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitral
from tests.cli.typed import typed
from vitral.data.sources import open_dataset
from vitral.evaluation.suspects import Suspects, find_suspects, load_for_features


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return three colors in two splits, with two wrong labels and a recompressed copy of a training image in test."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    random = np.random.default_rng(0)
    for split, count in (("train", 25), ("test", 8)):
        for channel, color in enumerate(("red", "green", "blue")):
            (folder / split / color).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 120, (4, 4, 3), dtype=np.uint8)
                pixels[..., channel] += 135
                image = Image.fromarray(pixels).resize((32, 32), Image.Resampling.BICUBIC)
                image.save(folder / split / color / f"{number:03d}.png")
    (folder / "train/red/000.png").rename(folder / "train/green/wrong.png")
    (folder / "test/blue/000.png").rename(folder / "test/red/wrong.png")
    with Image.open(folder / "train/blue/001.png") as image:
        image.save(folder / "test/blue/copy.jpg", quality=95, subsampling=0)
    (folder / "train/red/broken.png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return an untrained network, whose features of colors differ all the same."""
    model = vitral.create("vit-pico4", image_size=32, num_classes=3, width=48, depth=1, heads=3)
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    vitral.save(vitral.Checkpoint(model=model, preprocess=vitral.Preprocess(size=(32, 32))), path)
    return str(path)


def last(events: Iterator[object]) -> Suspects:
    *_, suspects = events
    assert isinstance(suspects, Suspects)
    return suspects


def test_planted_errors_and_copies_are_found(photos: Path, weights: str, tmp_path: Path) -> None:
    done = typed("data", str(photos), "--from", weights, "--out", str(tmp_path / "out"), "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["suspects"]
    errors = {row["file"]: (row["label"], row["suggested"]) for row in found["label_errors"]}
    planted = {"train/green/wrong.png": ("green", "red"), "test/red/wrong.png": ("red", "blue")}
    assert planted.items() <= errors.items()
    assert len(errors) <= 4
    pair = found["near_duplicates"][0]  # images of few colors may be near-duplicates to an untrained network, too
    assert {pair["file"], pair["other"]} == {"train/blue/001.png", "test/blue/copy.jpg"}
    assert {pair["split"], pair["other_split"]} == {"train", "test"}
    assert [name for name, _ in found["unreadable"]] == ["train/red/broken.png"]
    assert found["images"] == 100
    keys = {item.key for items in open_dataset(photos).splits.values() for item in items}
    for path, rows in zip(found["files"], (found["label_errors"], found["near_duplicates"]), strict=True):
        with Path(path).open(newline="", encoding="utf-8") as stream:
            written = list(csv.DictReader(stream))
        assert [row["file"] for row in written] == [row["file"] for row in rows]
        assert {row["file"] for row in written} <= keys  # what --drop takes
        assert [list(row) for row in written] == [list(row) for row in rows]


def test_people_see_the_rows_and_the_files(photos: Path, weights: str, tmp_path: Path) -> None:
    done = typed("data", str(photos), "--from", weights, "--out", str(tmp_path / "out"))
    assert "likely label errors in 100 images" in done.stdout
    assert "train/green/wrong.png" in done.stdout
    assert "between splits. Scores on the second split will be inflated." in done.stdout
    assert "near-duplicates.csv" in done.stdout
    again = typed("data", str(photos), "--from", weights, "--out", str(tmp_path / "out"))
    assert again.returncode == 2
    assert "label-errors.csv already exists" in again.stderr


def test_a_dataset_of_several_labels_has_near_duplicates_only(weights: str, photos: Path, tmp_path: Path) -> None:
    files = [f"{photos}/train/{color}/{number:03d}.png" for color in ("red", "blue") for number in range(1, 8)]
    table = tmp_path / "labels.csv"
    table.write_text("image,labels\n" + "".join(f"{file},{'a|b' if 'red' in file else 'b'}\n" for file in files))
    suspects = last(find_suspects(load_for_features(weights, image_size=None), open_dataset(table)))
    assert suspects.label_errors == ()
    assert "one label per image" in suspects.notes[0]
    assert suspects.images == 14


def test_large_checkpoints_are_used_at_224_pixels(tmp_path: Path) -> None:
    model = vitral.create("vit-pico4", image_size=300, patch_size=20, num_classes=3, width=48, depth=1, heads=3)
    path = str(tmp_path / "model.safetensors")
    vitral.save(vitral.Checkpoint(model=model, preprocess=vitral.Preprocess(size=(300, 300))), path)
    assert load_for_features(path, image_size=None).model.config.image_hw == (220, 220)
    assert load_for_features(path, image_size=(240, 240)).model.config.image_hw == (240, 240)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (["--out", "x"], "Pass --from MODEL"),
        (["--image-size", "32"], "Pass --from MODEL"),
        (["--from", "missing.safetensors"], "missing.safetensors"),
        (["--from", "vit-cifar10", "--out", "{photos}/train/red/001.png"], "must be a folder"),
    ],
)
def test_wrong_options_are_one_sentence(photos: Path, options: list[str], fact: str) -> None:
    done = typed("data", str(photos), *(option.format(photos=photos) for option in options))
    assert done.returncode == 2
    assert fact in done.stderr
    assert "Traceback" not in done.stderr
