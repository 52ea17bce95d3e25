"""What fits into a time budget."""

import pytest

from vitral.training.budget import MIN_SIDE, MIN_TEST_IMAGES, PLANNED_SHARE, Workload, fit_plan

WORK = Workload(train=1000, validation=100, test=500, views=2, step_cost=0.5)


def seconds_of(work: Workload, *, side: int, train: int, test: int, views: int, image: float) -> float:
    """Forward passes of every view and split, and five epochs of half a pass."""
    share = train / work.train
    passes = views * train + share * work.validation + test + 5 * work.step_cost * train
    return passes * image * (side / 224) ** 2 / PLANNED_SHARE


@pytest.mark.parametrize("budget", [10.0, 30.0, 60.0, 120.0, 240.0, 600.0, 10_000.0])
@pytest.mark.parametrize("image", [0.002, 0.02, 0.1, 0.5])
def test_a_plan_fits(budget: float, image: float) -> None:
    plan = fit_plan(WORK, side=224, step=14, image_seconds=image, budget=budget)
    assert MIN_SIDE <= plan.side <= 224
    assert plan.side % 14 == 0
    assert plan.test >= min(WORK.test, MIN_TEST_IMAGES)
    assert 1 <= plan.views <= 2
    seconds = seconds_of(WORK, side=plan.side, train=plan.train, test=plan.test, views=plan.views, image=image)
    if plan.train > 1 and plan.test > MIN_TEST_IMAGES:
        assert seconds <= 1.05 * budget
    if plan.train < WORK.train:
        assert (plan.side, plan.views) == (MIN_SIDE, 1)
    wasteful = seconds_of(WORK, side=plan.side, train=1000, test=plan.test, views=2, image=image)
    assert plan.views == 2 or wasteful > budget


def test_the_largest_images_that_fit_are_chosen() -> None:
    whole = seconds_of(WORK, side=224, train=1000, test=500, views=2, image=0.1)
    assert fit_plan(WORK, side=224, step=14, image_seconds=0.1, budget=1.01 * whole).side == 224
    assert fit_plan(WORK, side=224, step=14, image_seconds=0.1, budget=0.99 * whole).views == 1
    single = seconds_of(WORK, side=224, train=1000, test=500, views=1, image=0.1)
    assert fit_plan(WORK, side=224, step=14, image_seconds=0.1, budget=0.99 * single).side == 210
    smallest = seconds_of(WORK, side=112, train=1000, test=500, views=1, image=0.1)
    plan = fit_plan(WORK, side=224, step=14, image_seconds=0.1, budget=1.01 * smallest)
    assert (plan.side, plan.views, plan.train) == (112, 1, 1000)


def test_a_size_that_was_asked_for_is_kept() -> None:
    plan = fit_plan(WORK, side=518, step=518, image_seconds=1.0, budget=240)
    assert plan.side == 518
    assert plan.train < WORK.train
