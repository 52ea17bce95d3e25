"""`vitral bench` compares outputs before it times anything. Tests assert agreement, never time."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.typed import typed
from vitral import benchmarking
from vitral.benchmarking import BenchResult, BenchStep, bench_events
from vitral.errors import ConfigError, WeightsError
from vitral.inference.engines.choosing import Subject


def run_alone(check: Callable[[], None]) -> None:
    """Run a check in a process of its own, as users do: it loads the runtimes of four libraries into one process."""
    code = f"from tests.test_benchmarking import {check.__name__}; {check.__name__}()"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")


def test_engines_and_other_libraries_agree() -> None:
    run_alone(check_agreement)


def test_a_library_that_fails_is_skipped_with_the_reason() -> None:
    run_alone(check_skipping)


def check_agreement() -> None:
    events = list(bench_events("vit-pico7", against=("timm", "transformers"), batch_sizes=(1, 3), seconds=0.01))
    result = events[-1]
    assert isinstance(result, BenchResult)
    assert not result.skipped
    names = {"torch float32", "onnxruntime float32", "openvino float32", "timm", "transformers"}
    for batch in (1, 3):
        rows = [row for row in result.rows if row.batch == batch]
        assert names <= {row.name for row in rows}
        for row in rows:
            tolerance = 1e-4 if "16" not in row.name else 0.02
            assert row.difference < tolerance, row
            assert row.p50_milliseconds <= row.p99_milliseconds
            assert row.images_per_second > 0
    assert {start.name for start in result.cold_starts} == {row.name for row in result.rows}
    for start in result.cold_starts:
        assert start.seconds > 0
        assert start.memory_bytes is None or start.memory_bytes > 50 * 2**20  # torch or a runtime
    steps = [event for event in events if isinstance(event, BenchStep)]
    assert [step.done for step in steps] == list(range(1, steps[-1].total + 1))


def check_skipping() -> None:
    def fail(subject: Subject) -> None:
        raise RuntimeError("no such kernel")

    vars(benchmarking)["_NETWORKS"]["timm"] = fail
    vars(benchmarking)["ENGINES"] = ("torch",)
    *_, result = bench_events("vit-pico7", against=("timm",), batch_sizes=(1,), seconds=0.01)
    assert isinstance(result, BenchResult)
    assert result.skipped == {"timm": "no such kernel"}
    assert {row.name.split()[0] for row in result.rows} == {"torch"}


def test_the_peak_memory_is_that_of_the_process_alone() -> None:
    done = vars(benchmarking)["_run_process"]("import sys", [])
    assert done.memory_bytes is None or 2**20 < done.memory_bytes < 50 * 2**20  # this process holds torch


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        ({"against": ("keras",)}, ConfigError, "against"),
        ({"batch_sizes": (0,)}, ConfigError, "batch_size"),
        ({"seconds": 0}, ConfigError, "seconds"),
        ({"model": "none.safetensors"}, WeightsError, "none.safetensors"),
    ],
)
def test_wrong_options_raise_before_any_work(options: dict[str, Any], error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem):
        next(bench_events(**options))


def test_the_command_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarking, "ENGINES", ("torch",))
    done = typed("bench", "--model", "vit-pico7", "--batch-sizes", "2", "--seconds", "0.01", "--format", "json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {row["batch"] for row in result["rows"]} == {2}
    assert {"cpu", "instructions", "threads", "versions"} <= result["machine"].keys()
    human = typed("bench", "--model", "vit-pico7", "--batch-sizes", "2", "--seconds", "0.01")
    assert "torch float32" in human.stdout
    assert "cold start" in human.stdout
