"""kill -9 at random moments, some of them inside a save, then resume: the weights equal those of an undisturbed run."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.typed import Done, typed
from tests.data.images import class_folders
from tests.training.short_runs import assert_equal, read_weights

SETTINGS = (
    "--model vit-pico4 --network.width 48 --network.depth 2 --network.heads 3 --image-size 16 --batch-size 8 "
    "--epochs 8 --dropout 0.1 --ema 0.9 --optim.name muon --optim.lr 2e-3 --mix.mixup 0.3 --augment.crop resized "
    "--augment.flip 0.5 --save-seconds 0 --device cpu"
)


def start(*words: str, new_session: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vitral", "train", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, env=environment, start_new_session=new_session, **pipes)


def run(*words: str) -> Done:
    """Train in this process, which has already imported everything. Only runs that are killed need their own."""
    return typed("train", *words)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("photos"), {"red": 30, "green": 30, "blue": 30}, size=(20, 20))


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    done = run(str(data), "--out", str(folder), *SETTINGS.split())
    assert done.returncode == 0, done.stderr
    return folder


def assert_same_run(first: Path, second: Path) -> None:
    assert_equal(read_weights(first), read_weights(second))
    assert (first / "metrics.csv").read_text() == (second / "metrics.csv").read_text()


def wait_for_save(process: subprocess.Popen[str], state: Path) -> None:
    limit = time.monotonic() + 120
    while not list(state.glob("step-*")) and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.01)


def assert_resumes(process: subprocess.Popen[str], code: int, folder: Path, whole: Path) -> None:
    """Assert the exit code of a signal, the command that resumes the run, and the same run after it."""
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert f"vitral train --resume {folder}" in err
    assert "Traceback" not in err
    done = run("--resume", str(folder))
    assert done.returncode == 0, done.stderr
    assert_same_run(whole, folder)


def test_kill_dash_nine(data: Path, whole: Path, tmp_path: Path) -> None:
    folder, moments = tmp_path / "run", random.Random(0)
    for kill in range(3):
        words = ["--resume", str(folder)] if kill else [str(data), "--out", str(folder), *SETTINGS.split()]
        with start(*words) as process:
            if kill:
                time.sleep(moments.uniform(2.0, 4.0))
            wait_for_save(process, folder / "state")
            if kill % 2:  # wait for a save to start
                limit = time.monotonic() + 3
                while not list((folder / "state").glob("*.tmp-*")) and time.monotonic() < limit:
                    time.sleep(0.0005)
            else:
                time.sleep(moments.uniform(0, 0.4))
            process.kill()
    done = run("--resume", str(folder))
    assert done.returncode == 0, done.stderr
    assert_same_run(whole, folder)
    resumes = json.loads((folder / "manifest.json").read_text())["resumes"]
    assert resumes
    assert resumes == sorted(resumes)
    assert not list((folder / "state").glob("*.tmp-*"))


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX process groups")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_state_and_prints_how_to_resume(
    data: Path, whole: Path, tmp_path: Path, number: int, code: int
) -> None:
    """A terminal and a scheduler send it to the processes that load images, too."""
    folder = tmp_path / "run"
    process = start(str(data), "--out", str(folder), *SETTINGS.split(), "--workers", "1", new_session=True)
    wait_for_save(process, folder / "state")
    os.killpg(process.pid, number)
    assert_resumes(process, code, folder, whole)


def test_resuming_with_other_options(data: Path, whole: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    done = run("--resume", str(again))
    assert done.returncode == 0
    assert "finished" in done.stderr
    (again / "report.json").unlink()
    done = run(str(data), "--resume", str(again), "--batch-size", "16")
    assert done.returncode == 2
    assert "batch_size=8" in done.stderr
    done = run(str(data), "--out", str(again), *SETTINGS.split())
    assert done.returncode == 2
    assert "--resume" in done.stderr
