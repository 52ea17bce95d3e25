"""kill -9 at random moments, some of them inside a save, then resume: the weights of a run that nobody disturbed."""

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
import torch
from safetensors.torch import load_file

from tests.data.pictures import class_folders

SETTINGS = [
    "--model",
    "vit-pico4",
    "--network.width",
    "48",
    "--network.depth",
    "2",
    "--network.heads",
    "3",
    "--image-size",
    "16",
    "--batch-size",
    "8",
    "--epochs",
    "12",
    "--dropout",
    "0.1",
    "--ema",
    "0.9",
    "--optim.name",
    "muon",
    "--optim.lr",
    "2e-3",
    "--mix.mixup",
    "0.3",
    "--augment.crop",
    "resized",
    "--augment.flip",
    "0.5",
    "--save-seconds",
    "0",
    "--device",
    "cpu",
]


def start(*words: str, apart: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vitral", "train", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, env=environment, start_new_session=apart, **pipes)


def finish(*words: str) -> subprocess.CompletedProcess[str]:
    process = start(*words)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("photos"), {"red": 30, "green": 30, "blue": 30}, size=(20, 20))


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    done = finish(str(data), "--out", str(run), *SETTINGS)
    assert done.returncode == 0, done.stderr
    return run


def same(first: Path, second: Path) -> None:
    one, other = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    assert (first / "metrics.csv").read_text() == (second / "metrics.csv").read_text()


def wait_for_a_save(process: subprocess.Popen[str], state: Path) -> None:
    limit = time.monotonic() + 120
    while not list(state.glob("step-*")) and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.01)


def goes_on_to_the_same(process: subprocess.Popen[str], code: int, run: Path, whole: Path) -> None:
    """It ends as its signal says, tells how to go on, and is then the run that nobody disturbed."""
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert f"vitral train --resume {run}" in err
    assert "Traceback" not in err
    done = finish("--resume", str(run))
    assert done.returncode == 0, done.stderr
    same(whole, run)


def test_kill_dash_nine(data: Path, whole: Path, tmp_path: Path) -> None:
    run, moments = tmp_path / "run", random.Random(0)
    process = start(str(data), "--out", str(run), *SETTINGS)
    kills = 0
    while process.poll() is None and kills < 6:
        wait_for_a_save(process, run / "state")
        if kills % 2:  # wait until something is being written
            limit = time.monotonic() + 3
            while not list((run / "state").glob("*.tmp-*")) and time.monotonic() < limit and process.poll() is None:
                pass
        else:
            time.sleep(moments.uniform(0, 0.4))
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            stream.close()  # type: ignore[union-attr]
        kills += 1
        process = start("--resume", str(run))
        if kills < 6:
            time.sleep(moments.uniform(2.0, 4.0))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    same(whole, run)
    resumes = json.loads((run / "manifest.json").read_text())["resumes"]
    assert resumes == sorted(resumes)
    assert not list((run / "state").glob("*.tmp-*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_save_and_say_how_to_go_on(data: Path, whole: Path, tmp_path: Path, number: int, code: int) -> None:
    run = tmp_path / "run"
    process = start(str(data), "--out", str(run), *SETTINGS)
    wait_for_a_save(process, run / "state")
    process.send_signal(number)
    goes_on_to_the_same(process, code, run, whole)


@pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX's")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_all_processes(data: Path, whole: Path, tmp_path: Path, number: int, code: int) -> None:
    """As a terminal and a scheduler send it: also to those that load pictures."""
    run = tmp_path / "run"
    process = start(str(data), "--out", str(run), *SETTINGS, "--workers", "1", apart=True)
    wait_for_a_save(process, run / "state")
    os.killpg(process.pid, number)
    goes_on_to_the_same(process, code, run, whole)


def test_resuming_with_other_words(data: Path, whole: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    done = finish("--resume", str(again))
    assert done.returncode == 0
    assert "finished" in done.stderr
    (again / "report.json").unlink()
    done = finish(str(data), "--resume", str(again), "--batch-size", "16")
    assert done.returncode == 2
    assert "batch_size is 8" in done.stderr
    done = finish(str(data), "--out", str(again), *SETTINGS)
    assert done.returncode == 2
    assert "--resume" in done.stderr
