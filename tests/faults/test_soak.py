"""Fifty times kill -9, at random moments of short runs: while starting, while learning, and inside a save. Too long for
every day, so it is run by itself:

    python -m pytest -m soak -s tests/faults/test_soak.py          # about five minutes on 2 cores
"""

import json
import random
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.faults.test_killed_runs import finish, same, start
from vitral.training.state import load_state

KILLS, EACH = 50, 10
WORDS = (
    "builtin:digits --model vit-pico7 --network.width 48 --network.depth 2 --network.heads 3 --batch-size 64 "
    "--epochs 3 --dropout 0.1 --ema 0.9 --optim.name muon --optim.lr 2e-3 --mix.mixup 0.3 --augment.crop resized "
    "--save-seconds 0 --device cpu"
)
MOMENTS = ("starting", "saving", "learning", "saving", "learning")


def newest(run: Path) -> str:
    return max((path.name for path in (run / "state").glob("step-*") if ".tmp-" not in path.name), default="")


def unfinished(run: Path) -> list[Path]:
    """States that are being written, or were when the process ended."""
    return list((run / "state").glob("step-*.tmp-*"))


def wait_for(process: subprocess.Popen[str], what: str, run: Path, moments: random.Random) -> None:
    """Until the moment has come, or the run has ended before it."""
    if what == "starting":
        time.sleep(moments.uniform(0, 4))
        return
    before = newest(run)
    while process.poll() is None and newest(run) == before:
        time.sleep(0.002)
    if what == "learning":
        time.sleep(moments.uniform(0, 1.5))
        return
    wanted = time.monotonic() + moments.uniform(0, 1)
    while process.poll() is None and not (time.monotonic() > wanted and unfinished(run)):
        pass


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.soak
def test_fifty_kills_leave_no_trace(tmp_path: Path) -> None:
    seed = time.time_ns()
    moments = random.Random(seed)
    whole = tmp_path / "whole"
    done = finish(*WORDS.split(), "--out", str(whole))
    assert done.returncode == 0, done.stderr
    kills, inside, runs, resumed = Counter[str](), 0, 0, 0
    while sum(kills.values()) < KILLS:
        run, until = tmp_path / f"run-{runs}", min(KILLS, sum(kills.values()) + EACH)
        runs += 1
        process = start(*WORDS.split(), "--out", str(run))
        while process.poll() is None and sum(kills.values()) < until:
            what = MOMENTS[sum(kills.values()) % len(MOMENTS)]
            wait_for(process, what, run, moments)
            if process.poll() is not None:
                break
            end(process)
            kills[what] += 1
            inside += bool(unfinished(run))
            again = ["--resume", str(run)] if (run / "config.toml").exists() else [*WORDS.split(), "--out", str(run)]
            process = start(*again)
        _, err = process.communicate(timeout=600)
        assert process.returncode == 0, f"seed {seed}, {run}: {err}"
        compare(whole, run)
        resumed += len(json.loads((run / "manifest.json").read_text())["resumes"])
    print(
        f"\nseed {seed}: {runs} runs, kills {dict(kills)}, {inside} inside a save, {resumed} resumes, all bit for bit"
    )
    assert sum(kills.values()) == KILLS
    assert inside >= KILLS // 5, f"only {inside} kills were inside a save"


def compare(whole: Path, run: Path) -> None:
    """Weights, moments, averages, metrics and scores."""
    same(whole, run)
    (first, _), (second, _) = load_state(whole / "state"), load_state(run / "state")
    assert first is not None
    assert second is not None
    assert first.step == second.step
    assert first.tensors.keys() == second.tensors.keys()
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, second.tensors[name]), name
    reports = [json.loads((folder / "report.json").read_text())["test"] for folder in (whole, run)]
    for report in reports:
        report.pop("images_per_second", None)
    assert reports[0] == reports[1]
    assert not unfinished(run), "what a killed save left behind was not cleared away"
