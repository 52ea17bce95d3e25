"""Run a study: several cells at a time, each in a process of its own.

Finished cells are skipped and interrupted ones resume, so that the same call continues a study that was stopped.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
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
    done: int
    """Jobs that have ended, this one included."""
    total: int
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
    arguments = str(study.path), str(data), out
    outcomes: list[CellOutcome] = []
    page = None
    try:
        with closing(_run_jobs(list(study.jobs()), arguments, jobs=jobs, threads=threads)) as running:
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


@dataclass(kw_only=True, slots=True)
class _Process:
    """A cell that is being trained."""

    job: Job
    process: subprocess.Popen[bytes]
    stderr: IO[bytes]
    started: float

    def error(self) -> str:
        """Return the last line of what the process wrote to standard error."""
        self.stderr.seek(0)
        lines = self.stderr.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.process.returncode}"


def _run_jobs(
    waiting: list[Job], arguments: tuple[str, str, Path], *, jobs: int, threads: int
) -> Generator[CellOutcome, None, None]:
    """Run all jobs and yield their outcomes as they end; stop the processes if the caller does not want the rest."""
    out, total = arguments[2], len(waiting)
    running: list[_Process] = []
    ended: dict[tuple[str, int], CellOutcome] = {}
    try:
        while waiting or running:
            for outcome in _end_jobs(running, out, len(ended), total):
                ended[outcome.cell, outcome.seed] = outcome
                yield outcome
            for job in list(waiting):
                start = None if job.cell.start is None else ended.get((job.cell.start, job.seed))
                if len(running) >= jobs or (job.cell.start is not None and start is None):
                    continue
                waiting.remove(job)
                outcome = _decide(job, start, out, len(ended) + 1, total)
                if outcome is None:
                    running.append(_start(job, arguments, threads))
                    continue
                ended[job.cell.name, job.seed] = outcome
                yield outcome
            time.sleep(POLL_SECONDS if running else 0)
    finally:
        for cell in running:
            cell.process.terminate()  # a run saves its state
        for cell in running:
            cell.process.wait()
            cell.stderr.close()


def _decide(job: Job, start: CellOutcome | None, out: Path, done: int, total: int) -> CellOutcome | None:
    """Return the outcome of a job that needs no training, or None."""

    def outcome(status: Literal["skipped", "failed"], reason: str = "") -> CellOutcome:
        return CellOutcome(cell=job.cell.name, seed=job.seed, status=status, done=done, total=total, reason=reason)

    if start is not None and start.status == "failed":
        return outcome("failed", f"it starts from {start.cell!r}, which failed")
    result = load_result(job.folder(out))
    if result is None:
        return None
    if not job.cell.matches(result):
        return outcome("failed", f"{job.folder(out)} was trained with other settings; delete it to train again")
    if result.get("evaluations", job.cell.evaluations) != job.cell.evaluations:
        return None
    return outcome("skipped")


def _start(job: Job, arguments: tuple[str, str, Path], threads: int) -> _Process:
    path, data, out = arguments
    stderr = TemporaryFile()  # noqa: SIM115 - it is read when the process has ended
    process = subprocess.Popen(
        [sys.executable, "-m", "vitral.studies.cell", path, job.cell.name, str(job.seed), data, str(out)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,  # Ctrl-C reaches the cells once, through _run_jobs
    )
    return _Process(job=job, process=process, stderr=stderr, started=time.perf_counter())


def _end_jobs(running: list[_Process], out: Path, done: int, total: int) -> Iterator[CellOutcome]:
    """Remove the processes that have ended, and yield their outcomes."""
    for cell in [cell for cell in running if cell.process.poll() is not None]:
        running.remove(cell)
        done += 1
        job, seconds = cell.job, time.perf_counter() - cell.started
        result = load_result(job.folder(out)) if cell.process.returncode == 0 else None
        reason = cell.error() if result is None else ""
        cell.stderr.close()
        scores = {} if result is None else {"top-1": result["top1"], **result["scores"]}
        yield CellOutcome(
            cell=job.cell.name,
            seed=job.seed,
            status="failed" if result is None else "finished",
            done=done,
            total=total,
            scores={name: score for name, score in scores.items() if score is not None},
            seconds=seconds,
            reason=reason,
        )
