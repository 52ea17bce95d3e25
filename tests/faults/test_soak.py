"""Kill short runs fifty times with kill -9, at random moments: while they start, train, and save.

Too long for every day, so it runs by itself:

    python -m pytest -m soak -s tests/faults/test_soak.py          # about six minutes on 2 cores
"""

import json
import random
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.figures import record
from tests.faults.test_killed_runs import assert_same_run, run, start
from tests.training.short_runs import assert_equal
from vitral.training.state import load_state

KILLS, KILLS_PER_RUN = 50, 10
OPTIONS = (
    "builtin:digits --model vit-pico7 --network.width 48 --network.depth 2 --network.heads 3 --batch-size 64 "
    "--epochs 3 --dropout 0.1 --ema 0.9 --optim.name muon --optim.lr 2e-3 --mix.mixup 0.3 --augment.crop resized "
    "--save-seconds 0 --device cpu"
)
MOMENTS = ("starting", "saving", "training", "saving", "training")


def newest_state(folder: Path) -> str:
    return max((path.name for path in (folder / "state").glob("step-*") if ".tmp-" not in path.name), default="")


def partial_states(folder: Path) -> list[Path]:
    """Return the states that are being written, or were when the process ended."""
    return list((folder / "state").glob("step-*.tmp-*"))


def wait_for(process: subprocess.Popen[str], moment: str, folder: Path, moments: random.Random) -> None:
    """Wait for a moment, or until the run ends before it."""
    if moment == "starting":
        time.sleep(moments.uniform(0, 4))
        return
    before = newest_state(folder)
    while process.poll() is None and newest_state(folder) == before:
        time.sleep(0.002)
    if moment == "training":
        time.sleep(moments.uniform(0, 1.5))
        return
    earliest = time.monotonic() + moments.uniform(0, 1)
    while process.poll() is None and not (time.monotonic() > earliest and partial_states(folder)):
        pass


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.soak
def test_fifty_kills_leave_no_trace(tmp_path: Path) -> None:
    seed = time.time_ns()
    moments = random.Random(seed)
    whole = tmp_path / "whole"
    done = run(*OPTIONS.split(), "--out", str(whole))
    assert done.returncode == 0, done.stderr
    kills, inside, runs, resumed = Counter[str](), 0, 0, 0
    while sum(kills.values()) < KILLS:
        folder, until = tmp_path / f"run-{runs}", min(KILLS, sum(kills.values()) + KILLS_PER_RUN)
        runs += 1
        process = start(*OPTIONS.split(), "--out", str(folder))
        while process.poll() is None and sum(kills.values()) < until:
            moment = MOMENTS[sum(kills.values()) % len(MOMENTS)]
            wait_for(process, moment, folder, moments)
            if process.poll() is not None:
                break
            kill(process)
            kills[moment] += 1
            inside += bool(partial_states(folder))
            has_started = (folder / "config.toml").exists()
            process = start(*(["--resume", str(folder)] if has_started else [*OPTIONS.split(), "--out", str(folder)]))
        _, err = process.communicate(timeout=600)
        assert process.returncode == 0, f"seed {seed}, {folder}: {err}"
        assert_equal_runs(whole, folder)
        resumed += len(json.loads((folder / "manifest.json").read_text())["resumes"])
    print(
        f"\nseed {seed}: {runs} runs, kills {dict(kills)}, {inside} inside a save, {resumed} resumes, all bit for bit"
    )
    assert sum(kills.values()) == KILLS
    assert inside >= KILLS // 5, f"only {inside} kills were inside a save"
    record(
        "kill -9 of a run at random moments",
        "50 of 50 bit-equal, at least 10 kills inside a save",
        f"{KILLS} of {KILLS} in {runs} runs, {inside} kills inside a save",
    )


@pytest.mark.soak
def test_three_runs_are_equal(tmp_path: Path) -> None:
    folders = [tmp_path / f"run-{number}" for number in range(3)]
    for folder in folders:
        process = start(*OPTIONS.split(), "--out", str(folder))
        _, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        assert_equal_runs(folders[0], folder)
    record(
        "Two runs with the same seed and threads",
        "bit-equal, 3 runs",
        "3 of 3 bit-equal: weights, moments, averages, metrics and scores",
    )


def assert_equal_runs(whole: Path, folder: Path) -> None:
    """Assert the same weights, moments, averages, metrics and scores."""
    assert_same_run(whole, folder)
    first, second = load_state(whole / "state"), load_state(folder / "state")
    assert first is not None
    assert second is not None
    assert first[0].step == second[0].step
    assert_equal(first[1], second[1])
    scores = [json.loads((run / "report.json").read_text())["test"] for run in (whole, folder)]
    for values in scores:
        values.pop("images_per_second", None)
    assert scores[0] == scores[1]
    assert not partial_states(folder), "the remains of a killed save were not removed"
