"""The learning rate at every step, and steps that fit into a time budget, against values computed by hand."""

from math import cos, pi, sqrt
from typing import Any

import pytest

from vitral.training.config import ResolvedOptim
from vitral.training.schedule import affordable_side, lr_factor, steps_within


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


def test_steps_within_a_budget() -> None:
    """A step of 3 seconds on 10 images makes a forward pass of 0.1 seconds per image.

    Of 1000 seconds, 850 are for training and 50 of these for the test; an epoch takes 20 * 3 + 200 * 0.1 = 80.
    """
    sizes = dict(batch_size=10, steps_per_epoch=20, validation=200, test=500)
    assert steps_within(1000, 3.0, **sizes) == 200
    assert steps_within(1, 3.0, **sizes) == 1


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (100, 224),  # 10 of 60 seconds
        (790, 168),  # 79 seconds at 224 pixels, 44 at 168
        (10**6, 112),  # never smaller, whatever it takes
    ],
)
def test_images_shrink_to_the_time_budget(images: int, expected: int) -> None:
    assert affordable_side(224, 14, seconds_per_image=0.1, images=images, budget=60) == expected
