"""Forty kinds of unreadable images in many places of a dataset: no crash, and each is listed with its reason."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.data.images import class_folders
from tests.faults.bad_images import bad_images
from tests.faults.figures import record
from tests.training.short_runs import train
from vitral.training.events import Finished

SETTINGS: dict[str, Any] = dict(epochs=1, max_bad_fraction=1.0, network=dict(width=48, depth=1, heads=3, mlp_width=48))


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset with train, val and test folders."""
    folder = tmp_path_factory.mktemp("clean")
    for split, count in {"train": 24, "val": 6, "test": 6}.items():
        class_folders(folder, {"red": count, "green": count}, size=(20, 20), split=split)
    return folder


def places(count: int, chance: random.Random) -> list[str]:
    """Return folders of the dataset and positions in their order, as prefixes of a name."""
    folders = [f"{split}/{name}" for split in ("train", "val", "test") for name in ("red", "green")]
    prefixes = ("000-", "003-", "005-", "zzz-")  # before, among and after the others
    return chance.sample([f"{folder}/{prefix}" for folder in folders for prefix in prefixes] + ["train/red/é "], count)


def check_place(clean: Path, place: str, folder: Path) -> None:
    """Train on a dataset that has all kinds of bad images in one place, and compare what the run lists."""
    data = folder / "data"
    shutil.copytree(clean, data)
    names = {f"{place}{name}" for name in bad_images()}
    for name, content in bad_images().items():
        (data / f"{place}{name}").write_bytes(content)
    events = train(data, folder / "run", **SETTINGS)
    assert isinstance(events[-1], Finished)
    rows = [line.split("\t") for line in (folder / "run" / "skipped.txt").read_text(encoding="utf-8").splitlines()]
    listed = {key for key, _ in rows}
    assert {Path(key).name for key in listed} == {Path(name).name for name in names}
    assert len(rows) == len(names)
    assert all(reason for _, reason in rows)


def test_there_are_forty_kinds() -> None:
    assert len(bad_images()) == 40


@pytest.mark.parametrize("place", ["train/red/000-", "val/green/zzz-"])
def test_every_bad_image_is_listed(clean: Path, place: str, tmp_path: Path) -> None:
    check_place(clean, place, tmp_path)


@pytest.mark.soak
def test_forty_kinds_in_all_places(clean: Path, tmp_path: Path) -> None:
    chosen = places(25, random.Random())
    for number, place in enumerate(chosen):
        check_place(clean, place, tmp_path / str(number))
    record(
        "40 kinds of unreadable images in 25 places of a dataset",
        "no crash, each listed with its reason",
        f"{40 * len(chosen):,} files in {len(chosen)} runs, all listed",
    )
