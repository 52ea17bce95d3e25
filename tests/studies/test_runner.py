"""A study runs from any TOML, continues after a kill, and reports what failed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import vitral
from tests.cli.typed import typed
from vitral.runs import Run
from vitral.studies.runner import CellOutcome, claim_folder

STUDY = """
title = "Mine"
seeds = [0]

[base]
model = "vit-pico7"
image_size = 28
network.depth = 1
steps = {steps}
batch_size = 32
save_seconds = 0.2

[[cells]]
name = "first"

[[cells]]
name = "then"
start = "first"
evaluations = {{"3-NN" = {{knn = 3}}}}
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(STUDY.format(steps=3))
    return path


def test_a_study_continues_after_an_interrupt_and_is_then_skipped(study: Path, digits: Path, tmp_path: Path) -> None:
    def interrupt(_: CellOutcome) -> None:
        raise KeyboardInterrupt

    out, page = tmp_path / "out", tmp_path / "out" / "results" / "mine.md"
    with pytest.raises(KeyboardInterrupt):
        vitral.run_study(study, digits, out=out, on_cell=interrupt)
    assert "| then | not run yet |" in page.read_text()
    seen: list[CellOutcome] = []
    result = vitral.run_study(study, digits, out=out, on_cell=seen.append)
    assert [(outcome.cell, outcome.status) for outcome in seen] == [("first", "skipped"), ("then", "finished")]
    assert [(outcome.done, outcome.total) for outcome in seen] == [(1, 2), (2, 2)]
    assert seen[1].scores.keys() == {"top-1", "3-NN"}
    assert (result.page, result.failed) == (page, ())
    assert "One seed per cell." in page.read_text()
    again = vitral.run_study(study, digits, out=out, results=tmp_path / "pages", seeds=[0])
    assert {outcome.status for outcome in again.outcomes} == {"skipped"}
    assert (tmp_path / "pages" / "mine.md").is_file()
    study.write_text(STUDY.format(steps=4))
    changed = vitral.run_study(study, digits, out=out)
    assert [outcome.status for outcome in changed.outcomes] == ["failed", "failed"]
    assert "other settings" in changed.failed[0].reason
    assert "'first', which failed" in changed.failed[1].reason


def first_cell_only(steps: int) -> str:
    return STUDY.format(steps=steps).partition('[[cells]]\nname = "then"')[0]


def test_the_command(study: Path, digits: Path, tmp_path: Path) -> None:
    study.write_text(first_cell_only(steps=3))
    arguments = ["study", str(study), str(digits), "--out", str(tmp_path / "out"), "--results", str(tmp_path / "pages")]
    done = typed(*arguments, "--seeds", "7")
    assert done.returncode == 0, done.stderr
    assert "[1/1] first, seed 7: top-1" in done.stdout
    assert done.stdout.endswith(f"{tmp_path / 'pages' / 'mine.md'}\n")
    assert json.loads((tmp_path / "pages" / "mine.json").read_text())["cells"]["first"][0]["seed"] == 7
    skipped = json.loads(typed(*arguments, "--seeds", "7", "--format", "json").stdout)
    assert [cell["status"] for cell in skipped["cells"]] == ["skipped"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_study_resumes(number: signal.Signals, study: Path, digits: Path, tmp_path: Path) -> None:
    study.write_text(first_cell_only(steps=80))
    out = tmp_path / "out"
    run = out / "mine" / "first-seed0"
    command = [sys.executable, "-m", "vitral", "study", str(study), str(digits), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    wait_for_epochs(run / "metrics.csv", process)
    os.kill(process.pid, number)
    assert process.wait(timeout=60) == {signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}[number]
    wait_until_unlocked(run)  # a cell whose study was killed ends by itself
    assert not (run / "report.json").is_file()
    (outcome,) = vitral.run_study(study, digits, out=out).outcomes
    assert (outcome.status, outcome.reason) == ("finished", "")
    (resumed_at,) = json.loads((run / "manifest.json").read_text())["resumes"]
    assert 0 < resumed_at < 80


def wait_for_epochs(metrics: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 100
    while not metrics.is_file() or metrics.read_text().count("\n") < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)


def wait_until_unlocked(folder: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            with Run.open(folder).claim():
                return
        except vitral.ConfigError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_folder_keeps_to_one_dataset(tmp_path: Path) -> None:
    claim_folder(tmp_path / "runs", "one")
    claim_folder(tmp_path / "runs", "one")
    with pytest.raises(vitral.DataError, match="another dataset"):
        claim_folder(tmp_path / "runs", "another")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("axial", "DATA"),
        ("axial /nowhere", "/nowhere"),
        ("axail builtin:digits", "Did you mean 'axial'"),
        ("nowhere.toml builtin:digits", "nowhere.toml does not exist"),
        ("axial builtin:digits --jobs 0", "jobs"),
        ("axial builtin:digits --threads two", "threads"),
        ("axial builtin:digits --seeds -1", "seed"),
    ],
)
def test_wrong_use_exits_with_2(arguments: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = typed("study", *arguments.split())
    assert done.returncode == 2
    assert reason in done.stderr
    assert list(tmp_path.iterdir()) == []
