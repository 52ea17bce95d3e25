"""Run a study: several cells at a time, each in a process of its own.

Finished cells are skipped and interrupted ones resume, so that the same call continues a study that was stopped.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Literal

from vitral.errors import DataError, check_int
from vitral.files import write_text
from vitral.studies.images import open_with_test_split
from vitral.studies.page import check_page, write_page
from vitral.studies.spec import RESULT, Job, load_result, read_study

POLL_SECONDS = 0.1
MAX_JOBS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class CellOutcome:
    """How one cell with one seed ended."""

    cell: str
    seed: int
    status: Literal["finished", "skipped", "failed"]
    done: int = 0
    """Jobs that have ended, this one included."""
    total: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    """Test accuracies from 0 to 1: top-1, and the further evaluations by name."""
    seconds: float = 0.0
    reason: str = ""
    """Why it failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyResult:
    """A study that has ended."""

    page: Path | None
    """The page with the table and the plot; None if no cell has finished."""
    outcomes: tuple[CellOutcome, ...]

    @property
    def failed(self) -> tuple[CellOutcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.status == "failed")

    def as_dict(self) -> dict[str, Any]:
        page = None if self.page is None else str(self.page)
        return {"page": page, "cells": [asdict(outcome) for outcome in self.outcomes]}


def run_study(
    file: str | Path,
    data: str | Path,
    *,
    out: str | Path = "runs/studies",
    results: str | Path | None = None,
    seeds: Sequence[int] | None = None,
    jobs: int = 2,
    threads: int = 1,
    on_cell: Callable[[CellOutcome], None] = lambda outcome: None,
) -> StudyResult:
    """Train and evaluate every cell of a study, and write a page with the results.

    ``file`` is a TOML file or the name of a shipped study. Runs go to ``out``, the page to ``results`` (by default
    ``out/results``). ``seeds`` replaces those of the file. ``jobs`` cells are trained at a time with ``threads``
    threads each. ``on_cell`` is called after each of them.
    """
    study = read_study(file, None if seeds is None else tuple(seeds))
    out = Path(out)
    results = out / "results" if results is None else Path(results)
    check_int("jobs", jobs, minimum=1, maximum=MAX_JOBS)
    check_int("threads", threads, minimum=1, maximum=MAX_JOBS)
    check_page(study, results)
    claim_folder(out, open_with_test_split(data).fingerprint())

    def start(job: Job) -> _Process:
        return _Process(job, [str(study.path), job.cell.name, str(job.seed), str(data), str(out)], threads)

    outcomes: list[CellOutcome] = []
    page = None
    try:
        with closing(_run_jobs(list(study.jobs()), start, out, jobs)) as running:
            for outcome in running:
                outcomes.append(outcome)
                on_cell(outcome)
    finally:  # an interrupted study has a page, too
        if any((out / study.name).glob(f"*/{RESULT}")):
            page = write_page(study, out, results)
    return StudyResult(page=page, outcomes=tuple(outcomes))


def claim_folder(out: Path, fingerprint: str) -> None:
    """Raise DataError if the folder has runs on another dataset: finished cells are not trained again."""
    path = out / "data.sha256"
    if path.is_file() and path.read_text(encoding="utf-8") != fingerprint:
        raise DataError(f"{out} has runs on another dataset.", hint="Pass another --out.")
    write_text(path, fingerprint)


class _Process:
    """A cell that is being trained in a process of its own."""

    def __init__(self, job: Job, arguments: list[str], threads: int):
        self.job = job
        self.started = time.perf_counter()
        self.stderr: IO[bytes] = TemporaryFile()  # noqa: SIM115 - it is read when the process has ended
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vitral.studies.cell", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.stderr,
            start_new_session=True,  # Ctrl-C reaches the cells once, through _run_jobs
        )

    def outcome(self, out: Path) -> CellOutcome:
        """Return how the process ended; the reason of a failure is the last line of its standard error."""
        cell, seed, seconds = self.job.cell.name, self.job.seed, time.perf_counter() - self.started
        code = self.process.returncode
        self.stderr.seek(0)
        with self.stderr:
            lines = self.stderr.read().decode("utf-8", "replace").strip().splitlines()
        result = load_result(self.job.folder(out)) if code == 0 else None
        if result is None:
            reason = lines[-1] if lines else f"exit code {code}"
            return CellOutcome(cell=cell, seed=seed, status="failed", seconds=seconds, reason=reason)
        scores = {"top-1": result["top1"], **result["scores"]}
        scores = {name: score for name, score in scores.items() if score is not None}
        return CellOutcome(cell=cell, seed=seed, status="finished", seconds=seconds, scores=scores)


def _run_jobs(
    waiting: list[Job], start: Callable[[Job], _Process], out: Path, jobs: int
) -> Generator[CellOutcome, None, None]:
    """Run all jobs and yield their outcomes as they end; stop the processes if the caller does not want the rest."""
    total = len(waiting)
    running: list[_Process] = []
    ended: dict[tuple[str | None, int], CellOutcome] = {}

    def record(outcome: CellOutcome) -> CellOutcome:
        outcome = replace(outcome, done=len(ended) + 1, total=total)
        ended[outcome.cell, outcome.seed] = outcome
        return outcome

    try:
        while waiting or running:
            for cell in [cell for cell in running if cell.process.poll() is not None]:
                running.remove(cell)
                yield record(cell.outcome(out))
            for job in list(waiting):
                origin = ended.get((job.cell.start, job.seed))
                if len(running) >= jobs or (job.cell.start is not None and origin is None):
                    continue
                waiting.remove(job)
                if outcome := _outcome_without_training(job, origin, out):
                    yield record(outcome)
                else:
                    running.append(start(job))
            time.sleep(POLL_SECONDS if running else 0)
    finally:
        for cell in running:
            cell.process.terminate()  # a run saves its state
        for cell in running:
            cell.process.wait()
            cell.stderr.close()


def _outcome_without_training(job: Job, origin: CellOutcome | None, out: Path) -> CellOutcome | None:
    """Return the outcome of a job that is finished, or cannot run, or None; ``origin`` is that of its start."""
    name, seed, result = job.cell.name, job.seed, load_result(job.folder(out))
    if origin is not None and origin.status == "failed":
        reason = f"it starts from {origin.cell!r}, which failed"
    elif result is None:
        return None
    elif not job.cell.matches(result):
        reason = f"{job.folder(out)} was trained with other settings; delete it to train again"
    elif result.get("evaluations", job.cell.evaluations) != job.cell.evaluations:
        return None
    else:
        return CellOutcome(cell=name, seed=seed, status="skipped")
    return CellOutcome(cell=name, seed=seed, status="failed", reason=reason)
