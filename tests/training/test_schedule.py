"""The learning rate at every step, and stages whose end moves, against values computed by hand."""

from math import cos, pi, sqrt
from typing import Any

import pytest

from vitral.training.config import ResolvedOptim
from vitral.training.schedule import Pace, lr_factor


@pytest.mark.parametrize("schedule", ["cosine", "linear", "rsqrt", "stair", "constant"])
def test_learning_rate_at_every_step(schedule: Any) -> None:
    optim = ResolvedOptim(lr=2.0, schedule=schedule, end_lr=0.5)
    factors = [lr_factor(optim, step, 20, 5) for step in range(20)]
    assert factors[:5] == [0, 0.2, 0.4, 0.6, 0.8]
    for step in range(5, 20):
        progress = (step - 5) / 15
        expected = {
            "cosine": 0.25 + 0.75 * (1 + cos(pi * progress)) / 2,
            "linear": 0.25 + 0.75 * (1 - progress),
            "rsqrt": sqrt(5 / step),
            "stair": 1.0 if step < 6 else 0.1 if step < 12 else 0.01 if step < 18 else 0.001,
            "constant": 1.0,
        }[schedule]
        assert factors[step] == pytest.approx(expected, abs=1e-12)


def test_without_warmup_the_first_step_has_the_peak() -> None:
    assert lr_factor(ResolvedOptim(lr=1.0), 0, 20, 0) == 1.0
    assert lr_factor(ResolvedOptim(lr=1.0, schedule="rsqrt"), 0, 20, 0) == 1.0


def test_a_stage_that_ends_earlier_still_reaches_the_end_of_its_schedule() -> None:
    """30 of 100 steps are done when the end moves to 65: the other 35 pass through the remaining 70."""
    pace = Pace.start(10, 100)
    assert [pace.position_at(step) for step in (10, 11, 110)] == [0, 1, 100]
    pace.move_end(40, 75)
    assert pace.end == 75
    assert [pace.position_at(step) for step in (40, 41, 75)] == [30, 32, 100]
    pace.move_end(70, 60)  # a step that is still taken
    assert pace.end == 71
    assert pace.position_at(71) == 100
