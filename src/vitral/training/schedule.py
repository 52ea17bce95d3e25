"""The learning rate at every step, and how many steps fit into a time budget."""

from math import cos, pi, sqrt

from vitral.training.config import ResolvedOptim

BUDGET_FOR_TRAINING = 0.85
"""Fraction of a time budget to plan with; start-up and the report take the rest."""


BUDGET_FOR_FEATURES = 0.75
"""Largest fraction of a time budget for the forward passes of the linear probe and of the test."""
MIN_SIDE = 112
"""Images are not made smaller than this side in pixels to fit a time budget."""
MIN_STEPS = 30
"""Fewer steps than this after a linear probe are not worth starting."""


def affordable_side(side: int, step: int, *, seconds_per_image: float, images: int, budget: float) -> int:
    """Return the largest side, at most `side` and a multiple of `step`, at which forward passes fit the budget."""
    while images * seconds_per_image > BUDGET_FOR_FEATURES * budget and side - step >= MIN_SIDE:
        seconds_per_image *= ((side - step) / side) ** 2
        side -= step
    return side


def lr_factor(optim: ResolvedOptim, step: int, steps: int, warmup_steps: int) -> float:
    """Return the factor of the peak learning rate at a step, the first being 0, as in the paper's code."""
    if step < warmup_steps:
        return step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    end = optim.end_lr / optim.lr
    match optim.schedule:
        case "cosine":
            return end + (1 - end) * 0.5 * (1 + cos(pi * progress))
        case "linear":
            return end + (1 - end) * (1 - progress)
        case "rsqrt":
            return sqrt(max(1, warmup_steps) / max(1, warmup_steps, step))
        case "stair":
            return 0.1 ** sum(step >= fraction * steps for fraction in optim.stairs)
        case "constant":
            return 1.0


def steps_within(
    budget: float, seconds_per_step: float, *, batch_size: int, steps_per_epoch: int, validation: int, test: int
) -> int:
    """Return how many steps fit into `budget` seconds, with validation after each epoch and the test at the end."""
    seconds_per_image = seconds_per_step / 3 / batch_size  # a forward pass takes a third of a training step
    epoch_seconds = steps_per_epoch * seconds_per_step + validation * seconds_per_image
    training_seconds = BUDGET_FOR_TRAINING * budget - test * seconds_per_image
    return max(1, round(training_seconds / epoch_seconds * steps_per_epoch))
