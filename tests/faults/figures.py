"""Record what a fault test reached, for the table on the reliability page (`python -m benchmarks.reliability`)."""

import json
import time
from datetime import date

import torch

from benchmarks.reliability import RESULTS, cpu_name
from vitral.files import try_lock


def record(fault: str, goal: str, reached: str) -> None:
    """Write a row of the table, in place of an earlier one of the same fault. Tests that run in parallel take turns."""
    machine = f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"
    with RESULTS.open("r+", encoding="utf-8") as stream:
        while not try_lock(stream.fileno()):
            time.sleep(0.01)
        rows = json.load(stream)
        rows[fault] = {"goal": goal, "reached": reached, "date": date.today().isoformat(), "cpu": machine}
        stream.seek(0)
        stream.write(json.dumps(rows, indent=2) + "\n")
        stream.truncate()
    print(f"{fault}: {reached}")
