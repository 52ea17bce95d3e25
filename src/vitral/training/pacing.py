"""Keep a run within its time budget while it trains: move its last step when the speed is not as planned."""

import time
from typing import TYPE_CHECKING

from vitral.training.events import Chosen
from vitral.training.state import TrainState

if TYPE_CHECKING:
    from vitral.training.job import Job

TIMED_STEPS, RECENT_STEPS = 3, 20
"""Steps that show the speed at first, and later."""
MIN_MOVE = 0.03
"""A schedule is shortened by at least this fraction."""


class Planner:
    """Keeps a run within its time budget: moves the last step when the machine is slower or faster than planned."""

    def __init__(self, job: "Job", state: TrainState):
        self.job, self.first = job, state.step
        self.seconds, self.steps, self.last = 0.0, 0, time.perf_counter()
        self.is_confirmed = False
        """Whether the first steps have shown the real speed. From then on the end only moves forward."""

    def pause(self) -> None:
        """Leave out the time since the last step."""
        self.last = time.perf_counter()

    def replan(self, state: TrainState) -> Chosen | None:
        """Return the new number of steps, if the plan has to change."""
        now = time.perf_counter()
        elapsed, self.last = now - self.last, now
        if state.step > self.first + 1:  # the first step warms up
            self.seconds, self.steps = self.seconds + elapsed, self.steps + 1
        if self.job.budget is None or self.steps < TIMED_STEPS or state.step >= state.pace.end:
            return None
        end = min(self._affordable_end(state, self.seconds / self.steps), self._limit(state))
        is_due = end < state.pace.end if self.is_confirmed else end != state.pace.end
        is_first, self.is_confirmed = not self.is_confirmed, True
        self.seconds, self.steps = (self.seconds, self.steps) if self.steps < RECENT_STEPS else (0.0, 0)
        if not is_due or (not is_first and end > (1 - MIN_MOVE) * state.pace.end):
            return None
        state.pace.move_end(state.step, end)
        return Chosen(name="steps", value=state.pace.end, reason=f"{self.job.config.minutes:g} minutes at this speed")

    def _affordable_end(self, state: TrainState, step_seconds: float) -> int:
        done = state.step - state.pace.first
        if state.stage == "train":
            return state.step + self.job.affordable_steps(step_seconds, step=done)
        assert self.job.budget is not None
        left = self.job.budget.left - len(self.job.test.images) * self.job.budget.test_image
        return state.step + int(left / step_seconds)

    def _limit(self, state: TrainState) -> int:
        """Return the largest end that makes sense: that of the plan, if the run has a probe to fall back on."""
        if state.stage == "refit":
            return state.pace.first + state.pace.planned
        return state.pace.first + self.job.max_steps
