"""Keep the promise of a time budget: what fits into it before a run starts, and how far it is while it runs."""

import time
from dataclasses import dataclass, replace

REPORT_SECONDS = 5.0
"""For the plots, the report and the last files."""
TRAINED_EPOCHS = 5
"""Passes over the training images that a plan makes room for, beside the features and the test. With fewer, larger
images are worth more than training; with more, smaller images cost more than training gains."""
PLANNED_SHARE = 0.85
"""Fraction of a budget to plan with; fitting probes, comparing models and the refit take the rest."""
TEST_FRACTION = 0.3
"""Largest fraction of a budget for the test split; a larger split is sampled."""
MIN_TEST_IMAGES = 200
MIN_SIDE = 112
"""Images are not made smaller than this side in pixels to fit a time budget."""
MIN_STEPS = 20
"""Fewer steps than this after a linear probe are not worth starting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """A run that has to end in time."""

    end: float
    """The time at which everything is done, on the clock of time.perf_counter."""
    test_image: float = 0.0
    """Estimated seconds per test image."""
    validation_image: float = 0.0

    @property
    def left(self) -> float:
        """Return the seconds that are left, without those for the report."""
        return self.end - time.perf_counter() - REPORT_SECONDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What has to be computed, in images."""

    train: int
    validation: int
    test: int
    views: int
    """Views per training image."""
    step_cost: float
    """Cost of an image in a training step, in forward passes."""

    def seconds(self, image: float, *, epochs: float = TRAINED_EPOCHS) -> float:
        """Return the time of everything if a forward pass takes `image` seconds per image."""
        passes = self.views * self.train + self.validation + self.test
        return image * (passes + epochs * self.step_cost * self.train)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The largest workload that fits into a budget."""

    side: int
    train: int
    """Number of training images to use."""
    test: int
    views: int


def fit_plan(work: Workload, *, side: int, step: int, image_seconds: float, budget: float) -> Plan:
    """Return what fits: all test images or a sample, then the largest images, then fewer views, then fewer images.

    `image_seconds` is the time of a forward pass at `side` pixels. It falls with the square of the side. One view at a
    larger size is preferred to two views at a smaller one.
    """
    budget = max(PLANNED_SHARE * budget, 1.0)
    sides = range(side, min(side, MIN_SIDE) - 1, -step)

    def sample_test(image: float) -> int:
        return min(work.test, max(MIN_TEST_IMAGES, int(TEST_FRACTION * budget / image)))

    for candidate in sides:
        image = image_seconds * (candidate / side) ** 2
        for views in dict.fromkeys((work.views, 1)):
            scaled = replace(work, test=sample_test(image), views=views)
            if scaled.seconds(image) <= budget:
                return Plan(side=candidate, train=work.train, test=scaled.test, views=views)
    image = image_seconds * (sides[-1] / side) ** 2
    test = sample_test(image)
    per_image = replace(work, views=1, test=0).seconds(image) / work.train  # with its share of the validation images
    train = min(work.train, max(1, int((budget - test * image) / per_image)))
    return Plan(side=sides[-1], train=train, test=test, views=1)
