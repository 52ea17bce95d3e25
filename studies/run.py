"""Runs a study, two cells at a time on one core each; what is finished is not done again, and a cell that was
interrupted goes on where it was.

    python -m studies.run positions SHARDS --place runs/studies
    python -m studies.run --all SHARDS --place runs/studies
    python -m studies.run positions --report --place runs/studies     # the table and the plot, of what there is
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from studies.plan import Job, names, read_study
from studies.report import write_report


def run_job(job: Job, data: str, place: Path, threads: int) -> str:
    """One cell in a process of its own; its report.json says that it is finished."""
    folder = job.folder(place)
    result = folder / "study.json"
    if result.is_file():
        return "was there"
    told = json.dumps({"cell": job.cell.name, "settings": job.cell.settings, "evaluations": job.cell.evaluations})
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "studies.cell", data, str(folder), str(job.seed), told]
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}"
    found: dict[str, Any] = json.loads(result.read_text())
    return f"{100 * found['top1']:.2f} % after {(time.perf_counter() - start) / 60:.1f} minutes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", choices=names(), help=", ".join(names()))
    parser.add_argument("data", nargs="?", help="CIFAR-10 as tar shards")
    parser.add_argument("--all", action="store_true", help="every study, one after the other")
    parser.add_argument("--place", type=Path, default=Path("runs/studies"), help="where the runs are kept")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time")
    parser.add_argument("--threads", type=int, default=1, help="cores of each")
    parser.add_argument("--report", action="store_true", help="only write docs/results from what is there")
    options = parser.parse_args()
    if options.all and options.data is None:
        options.data, options.study = options.study, None
    chosen: list[str] = names() if options.all else [str(options.study)]
    if not options.report:
        if options.data is None:
            parser.error("the data are missing: CIFAR-10 as tar shards")
        jobs = [job for name in chosen for job in read_study(name).jobs()]
        with ThreadPoolExecutor(options.jobs) as pool:
            running = {job: pool.submit(run_job, job, options.data, options.place, options.threads) for job in jobs}
            for number, (job, future) in enumerate(running.items(), 1):
                told = future.result()
                print(f"[{number}/{len(jobs)}] {job.study}: {job.cell.name}, seed {job.seed}: {told}", flush=True)
    for name in chosen:
        write_report(read_study(name), options.place)


if __name__ == "__main__":
    main()
