"""Pictures of one band and of five, from files to a model on disk."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from tests.cli.test_commands import vitral as run_command
from tests.conftest import small_model
from tests.data.test_tiff import write_tiff
from vitral.data.batches import BatchLoader, ImageDataset
from vitral.data.sources import open_dataset
from vitral.training.entry import train
from vitral.training.events import Chosen, Event, Finished, Stepped, Warned

TINY: dict[str, Any] = dict(
    model="vit-pico4",
    network=dict(width=48, depth=1, heads=3, mlp_width=48),
    image_size=16,
    batch_size=8,
    steps=24,
    workers=0,
    device="cpu",
    optim=dict(lr=3e-3, warmup_steps=2),
)
CLASSES = ("field", "water", "wood")


def picture(label: int, index: int, bands: int) -> np.ndarray:
    """Noise, and for each class another band of the last three that is bright: RGB alone would not tell."""
    pixels = np.random.default_rng([label, index]).integers(0, 80, (20, 24, bands), dtype=np.uint8)
    pixels[..., bands - 1 - label] += 150
    return pixels


def write_folders(folder: Path, ending: str, each: int = 24) -> Path:
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for index in range(each):
            pixels, path = picture(label, index, bands=5), folder / name / f"{index:03d}{ending}"
            if ending == ".npy":
                np.save(path, pixels)
            elif index % 2:  # half of them with bands side by side, half with a plane for each
                path.write_bytes(write_tiff(pixels))
            else:
                path.write_bytes(write_tiff(pixels, planes=True, deflate=True))
    return folder


def write_frames(folder: Path) -> Path:
    """A frame for each band, as Pillow and ImageJ write them."""
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for index in range(24):
            first, *rest = [Image.fromarray(band) for band in picture(label, index, bands=5).transpose(2, 0, 1)]
            first.save(folder / name / f"{index:03d}.tif", save_all=True, append_images=rest)
    return folder


def decided(events: list[Event], name: str) -> Chosen:
    (found,) = [event for event in events if isinstance(event, Chosen) and event.name == name]
    return found


@pytest.mark.parametrize("kind", ["arrays", "tiffs", "frames"])
def test_five_bands_from_folder_to_model(kind: str, tmp_path: Path) -> None:
    if kind == "frames":
        data = write_frames(tmp_path / "data")
    else:
        data = write_folders(tmp_path / "data", {"arrays": ".npy", "tiffs": ".tif"}[kind])
    events = list(vitral.train_events(data, out=tmp_path / "run", augment=dict(flip=0.5, jitter=0.2, rotate=5), **TINY))  # pyright: ignore
    found = decided(events, "channels")
    assert (found.value, found.reason) == (5, "the pictures have 5 bands")
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.test["top1"] > 0.8
    loaded = vitral.load(tmp_path / "run")
    assert loaded.model.config.channels == 5
    assert loaded.preprocess.channels == len(loaded.preprocess.mean) == len(loaded.preprocess.std) == 5
    assert loaded.labels == CLASSES
    items = open_dataset(data).splits["train"]
    batch = next(BatchLoader(pictures=ImageDataset(items, loaded.preprocess), batch_size=6, classes=3).epoch())
    assert isinstance(batch.images, torch.Tensor)
    assert batch.images.shape == (6, 5, 16, 16)
    assert not batch.bad


@pytest.mark.parametrize("ending", [".npy", ".tif"])
def test_the_command_finds_the_bands_and_the_odd_picture(ending: str, tmp_path: Path) -> None:
    data = write_folders(tmp_path / "data", ending, each=40)
    Image.new("RGB", (24, 20), (90, 20, 20)).save(data / "water" / "odd.png")
    done = run_command("data", str(data), "--sheet", str(tmp_path / "sheet.png"))
    assert done.returncode == 0, done.stdout
    assert "5 bands 120" in done.stdout
    assert "water/odd.png: wrong channels: 3 bands, and 5 are needed" in done.stdout
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert len(set(sheet.crop((160, 0, *sheet.size)).get_flattened_data())) > 100, "no picture is on the sheet"


def write_grey(folder: Path) -> Path:
    for label, name in enumerate(("dark", "light")):
        (folder / name).mkdir(parents=True)
        for index in range(30):
            noise = np.random.default_rng([label, index]).integers(0, 90, (16, 16), dtype=np.uint8)
            Image.fromarray(noise + np.uint8(120 * label)).save(folder / name / f"{index:03d}.png")
    return folder


def test_grey_pictures_are_seen_as_grey(tmp_path: Path) -> None:
    data = write_grey(tmp_path / "data")
    events = list(train(data, out=tmp_path / "run", **TINY))
    assert decided(events, "channels").reason == "the pictures are grey"
    assert vitral.load(tmp_path / "run").model.config.channels == 1
    for path in (data / "dark").iterdir():
        Image.new("RGB", (16, 16), (200, 10, 10)).save(path)
    events = list(train(data, out=tmp_path / "mixed", **{**TINY, "steps": 1}))
    assert decided(events, "channels").value == 3


def from_rgb(data: Path, tmp_path: Path, **settings: Any) -> list[Event]:
    base = tmp_path / "base.safetensors"
    vitral.save(small_model(), base)
    own = {name: value for name, value in TINY.items() if name not in ("model", "network")}
    own |= dict(from_weights=str(base), out=tmp_path / "run", tune=dict(what="all"))
    return list(train(data, **{**own, **settings}))


def test_an_rgb_checkpoint_learns_grey_pictures_and_says_what_became_of_its_kernel(tmp_path: Path) -> None:
    events = from_rgb(write_grey(tmp_path / "data"), tmp_path, channels=1)
    said = [event.message for event in events if isinstance(event, Warned)]
    assert any("patches.project.weight: 3 channels to 1" in message for message in said), said
    assert isinstance(events[-1], Finished)
    losses = [event.loss for event in events if isinstance(event, Stepped)]
    assert losses[-1] < losses[0]
    loaded = vitral.load(tmp_path / "run")
    assert loaded.model.config.channels == loaded.preprocess.channels == 1


def test_an_rgb_checkpoint_meets_grey_or_five_bands(tmp_path: Path) -> None:
    """Grey becomes RGB, as the checkpoint has it; five bands cannot, so the checkpoint gives way."""
    events = from_rgb(write_grey(tmp_path / "grey"), tmp_path, out=tmp_path / "one", steps=2)
    assert decided(events, "channels").reason == "what the checkpoint was trained on"
    assert vitral.load(tmp_path / "one").model.config.channels == 3
    events = from_rgb(write_folders(tmp_path / "five", ".npy", each=8), tmp_path, out=tmp_path / "two", steps=2)
    assert decided(events, "channels").value == 5
    assert any("3 channels to 5" in event.message for event in events if isinstance(event, Warned))
    assert vitral.load(tmp_path / "two").model.config.channels == 5
