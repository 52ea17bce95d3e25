"""Keep a run within its time budget while it trains: move its last step when the speed is not as planned."""

import time
from statistics import mean
from typing import TYPE_CHECKING

from vitral.collectives import from_first
from vitral.training.events import Chosen
from vitral.training.state import TrainState

if TYPE_CHECKING:
    from vitral.training.job import Job

FIRST_STEPS, REGULAR_STEPS, REGULAR_SHARE = 3, 10, 0.1
"""Steps after which the plan is checked: at first, and from then on, where a tenth of all steps may be more."""
MIN_MOVE = 0.04
"""A schedule is changed by at least this fraction."""


class Planner:
    """Keeps a run within its time budget: moves the last step when the machine is slower or faster than planned."""

    def __init__(self, job: "Job", state: TrainState):
        self.job, self.first, self.last = job, state.step, time.perf_counter()
        self.times: list[float] = []
        """Seconds of the steps since the plan was checked last."""
        self.check_after = FIRST_STEPS

    def pause(self) -> None:
        """Leave out the time since the last step."""
        self.last = time.perf_counter()

    def replan(self, state: TrainState) -> Chosen | None:
        """Return the new number of steps if the plan has to change. It is checked after a few steps, then regularly."""
        now = time.perf_counter()
        elapsed, self.last = now - self.last, now
        if state.step > self.first + 1:  # the first step warms up
            self.times.append(elapsed)
        if self.job.budget is None or len(self.times) < self.check_after or state.step >= state.pace.end:
            return None
        end = min(self._affordable_end(state, from_first(mean(self.times))), self._limit(state))
        self.times, self.check_after = [], max(REGULAR_STEPS, int(REGULAR_SHARE * state.pace.planned))
        if abs(end - state.pace.end) <= MIN_MOVE * state.pace.end:
            return None
        state.pace.move_end(state.step, end)
        return Chosen(name="steps", value=state.pace.end, reason=f"{self.job.config.minutes:g} minutes at this speed")

    def _affordable_end(self, state: TrainState, step_seconds: float) -> int:
        done = state.step - state.pace.first
        if state.stage == "train":
            return state.step + self.job.affordable_steps(step_seconds, step=done)
        assert self.job.budget is not None
        return state.step + int((self.job.budget.left - self.job.seconds_after_steps) / step_seconds)

    def _limit(self, state: TrainState) -> int:
        """Return the largest end that makes sense: that of the plan, if the run has a probe to fall back on."""
        if state.stage == "refit":
            return state.pace.first + state.pace.planned
        return state.pace.first + self.job.max_steps
