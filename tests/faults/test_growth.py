"""Train for ten epochs: memory and open files do not grow. Save: the time is that of writing and hashing the bytes."""

import hashlib
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.images import class_folders
from tests.faults.figures import record
from tests.training.short_runs import TINY
from vitral.devices import keep_freed_memory
from vitral.training.entry import train_events
from vitral.training.events import EpochEnded
from vitral.training.saving import StateSaver
from vitral.training.state import TrainState, save_state

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
MAX_GROWTH, MAX_SAVE_RATIO, MAX_LOOP_WAIT = 1.02, 1.3, 0.1


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def measure_growth(folder: Path, images: int, **settings: Any) -> tuple[float, list[int]]:
    """Train for ten epochs. Return the memory after the last divided by that after the third, and open files."""
    data = class_folders(folder / "photos", dict.fromkeys(("red", "green", "blue"), images), size=(20, 20))
    sizes, files = [], []
    for event in train_events(data, out=folder / "run", **TINY | dict(epochs=10, save_seconds=0) | settings):
        if isinstance(event, EpochEnded):
            sizes.append(resident_bytes())
            files.append(open_files())
    assert len(sizes) == 10
    return sizes[-1] / sizes[2], files


def save_ratio(folder: Path, mebibytes: int, rounds: int = 5) -> float:
    """Return the time of a save divided by that of writing, hashing and flushing the same bytes: fastest of each."""
    tensors = {f"model:{number}": torch.randn(2**18) for number in range(mebibytes)}  # 1 MiB each
    content = b"".join(bytes(tensor.numpy().data) for tensor in tensors.values())
    saves, writes = [], []
    for step in range(rounds):
        start = time.perf_counter()
        path = folder / f"plain-{step % 2}"
        path.unlink(missing_ok=True)
        with path.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        hashlib.sha256(content).hexdigest()
        writes.append(time.perf_counter() - start)
        start = time.perf_counter()
        save_state(folder / "state", TrainState(step=step), tensors)
        saves.append(time.perf_counter() - start)
    return min(saves) / min(writes)


def test_open_files_are_constant(tmp_path: Path) -> None:
    growth, files = measure_growth(tmp_path, images=6, network=dict(width=48, depth=1, heads=3))
    assert min(files[6:]) <= min(files[2:6]), files  # a thread may have a state open at that moment
    assert growth <= 1.1  # the soak test has the bound; other tests of this process leave memory that is freed late


@pytest.mark.soak
def test_ten_epochs_use_no_more_memory(tmp_path: Path) -> None:
    growth, files = measure_growth(tmp_path, images=200, batch_size=32)
    assert min(files[6:]) <= min(files[2:6]), files  # a thread may have a state open at that moment
    assert growth <= MAX_GROWTH
    record(
        "Memory and open files over 10 epochs",
        "at most 2 % more memory, as many open files",
        f"{growth - 1:+.1%} after the third epoch, {min(files[6:])} open files at the end, as at the beginning",
    )


@pytest.mark.soak
def test_a_save_costs_little_more_than_writing(tmp_path: Path) -> None:
    ratio = save_ratio(tmp_path, 256)
    record("Time of a save", "at most 1.3 times that of writing and hashing the bytes", f"{ratio:.2f} times (256 MiB)")
    assert ratio <= MAX_SAVE_RATIO


def loop_wait(folder: Path, mebibytes: int, rounds: int = 5) -> float:
    """Return the time for which a save keeps the loop waiting, divided by that of the whole save: fastest of each."""
    tensors = {f"model:{number}": torch.randn(2**18) for number in range(mebibytes)}
    saver = StateSaver(partial(save_state, folder / "state"), 0.0)
    waits, saves = [], []
    for step in range(rounds):
        start = time.perf_counter()
        assert not list(saver.start(TrainState(step=step), tensors))
        waits.append(time.perf_counter() - start)
        assert [saved.step for saved in saver.wait()] == [step]
        saves.append(time.perf_counter() - start)
    saver.close()
    return min(waits) / min(saves)


@pytest.mark.soak
def test_the_loop_waits_for_a_tenth_of_a_save(tmp_path: Path) -> None:
    keep_freed_memory()  # as a run on a CPU does
    ratio = loop_wait(tmp_path, 256)
    record("Wait of the training loop for a save", "at most 10 % of a save", f"{ratio:.1%} (256 MiB)")
    assert ratio <= MAX_LOOP_WAIT
