"""A run that keeps within its time budget, on a machine whose speed changes."""

from types import SimpleNamespace
from typing import Any

import pytest

from vitral.training import pacing
from vitral.training.events import Chosen
from vitral.training.pacing import Planner
from vitral.training.schedule import Pace
from vitral.training.state import TrainState


class Clock:
    """The time of a machine on which a step takes `step` seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def simulate(
    monkeypatch: pytest.MonkeyPatch, step_seconds: list[float], *, planned: int, budget: float
) -> tuple[int, float, list[Chosen], TrainState]:
    """Run the steps of a stage, of which `step_seconds` has the durations in turn (the last one repeats)."""
    clock = Clock()
    monkeypatch.setattr(pacing, "time", clock)

    def affordable(seconds: float, *, step: int) -> int:
        return int((budget - clock.now) / seconds)

    job: Any = SimpleNamespace(
        budget=object(), max_steps=1000, affordable_steps=affordable, config=SimpleNamespace(minutes=1.0)
    )
    state = TrainState(pace=Pace.start(0, planned))
    planner, moves = Planner(job, state), list[Chosen]()
    while state.step < state.pace.end:
        clock.now += step_seconds[min(state.step, len(step_seconds) - 1)]
        state.step += 1
        if (moved := planner.replan(state)) is not None:
            moves.append(moved)
    return state.step, clock.now, moves, state


def test_a_plan_that_holds_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, seconds, moves, _ = simulate(monkeypatch, [1.0], planned=60, budget=60.0)
    assert (steps, seconds, moves) == (60, 60.0, [])


@pytest.mark.parametrize("speed", [0.2, 0.5, 2.0, 5.0])
def test_the_first_steps_correct_the_plan(monkeypatch: pytest.MonkeyPatch, speed: float) -> None:
    _, seconds, moves, state = simulate(monkeypatch, [speed], planned=60, budget=60.0)
    assert seconds == pytest.approx(60.0, abs=2 * speed)
    assert moves
    assert state.pace.position_at(state.pace.end) == pytest.approx(60)  # the learning rate reaches its end


def test_a_machine_that_slows_down_shortens_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, seconds, moves, state = simulate(monkeypatch, [1.0] * 30 + [4.0], planned=100, budget=100.0)
    assert steps < 100
    assert seconds <= 112.0  # within the promise, although three quarters of the speed were lost on the way
    assert moves
    assert state.pace.position_at(state.pace.end) == pytest.approx(100)


def test_a_resumed_run_repeats_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    state = TrainState(pace=Pace.start(0, 50))
    planner = Planner(SimpleNamespace(budget=None), state)  # type: ignore[arg-type]
    for _ in range(40):
        state.step += 1
        assert planner.replan(state) is None
