"""Time on a noisy machine: candidates take turns, in a new order every round, and the fastest turn counts."""

import json
import random
import time
from collections.abc import Callable, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from vitral.inference.engines.fingerprint import describe_cpu

RESULTS = Path(__file__).parent / "results"


def fastest_turns(candidates: Mapping[str, Callable[[], Any]], rounds: int, seed: int = 0) -> dict[str, float]:
    """Return the seconds of the fastest turn of each candidate."""
    order, shuffle = list(candidates), random.Random(seed)
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            start = time.perf_counter()
            candidates[name]()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def describe_machine(*packages: str) -> dict[str, Any]:
    """Return the date, the CPU with the instructions that decide which precision is fast, and the versions."""
    return {
        "date": date.today().isoformat(),
        **describe_cpu(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", *packages)},
    }


def save(name: str, machine: dict[str, Any], rows: list[dict[str, Any]], key: tuple[str, ...] = ()) -> None:
    """Write today's results. With a key, rows of an earlier run today are kept unless they are measured again."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{machine['date']}.json"
    if key and path.exists():
        earlier = json.loads(path.read_text())["rows"]
        measured = {tuple(row[field] for field in key) for row in rows}
        rows = [row for row in earlier if tuple(row[field] for field in key) not in measured] + rows
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
