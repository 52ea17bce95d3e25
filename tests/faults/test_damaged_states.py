"""Damage saved states at random: every fault is detected, and the newest intact state is used and reported."""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.faults.figures import record
from vitral import VitralError
from vitral.training.state import TrainState, load_state, save_state

FILES = ("tensors.safetensors", "state.json", "manifest.json")


def cut(newest: Path, older: Path, chance: random.Random) -> None:
    path = newest / chance.choice(FILES)
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def flip(newest: Path, older: Path, chance: random.Random) -> None:
    """Flip one bit."""
    path = newest / chance.choice(FILES)
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def remove(newest: Path, older: Path, chance: random.Random) -> None:
    (newest / chance.choice(FILES)).unlink()


def swap(newest: Path, older: Path, chance: random.Random) -> None:
    """Use a file of the older state in the newest one."""
    name = chance.choice(FILES)
    shutil.copy(older / name, newest / name)


def swap_all(newest: Path, older: Path, chance: random.Random) -> None:
    """Use the older state under the name of the newest one."""
    shutil.rmtree(newest)
    shutil.copytree(older, newest)


def remove_manifest(newest: Path, older: Path, chance: random.Random) -> None:
    (newest / "manifest.json").unlink()


FAULTS: tuple[Callable[[Path, Path, random.Random], None], ...] = (
    cut,
    flip,
    flip,
    remove,
    swap,
    swap_all,
    remove_manifest,
)


def damage_states(folder: Path, count: int, chance: random.Random) -> Counter[str]:
    """Save two states and damage the newer one, again and again. Return the number of faults of each kind."""
    kinds = Counter[str]()
    tensors = {name: torch.randn(8, 40) for name in ("model:weight", "optimizer:moment")}
    older = save_state(folder, TrainState(step=10, seconds=1.5), tensors)
    newer = {name: tensor + 1 for name, tensor in tensors.items()}
    for _ in range(count):
        newest = save_state(folder, TrainState(step=20, seconds=2.5), newer)
        fault = chance.choice(FAULTS)
        fault(newest, older, chance)
        kinds[fault.__name__] += 1
        loaded = load_state(folder)
        assert loaded is not None
        state, read, problems = loaded
        assert state.step == 10, f"{fault.__name__} was not detected"
        assert all(torch.equal(read[name], tensors[name]) for name in tensors)
        assert len(problems) == 1
        assert problems[0].startswith("step-00000020 is damaged (")
        assert problems[0].endswith("the state before it is used.")
    return kinds


def test_forty_faults_are_detected(tmp_path: Path) -> None:
    assert damage_states(tmp_path, 40, random.Random(0)).total() == 40


def test_without_an_intact_state_nothing_is_overwritten(tmp_path: Path) -> None:
    for step in (10, 20):
        path = save_state(tmp_path, TrainState(step=step), {"model:weight": torch.ones(3)})
        (path / "manifest.json").unlink()
    with pytest.raises(VitralError, match="No saved state .* can be used: step-00000020 .*; step-00000010"):
        load_state(tmp_path)


@pytest.mark.soak
def test_five_hundred_faults_are_detected(tmp_path: Path) -> None:
    kinds = damage_states(tmp_path, 500, random.Random())
    shown = ", ".join(f"{kinds[name]} {text}" for name, text in TEXTS.items())
    record(
        "Random faults in saved states",
        "500 of 500 detected, the newest intact state used and reported",
        f"500 of 500 ({shown})",
    )


TEXTS = {
    "cut": "cut", "flip": "bits flipped", "remove": "files removed", "swap": "files swapped",
    "swap_all": "states swapped", "remove_manifest": "manifests removed",
}  # fmt: skip
