"""Record what a fault test reached, for the table on the reliability page (`python -m benchmarks.reliability`)."""

import json
from datetime import date

import torch

from benchmarks.reliability import RESULTS, cpu_name


def record(fault: str, goal: str, reached: str) -> None:
    """Write a row of the table, in place of an earlier one of the same fault."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    machine = f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"
    rows[fault] = {"goal": goal, "reached": reached, "date": date.today().isoformat(), "cpu": machine}
    RESULTS.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    print(f"{fault}: {reached}")
