"""Keep the promise of a time budget: what fits into it before a run starts, and how far it is while it runs."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from vitral.collectives import from_first
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.model.cost import FLOAT_BYTES, count_cost

REPORT_SECONDS = 5.0
"""For the plots and the report, without the relevance of its images."""
MAX_DRAWING_SECONDS, DRAWING_FRACTION = 20.0, 0.05
"""Seconds to draw the relevance of images for the report, at most this fraction of a budget."""
SAVES, SAVING_SECONDS_PER_GB = 4, 6.0
"""How often a run from a checkpoint writes all weights at least, with hashes and flushes, and how long that takes: two
states and two models took 9.7 s for a ViT-B of 0.34 GB."""
TRAINED_EPOCHS = 2
"""Passes over the training images that a plan makes room for, beside the features and the test. With fewer, larger
images are worth more than training; with more, smaller images cost more than training gains."""
PLANNED_SHARE = 0.9
"""Fraction of a budget to plan with; fitting probes takes the rest."""
TEST_FRACTION = 0.25
"""Largest fraction of a budget for the test split; a larger split is sampled."""
MIN_TEST_IMAGES, MAX_TEST_FRACTION = 200, 0.5
"""A sample has at least so many test images, unless they would take more than this fraction of a budget."""
MIN_SIDE, MIN_SIDE_STEP = 112, 12
"""Images are not made smaller than this side in pixels to fit a time budget, and in steps of at least so many."""
MIN_PER_CLASS, ENOUGH_PER_CLASS, ENOUGH_TO_TRAIN = 2, 50, 200
"""Fewest training images per class; the number beyond which a probe gains more from larger images than from more; the
number of a sample that is worth training on, although a probe could use more images."""
COMPARED_MODELS = 3
"""Models that are measured on the validation images before one is chosen."""
MAX_PLAIN_IMAGES = 300
"""Training images whose features describe what is usual."""
PLANNED_STEPS, MIN_STEPS = 40, 20
"""A plan makes room for so many steps after a linear probe. If fewer than the second fit in the end, none is taken."""

MIN_CHECK_SECONDS, CHECK_FRACTION = 3.0, 0.04
"""The speed is measured again after so many seconds of features, or this fraction of a budget if that is more."""
SPEED_TOLERANCE, MAX_REPLANS = 1.25, 2
"""The features start over with another plan if the machine is faster or slower by this factor, at most so often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """A run that has to end in time."""

    end: float
    """The time at which everything is done, on the clock of time.perf_counter."""
    image: float = 0.0
    """Estimated seconds per image of a forward pass."""
    test_image: float = 0.0
    validation_image: float = 0.0
    last_seconds: float = REPORT_SECONDS
    """Seconds to keep for writing models, states and the report."""

    @property
    def left(self) -> float:
        """Return the seconds that are left for everything else."""
        return from_first(self.end - time.perf_counter() - self.last_seconds)


def drawing_seconds(minutes: float | None) -> float:
    """Return the longest time to draw the relevance of images for the report."""
    return MAX_DRAWING_SECONDS if minutes is None else min(MAX_DRAWING_SECONDS, DRAWING_FRACTION * 60 * minutes)


def last_seconds(network: ViTConfig | BiTConfig, minutes: float | None) -> float:
    """Return the seconds that a run takes to write its models, states and report, which images do not change."""
    gigabytes = FLOAT_BYTES * count_cost(network).parameters / 1e9
    return REPORT_SECONDS + drawing_seconds(minutes) + SAVES * SAVING_SECONDS_PER_GB * gigabytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Counts the images that a run has to compute; costs are in forward passes."""

    train: int
    validation: int
    test: int
    extra_views: int
    """Views per training image beside the plain one."""
    view_cost: float
    step_cost: float
    """Cost of an image in a training step."""
    refit: bool
    """Whether the winner is also trained on the validation images, and on as many training images."""
    batch: int
    """Images per step."""
    check_cost: float = 0.0
    """Cost of an image when trained models are compared, and when it is measured how unusual images look."""
    test_cost: float = 1.0
    """Cost of a test image, which is computed in float32 as `vitral evaluate` does."""

    @property
    def checks(self) -> float:
        """Return the cost of comparing trained models and of measuring how unusual images look."""
        times = 2 if self.refit else 1  # before the refit and after it
        plain = min(MAX_PLAIN_IMAGES, self.train)
        return self.check_cost * ((COMPARED_MODELS + times) * self.validation + plain)

    @property
    def feature_passes(self) -> float:
        """Return the cost of the features of all views."""
        viewed = self.train + self.refitted
        return self.train + self.validation + self.extra_views * self.view_cost * viewed

    @property
    def refitted(self) -> int:
        """Return how many validation images are trained on in the end."""
        return self.validation if self.refit else 0

    def seconds(self, image: float, *, epochs: float = TRAINED_EPOCHS) -> float:
        """Return the time of everything if a forward pass takes `image` seconds per image."""
        work = self.feature_passes + self.test_cost * self.test
        if epochs:
            images = max(epochs * (self.train + 2 * self.refitted), PLANNED_STEPS * self.batch)
            work += self.step_cost * images + self.checks
        return image * work


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The largest workload that fits into a budget."""

    side: int
    train: int
    """Number of training images to use."""
    test: int
    extra_views: int
    is_trained: bool = True
    """Whether there is time to train after the linear probe."""


def fit_plan(
    workloads: Mapping[int, Workload],
    *,
    image_seconds: float,
    budget: float,
    classes: int,
    can_skip_training: bool = False,
) -> Plan:
    """Return what fits: all test images or a sample, then all views, then the largest images, then fewer images.

    `workloads` has the workload of each side that images may have, largest first. `image_seconds` is the time of a
    forward pass at the largest. It falls with the square of the side. With `can_skip_training` a linear probe
    remains where training fits at no side, not even on a sample that is worth it.
    """
    budget = max(PLANNED_SHARE * budget, 1.0)
    largest = next(iter(workloads))

    def with_sample(side: int, extra_views: int) -> tuple[Workload, float]:
        work, image = workloads[side], image_seconds * (side / largest) ** 2
        affordable = budget / (image * work.test_cost)
        least = min(MIN_TEST_IMAGES, max(1, int(MAX_TEST_FRACTION * affordable)))
        test = min(work.test, max(least, int(TEST_FRACTION * affordable)))
        return replace(work, test=test, extra_views=extra_views), image

    def first_fitting(epochs: float) -> Plan | None:
        for side, workload in workloads.items():
            # Further views gain less than larger images.
            for extra_views in dict.fromkeys((workload.extra_views if epochs and side == largest else 0, 0)):
                work, image = with_sample(side, extra_views)
                if work.seconds(image, epochs=epochs) <= budget:
                    is_trained, test = bool(epochs), work.test
                    return Plan(side=side, train=work.train, test=test, extra_views=extra_views, is_trained=is_trained)
        return None

    def sampled(epochs: float, enough: int) -> Plan:
        """Return the plan with the largest images of which enough per class fit, or else with the smallest."""
        plans: list[Plan] = []
        for side in workloads:
            work, image = with_sample(side, 0)
            per_image = replace(work, test=0).seconds(image, epochs=epochs) / work.train  # with its share of validation
            left = budget - work.test * work.test_cost * image
            train = min(work.train, max(MIN_PER_CLASS * classes, int(left / per_image)))
            plans.append(Plan(side=side, train=train, test=work.test, extra_views=0, is_trained=bool(epochs)))
        return next((plan for plan in plans if plan.train >= enough * classes), plans[-1])

    if fitting := first_fitting(TRAINED_EPOCHS):
        return fitting
    trained = sampled(TRAINED_EPOCHS, ENOUGH_TO_TRAIN if can_skip_training else ENOUGH_PER_CLASS)
    if not can_skip_training or trained.train >= ENOUGH_TO_TRAIN * classes:
        return trained
    return first_fitting(0) or sampled(0, ENOUGH_PER_CLASS)
