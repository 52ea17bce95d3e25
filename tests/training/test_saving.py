"""States that are written in a thread: complete copies, one at a time, and failures that surface."""

import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.training.saving import SAVE_COST, StateSaver
from vitral.training.state import TrainState, load_state, save_state


class SlowDisk:
    """Writes a state once its disk is ready."""

    def __init__(self, folder: Path):
        self.folder, self.is_ready, self.writing = folder, threading.Event(), 0

    def write(self, state: TrainState, tensors: Mapping[str, Tensor]) -> Path:
        self.writing += 1
        assert self.writing == 1, "two states are written at once"
        assert self.is_ready.wait(20)
        self.writing -= 1
        return save_state(self.folder, state, tensors)


def test_a_state_is_that_of_its_step_although_training_continues(tmp_path: Path) -> None:
    disk, weight = SlowDisk(tmp_path), torch.zeros(4)
    saver, state = StateSaver(disk.write, 0.0), TrainState(step=3)
    assert list(saver.start(state, {"model:a": weight})) == []
    weight += 1  # the next step
    state.step = 4
    state.best.epoch = 7
    assert list(saver.written()) == []
    assert not saver.is_due()
    disk.is_ready.set()
    (saved,) = saver.wait()
    assert (saved.step, saved.path.name) == (3, "step-00000003")
    loaded = load_state(tmp_path)
    assert loaded is not None
    assert (loaded[0].step, loaded[0].best.epoch) == (3, -1)
    assert loaded[1]["model:a"].sum() == 0
    assert list(saver.wait()) == []
    saver.close()


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    saver = StateSaver(disk.write, 0.0)
    list(saver.start(TrainState(step=1), {"model:a": torch.ones(2)}))
    threading.Timer(0.2, disk.is_ready.set).start()
    assert [saved.step for saved in saver.start(TrainState(step=2), {"model:a": torch.ones(2)})] == [1]
    assert [saved.step for saved in saver.wait()] == [2]
    assert saver.duration > 0
    saver.last -= 0.5 * SAVE_COST * saver.duration
    saver.close()


def test_a_failure_surfaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a folder should be")
    saver = StateSaver(partial(save_state, tmp_path / "state"), 0.0)
    list(saver.start(TrainState(step=1), {"model:a": torch.ones(2)}))
    with pytest.raises(VitralError, match="Cannot save the state"):
        list(saver.wait())
    saver.close()


def test_a_run_waits_for_its_last_state(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    saver = StateSaver(disk.write, 0.0)
    list(saver.start(TrainState(step=9), {"model:a": torch.ones(2)}))
    threading.Timer(0.2, disk.is_ready.set).start()
    saver.close()
    loaded = load_state(tmp_path)
    assert loaded is not None
    assert loaded[0].step == 9
