"""Images with one channel and with five, from files to a model on disk."""

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
from tests.training.short_runs import last, warnings_of
from vitral.data.batches import BatchLoader, ImageDataset
from vitral.data.sources import open_dataset
from vitral.training.entry import train_events
from vitral.training.events import Chosen, Event, Finished, Stepped

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


def make_pixels(label: int, index: int, bands: int) -> np.ndarray:
    """Noise, and one of the last three bands is bright, by class: RGB alone would not separate the classes."""
    pixels = np.random.default_rng([label, index]).integers(0, 80, (20, 24, bands), dtype=np.uint8)
    pixels[..., bands - 1 - label] += 150
    return pixels


def write_folders(folder: Path, suffix: str, per_class: int = 24) -> Path:
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for index in range(per_class):
            pixels, path = make_pixels(label, index, bands=5), folder / name / f"{index:03d}{suffix}"
            if suffix == ".npy":
                np.save(path, pixels)
            elif index % 2:  # half of the files interleave the bands, half have a plane per band
                path.write_bytes(write_tiff(pixels))
            else:
                path.write_bytes(write_tiff(pixels, planes=True, deflate=True))
    return folder


def write_frames(folder: Path) -> Path:
    """Write a frame per band, as Pillow and ImageJ do."""
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for index in range(24):
            bands = make_pixels(label, index, bands=5).transpose(2, 0, 1)
            first, *rest = [Image.fromarray(band) for band in bands]
            first.save(folder / name / f"{index:03d}.tif", save_all=True, append_images=rest)
    return folder


def find_choice(events: list[Event], name: str) -> Chosen:
    (choice,) = [event for event in events if isinstance(event, Chosen) and event.name == name]
    return choice


@pytest.mark.parametrize("kind", ["arrays", "tiffs", "frames"])
def test_five_channels_from_folder_to_model(kind: str, tmp_path: Path) -> None:
    if kind == "frames":
        data = write_frames(tmp_path / "data")
    else:
        data = write_folders(tmp_path / "data", {"arrays": ".npy", "tiffs": ".tif"}[kind])
    events = list(train_events(data, out=tmp_path / "run", augment=dict(flip=0.5, rotate=5), **TINY))
    choice = find_choice(events, "channels")
    assert (choice.value, choice.reason) == (5, "the images have 5 channels")
    assert last(events, Finished).test["top1"] > 0.8
    loaded = vitral.load(tmp_path / "run")
    assert loaded.model.config.channels == 5
    assert loaded.preprocess.channels == len(loaded.preprocess.mean) == len(loaded.preprocess.std) == 5
    assert loaded.labels == CLASSES
    items = open_dataset(data).splits["train"]
    batch = next(BatchLoader(images=ImageDataset(items, loaded.preprocess), batch_size=6, classes=3).epoch())
    assert isinstance(batch.images, torch.Tensor)
    assert batch.images.shape == (6, 5, 16, 16)
    assert not batch.bad


@pytest.mark.parametrize("augment", [dict(jitter=0.2), dict(randaugment=1)])
def test_color_augmentation_of_five_channels_is_refused(augment: dict[str, Any], tmp_path: Path) -> None:
    data = write_folders(tmp_path / "data", ".npy", per_class=8)
    with pytest.raises(vitral.ConfigError, match=rf"augment\.{next(iter(augment))} .*5 channels"):
        list(train_events(data, out=tmp_path / "run", augment=augment, **TINY))


@pytest.mark.parametrize("suffix", [".npy", ".tif"])
def test_the_command_reports_the_channels_and_the_odd_image(suffix: str, tmp_path: Path) -> None:
    data = write_folders(tmp_path / "data", suffix, per_class=40)
    Image.new("RGB", (24, 20), (90, 20, 20)).save(data / "water" / "odd.png")
    done = run_command("data", str(data), "--sheet", str(tmp_path / "sheet.png"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 bands 120" in done.stdout
    assert "water/odd.png (wrong channels: 3 bands; expected 5)" in done.stdout
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert len(set(sheet.crop((160, 0, *sheet.size)).get_flattened_data())) > 100, "the sheet has no image"


def write_gray(folder: Path) -> Path:
    for label, name in enumerate(("dark", "light")):
        (folder / name).mkdir(parents=True)
        for index in range(30):
            noise = np.random.default_rng([label, index]).integers(0, 90, (16, 16), dtype=np.uint8)
            Image.fromarray(noise + np.uint8(120 * label)).save(folder / name / f"{index:03d}.png")
    return folder


def test_gray_images_have_one_channel(tmp_path: Path) -> None:
    data = write_gray(tmp_path / "data")
    events = list(train_events(data, out=tmp_path / "run", **TINY))
    assert find_choice(events, "channels").reason == "the images are gray"
    assert vitral.load(tmp_path / "run").model.config.channels == 1
    for path in (data / "dark").iterdir():
        Image.new("RGB", (16, 16), (200, 10, 10)).save(path)
    events = list(train_events(data, out=tmp_path / "mixed", **{**TINY, "steps": 1}))
    assert find_choice(events, "channels").value == 3


def train_from_rgb(data: Path, tmp_path: Path, **settings: Any) -> list[Event]:
    base = tmp_path / "base.safetensors"
    vitral.save(small_model(), base)
    tuned = {name: value for name, value in TINY.items() if name not in ("model", "network")}
    tuned |= dict(from_weights=str(base), out=tmp_path / "run", tune=dict(what="all"))
    return list(train_events(data, **{**tuned, **settings}))


def test_an_rgb_checkpoint_adapts_its_kernel_to_gray(tmp_path: Path) -> None:
    events = train_from_rgb(write_gray(tmp_path / "data"), tmp_path, channels=1)
    messages = warnings_of(events)
    assert any("patches.project.weight: 3 channels to 1" in message for message in messages), messages
    assert isinstance(events[-1], Finished)
    losses = [event.loss for event in events if isinstance(event, Stepped)]
    assert losses[-1] < losses[0]
    loaded = vitral.load(tmp_path / "run")
    assert loaded.model.config.channels == loaded.preprocess.channels == 1


def test_an_rgb_checkpoint_and_other_channels(tmp_path: Path) -> None:
    """Gray images become RGB, as the checkpoint needs; five channels cannot, so its kernel is adapted."""
    events = train_from_rgb(write_gray(tmp_path / "gray"), tmp_path, out=tmp_path / "one", steps=2)
    assert "checkpoint" in find_choice(events, "channels").reason
    assert vitral.load(tmp_path / "one").model.config.channels == 3
    five = write_folders(tmp_path / "five", ".npy", per_class=8)
    events = train_from_rgb(five, tmp_path, out=tmp_path / "two", steps=2)
    assert find_choice(events, "channels").value == 5
    assert any("3 channels to 5" in message for message in warnings_of(events))
    assert vitral.load(tmp_path / "two").model.config.channels == 5
