"""SIGTERM while a run starts, waits for data, steps, measures and saves: nothing is lost, and the exit code is 143."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.data.images import class_folders
from tests.faults.figures import record
from tests.faults.test_killed_runs import SETTINGS, assert_same_run, run, start
from vitral.training.state import load_state

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM that a process can catch")
ROUNDS, MAX_SECONDS = 4, 10
# A state is due at every epoch, and otherwise only when the signal comes.
RARE_SAVES = SETTINGS.replace("--save-seconds 0", "--save-seconds 600")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("photos"), {"red": 30, "green": 30, "blue": 30}, size=(20, 20))


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    done = run(str(data), "--out", str(folder), *RARE_SAVES.split())
    assert done.returncode == 0, done.stderr
    return folder


def events_of(process: subprocess.Popen[str]) -> Iterator[dict]:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("{"):
            yield json.loads(line)


def wait_for_event(process: subprocess.Popen[str], name: str, count: int) -> int:
    """Wait for the given number of events of a name and return the last step that was trained until then."""
    step = 0
    for event in events_of(process):
        step = event["step"] if event["event"] == "stepped" else step
        count -= event["event"] == name
        if count == 0:
            return step
    raise AssertionError(f"the run ended before its event {name}")


@contextmanager
def hanging_workers(process: subprocess.Popen[str], folder: Path) -> Iterator[None]:
    """Freeze the processes that load images, as if storage hung, until a state is saved."""
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    for pid in children:
        os.kill(pid, signal.SIGSTOP)

    def wake_up() -> None:
        limit = time.monotonic() + 60
        while not list((folder / "state").glob("step-????????")) and time.monotonic() < limit:
            time.sleep(0.01)
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    time.sleep(1)  # the batches that are ready are used up
    waking = threading.Thread(target=wake_up)
    waking.start()
    yield
    waking.join()


def terminate(process: subprocess.Popen[str]) -> float:
    """Send SIGTERM, assert the exit code, and return the seconds until the process ended."""
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    threading.Thread(target=process.communicate, daemon=True).start()  # a full pipe would block the process
    process.wait(timeout=60)
    seconds = time.monotonic() - began
    assert process.returncode == 143
    assert seconds < MAX_SECONDS
    return seconds


def saved_step(folder: Path) -> int:
    loaded = load_state(folder / "state") if (folder / "state").is_dir() else None
    return 0 if loaded is None else loaded[0].step


def interrupt(moment: str, data: Path, folder: Path, chance: random.Random) -> float:
    """Start a run, terminate it at a moment, assert that no step is lost, and return the seconds that it took."""
    settings = SETTINGS if moment == "save" else RARE_SAVES
    settings += " --format json" + (" --workers 1" if moment == "data wait" else "")
    words, step, began = (str(data), "--out", str(folder), *settings.split()), 0, time.monotonic()
    process = start(*words)
    if moment == "start-up":
        wait_for_event(process, "stepped", 1)
        lasted = time.monotonic() - began
        terminate(process)
        shutil.rmtree(folder)
        process = start(*words)
        time.sleep(chance.uniform(0.5, 0.95) * lasted)
        return terminate(process)
    if moment == "data wait":
        step = wait_for_event(process, "stepped", chance.randint(1, 5))
        with hanging_workers(process, folder):
            seconds = terminate(process)
    elif moment == "save":
        step = wait_for_event(process, "saved", chance.randint(1, 3))
        limit = time.monotonic() + 5
        while not list((folder / "state").glob("*.tmp-*")) and time.monotonic() < limit:
            pass
        seconds = terminate(process)
    else:
        step = wait_for_event(process, {"step": "stepped", "evaluation": "measuring"}[moment], chance.randint(1, 12))
        seconds = terminate(process)
    assert saved_step(folder) >= step, f"{moment}: step {step} was lost"
    return seconds


def resume(data: Path, folder: Path) -> None:
    """Resume a run, or start it again if the signal came before there was one."""
    has_started = (folder / "config.toml").exists()
    done = run(*(["--resume", str(folder)] if has_started else [str(data), "--out", str(folder), *RARE_SAVES.split()]))
    assert done.returncode == 0, done.stderr


def test_sigterm_during_start_up(data: Path, whole: Path, tmp_path: Path) -> None:
    """The other moments are in the soak test below, and in tests/training without a process of their own."""
    interrupt("start-up", data, tmp_path / "run", random.Random(1))
    resume(data, tmp_path / "run")
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.soak
def test_twenty_sigterms_lose_nothing(data: Path, whole: Path, tmp_path: Path) -> None:
    moments, chance, slowest = ("step", "evaluation", "start-up", "data wait", "save"), random.Random(), 0.0
    for number in range(ROUNDS * len(moments)):
        moment, folder = moments[number % len(moments)], tmp_path / f"run-{number}"
        slowest = max(slowest, interrupt(moment, data, folder, chance))
        resume(data, folder)
        assert_same_run(whole, folder)
    record(
        "SIGTERM in a step, evaluation, start-up, data wait and save",
        "20 of 20: no step lost, exit code 143 within 10 s",
        f"20 of 20 resumed bit for bit; the slowest exit took {slowest:.1f} s",
    )
