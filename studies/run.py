"""Runs a study, two cells at a time on one core each; what is finished is not done again, and a cell that was
interrupted goes on where it was.

    python -m studies.run positions DATA --place runs/studies
    python -m studies.run all DATA --place runs/studies
    python -m studies.run positions --report --place runs/studies     # the table and the plot, of what there is
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import vitral
from studies.plan import Job, Study, names, read_study
from studies.report import write_report
from vitral.data.sources import open_dataset
from vitral.training.config import with_settings


def run_job(job: Job, data: str, place: Path, threads: int, before: "Future[str] | None") -> str:
    """One cell in a process of its own, after the one that it begins with; study.json says that it is finished."""
    if before is not None and before.result().startswith("failed"):
        return f"failed: it begins with {job.cell.start!r}, which failed"
    result = job.folder(place) / "study.json"
    if result.is_file():
        was = json.loads(result.read_text(encoding="utf-8"))
        if not job.cell.was_trained_so(was):
            return f"failed: {result.parent} has other settings; remove it"
        if was.get("evaluations", job.cell.evaluations) == job.cell.evaluations:
            return "was there"
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    words = [job.study, job.cell.name, str(job.seed), data, str(place)]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "studies.cell", *words],
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        return f"failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}"
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    scores = {"top-1": found["top1"], **found["others"]}
    told = ", ".join(f"{name} {100 * value:.2f} %" for name, value in scores.items() if value is not None)
    return f"{told} after {(time.perf_counter() - start) / 60:.1f} minutes"


def run_jobs(jobs: list[Job], data: str, place: Path, *, at_a_time: int, threads: int) -> int:
    """How many failed."""
    with ThreadPoolExecutor(at_a_time) as pool:
        running: dict[tuple[str, str, int], Future[str]] = {}
        for job in jobs:
            before = running.get((job.study, job.cell.start or "", job.seed))
            running[job.study, job.cell.name, job.seed] = pool.submit(run_job, job, data, place, threads, before)
        try:
            for number, ((study, cell, seed), future) in enumerate(running.items(), 1):
                print(f"[{number}/{len(jobs)}] {study}: {cell}, seed {seed}: {future.result()}", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            sys.exit("Interrupted; the same command goes on.")
        return sum(future.result().startswith("failed") for future in running.values())


def check_settings(study: Study) -> None:
    """Every cell, before the first is begun."""
    for cell in study.cells:
        with_settings(None, {"data": "", **cell.settings}, f"{study.name}.toml, {cell.name!r}")


def keep_to_one_data(place: Path, fingerprint: str) -> None:
    """What is finished is not done again, so a place must not mix the runs of two."""
    mark = place / "data.sha256"
    if mark.is_file() and mark.read_text(encoding="utf-8") != fingerprint:
        raise vitral.DataError(f"{place} holds runs on other data than these.", hint="Give another --place.")
    place.mkdir(parents=True, exist_ok=True)
    mark.write_text(fingerprint, encoding="utf-8")


def at_least_one(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} must be a whole number of at least 1")
    return int(word)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=[*names(), "all"])
    parser.add_argument("data", nargs="?", help="CIFAR-10, as anything that vitral reads")
    parser.add_argument("--place", type=Path, default=Path("runs/studies"), help="where the runs are kept: %(default)s")
    parser.add_argument("--out", type=Path, help="where the pages go: PLACE/results; those of vitral: docs/results")
    parser.add_argument("--jobs", type=at_least_one, default=2, help="cells at a time: %(default)s")
    parser.add_argument("--threads", type=at_least_one, default=1, help="cores of each: %(default)s")
    parser.add_argument("--report", action="store_true", help="only write the pages from what is there")
    options = parser.parse_args()
    chosen = names() if options.study == "all" else [options.study]
    failed = 0
    if not options.report:
        if options.data is None:
            parser.error("the data are missing: CIFAR-10, as anything that vitral reads")
        try:
            keep_to_one_data(options.place, open_dataset(options.data).fingerprint())
            for name in chosen:
                check_settings(read_study(name))
        except vitral.VitralError as error:
            parser.error(str(error))
        jobs = [job for name in chosen for job in read_study(name).jobs()]
        jobs.sort(key=lambda job: job.cell.start is not None)  # one that waits for another would keep a core idle
        failed = run_jobs(jobs, options.data, options.place, at_a_time=options.jobs, threads=options.threads)
    for name in chosen:
        if any((options.place / name).glob("*/study.json")):
            print(write_report(read_study(name), options.place, options.out or options.place / "results"))
        else:
            print(f"There are no results of {name} in {options.place}; its page stays as it is.", file=sys.stderr)
            failed += 1
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
