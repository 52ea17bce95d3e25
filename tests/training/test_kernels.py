"""Products, threads and compiling are chosen by measurement, recorded, and repeated when a run resumes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import vitral
from vitral.training import kernels
from vitral.training.entry import read_run_settings
from vitral.training.events import Chosen
from vitral.training.kernels import choose_kernels, repeat_kernels


@dataclass
class FakeTask:
    is_compiled: bool = False

    def compile_network(self, is_compiled: bool) -> None:
        self.is_compiled = is_compiled


@dataclass
class FakeLearner:
    task: FakeTask = field(default_factory=FakeTask)
    can_use_onednn: bool = False
    uses_onednn: bool = False


@dataclass
class FakeConfig:
    device: str = "cpu"
    compile: bool = False


@dataclass
class FakeJob:
    steps: int = 1000
    budget: object = None
    config: FakeConfig = field(default_factory=FakeConfig)
    learner: FakeLearner = field(default_factory=FakeLearner)
    choices: tuple[Chosen, ...] = ()

    def with_choice(self, choice: Chosen) -> "FakeJob":
        return replace(self, choices=(*self.choices, choice))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of threads that torch would use, as a list of one."""
    current = [8]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: current[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: current.__setitem__(0, number))
    monkeypatch.setattr(kernels, "find_compiler", lambda: "g++")
    return current


def choose(
    monkeypatch: pytest.MonkeyPatch, job: FakeJob, time_step: Callable[[FakeJob], float], **more: Any
) -> FakeJob:
    monkeypatch.setattr(kernels, "_time_step", time_step)
    chosen: Any = choose_kernels(job, **({"may_compile": True} | more))  # type: ignore[arg-type]
    return chosen


def test_the_fastest_threads_and_the_compiled_network_are_kept(
    monkeypatch: pytest.MonkeyPatch, threads: list[int]
) -> None:
    def time_step(job: FakeJob) -> float:
        return {8: 1.0, 4: 0.7, 1: 2.0}[threads[0]] * (0.5 if job.learner.task.is_compiled else 1)

    job = choose(monkeypatch, FakeJob(), time_step)
    assert [(choice.name, choice.value) for choice in job.choices] == [("threads", 4), ("compile", True)]
    assert (threads, job.config.compile, job.learner.task.is_compiled) == ([4], True, True)
    threads[0] = 8
    resumed: Any = FakeJob()
    repeat_kernels(resumed, {"choices": [[choice.name, str(choice.value), choice.reason] for choice in job.choices]})
    assert threads == [4]


@pytest.mark.parametrize(("gain", "expected"), [(0.6, True), (0.95, False)])
def test_products_by_onednn_are_kept_if_they_are_faster(
    monkeypatch: pytest.MonkeyPatch, threads: list[int], gain: float, expected: bool
) -> None:
    def time_step(job: FakeJob) -> float:
        return 0.1 * (gain if job.learner.uses_onednn else 1)

    monkeypatch.setattr(kernels, "has_onednn", lambda: True)
    job = choose(monkeypatch, FakeJob(learner=FakeLearner(can_use_onednn=True)), time_step)
    assert job.learner.uses_onednn is expected
    assert [(choice.name, choice.value) for choice in job.choices] == [("products", "onednn")] * expected
    resumed: Any = FakeJob()
    repeat_kernels(resumed, {"choices": [[choice.name, str(choice.value), choice.reason] for choice in job.choices]})
    assert resumed.learner.uses_onednn is expected


def test_small_gains_change_nothing(monkeypatch: pytest.MonkeyPatch, threads: list[int]) -> None:
    def time_step(job: FakeJob) -> float:
        return (1.0 if threads[0] == 8 else 0.95) * (0.95 if job.learner.task.is_compiled else 1)

    job = choose(monkeypatch, FakeJob(), time_step)
    assert [(choice.name, choice.value) for choice in job.choices] == [("compile", False)]
    assert (threads, job.config.compile, job.learner.task.is_compiled) == ([8], False, False)
    assert choose(monkeypatch, FakeJob(), time_step, may_compile=False).choices == ()


@pytest.mark.parametrize(
    "job", [FakeJob(steps=100), FakeJob(budget=1), FakeJob(config=FakeConfig(device="cuda")), FakeJob(steps=200)]
)
def test_runs_that_would_not_gain_measure_nothing_else(
    monkeypatch: pytest.MonkeyPatch, threads: list[int], job: FakeJob
) -> None:
    measured: list[int] = []

    def time_step(job: FakeJob) -> float:
        measured.append(threads[0])
        return 0.1

    assert choose(monkeypatch, job, time_step).choices == ()
    assert len(measured) == (job.steps == 200)  # long enough to measure, but fast


def test_a_network_that_does_not_compile_trains_eagerly(monkeypatch: pytest.MonkeyPatch, threads: list[int]) -> None:
    def time_step(job: FakeJob) -> float:
        if job.learner.task.is_compiled:
            raise RuntimeError("no such instruction\nand a long story")
        return 1.0

    job = choose(monkeypatch, FakeJob(), time_step)
    assert job.choices[-1].reason == "compiling failed: no such instruction"
    assert not job.learner.task.is_compiled


def test_a_run_records_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_digits: None) -> None:
    compiled: list[object] = []

    def compile(function: Callable[..., object]) -> Callable[..., object]:
        compiled.append(function)
        return function

    times = iter([1.0, 1.0, 0.5])  # eager, with oneDNN, compiled
    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(kernels, "_time_step", lambda job: next(times))
    monkeypatch.setattr(kernels, "find_compiler", lambda: "g++")
    monkeypatch.setattr(kernels, "MIN_STEPS", 1)
    monkeypatch.setattr(kernels, "MIN_COMPILE_SECONDS", 1)
    settings: dict[str, Any] = dict(model="vit-pico7", network=dict(width=48, depth=1, heads=3), batch_size=32)
    run = vitral.train("builtin:digits", out=tmp_path / "run", steps=2, progress=False, **settings)
    assert read_run_settings(run).compile is True
    assert ["compile", "True"] in [choice[:2] for choice in run.read_manifest()["choices"]]
    assert len(compiled) == 2  # to measure, and to keep
