"""Time on a noisy machine: candidates take turns, in a new order every round, and the fastest turn counts."""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
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


MAX_OTHER_LOAD = 0.05
"""A turn is repeated if other programs use more of the processor than this."""


def undisturbed(measure: Callable[[], Any], *, tries: int = 3) -> Any:
    """Return the result of a measurement that other programs did not disturb; of the last try if they never stop."""
    start, before = time.perf_counter(), _other_seconds()
    result = measure()
    load = (_other_seconds() - before) / (time.perf_counter() - start) / (os.cpu_count() or 1)
    if load <= MAX_OTHER_LOAD:
        return result
    print(f"other programs used {load:.0%} of the processor", file=sys.stderr)
    return undisturbed(measure, tries=tries - 1) if tries > 1 else result


def _other_seconds() -> float:
    """Return the CPU seconds of all programs but this one and its children. Zero where there is no /proc."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, *others = map(int, stat.read_text().splitlines()[0].split()[1:9])
    own_ticks, children = 0, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append((int(path.parent.name), sum(map(int, fields[11:15]))))
    waiting = [(os.getpid(), 0)]
    while waiting:
        pid, ticks = waiting.pop()
        own_ticks += ticks
        waiting += children.get(pid, [])
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + sum(others) - own_ticks) / ticks_per_second - sum(os.times()[:4])


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
