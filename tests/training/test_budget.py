"""What fits into a time budget."""

import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from tests.data.images import class_folders
from vitral.data.sources import open_dataset
from vitral.model.sizes import named_config
from vitral.preprocess import Preprocess
from vitral.training import timing, warm_start
from vitral.training.budget import (
    MIN_SIDE,
    MIN_TEST_IMAGES,
    PLANNED_SHARE,
    REPORT_SECONDS,
    TRAINED_EPOCHS,
    Budget,
    Workload,
    drawing_seconds,
    fit_plan,
    last_seconds,
)
from vitral.training.events import Chosen, Measuring
from vitral.training.feature_plan import FeaturePlan

WORK = Workload(
    train=1000,
    validation=100,
    test=500,
    extra_views=1,
    view_cost=0.3,
    step_cost=0.5,
    refit=True,
    batch=8,
    check_cost=0.4,
)
WORKS = dict.fromkeys(range(224, MIN_SIDE - 1, -14), WORK)


def seconds_of(*, side: int, test: int, extra_views: int, image: float, epochs: int = TRAINED_EPOCHS) -> float:
    """Forward passes of every split, of the extra views, and of the epochs with the refit and its checks."""
    passes = 1000 + 100 + test + extra_views * 0.3 * 1100 + epochs * 0.5 * (1000 + 2 * 100)
    passes += 0.4 * (5 * 100 + 300) if epochs else 0  # three models, novelty, the refitted model
    return passes * image * (side / 224) ** 2 / PLANNED_SHARE


@pytest.mark.parametrize("budget", [10.0, 30.0, 60.0, 120.0, 240.0, 600.0, 10_000.0])
@pytest.mark.parametrize("image", [0.002, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("may_skip", [False, True])
def test_a_plan_fits(budget: float, image: float, may_skip: bool) -> None:
    plan = fit_plan(WORKS, image_seconds=image, budget=budget, classes=10, can_skip_training=may_skip)
    assert plan.side in WORKS
    assert plan.test >= min(MIN_TEST_IMAGES, int(0.5 * PLANNED_SHARE * budget / (image * (plan.side / 224) ** 2)))
    epochs = TRAINED_EPOCHS if plan.is_trained else 0
    seconds = seconds_of(side=plan.side, test=plan.test, extra_views=plan.extra_views, image=image, epochs=epochs)
    if plan.train == WORK.train:
        assert seconds <= 1.001 * budget
    else:
        assert not plan.extra_views
        assert plan.side == MIN_SIDE or plan.train >= 500  # enough for ten classes
    if plan.is_trained and not plan.extra_views:
        assert seconds_of(side=max(WORKS), test=plan.test, extra_views=1, image=image) > budget


def test_the_largest_images_that_fit_are_chosen() -> None:
    whole = seconds_of(side=224, test=500, extra_views=1, image=0.1)
    assert fit_plan(WORKS, image_seconds=0.1, classes=10, budget=1.01 * whole).side == 224
    assert fit_plan(WORKS, image_seconds=0.1, classes=10, budget=0.99 * whole).extra_views == 0
    single = seconds_of(side=224, test=500, extra_views=0, image=0.1)
    assert fit_plan(WORKS, image_seconds=0.1, classes=10, budget=0.99 * single).side == 210
    smallest = seconds_of(side=112, test=500, extra_views=0, image=0.1)
    plan = fit_plan(WORKS, image_seconds=0.1, classes=10, budget=1.01 * smallest)
    assert (plan.side, plan.extra_views, plan.train, plan.is_trained) == (112, 0, 1000, True)


def test_too_little_time_for_training_still_fits_a_probe_to_all_images() -> None:
    budget = 0.8 * seconds_of(side=112, test=500, extra_views=0, image=0.1)
    assert fit_plan(WORKS, image_seconds=0.1, classes=10, budget=budget).train < 1000
    plan = fit_plan(WORKS, image_seconds=0.1, classes=10, budget=budget, can_skip_training=True)
    assert (plan.train, plan.is_trained) == (1000, False)


def test_enough_images_at_a_larger_side_are_preferred_to_more() -> None:
    budget = 0.2 * seconds_of(side=112, test=500, extra_views=0, image=0.1)
    few, many = (
        fit_plan(WORKS, image_seconds=0.1, budget=budget, classes=classes, can_skip_training=True) for classes in (1, 4)
    )
    assert few.side > many.side
    assert 50 <= few.train < many.train
    assert not few.is_trained
    most = fit_plan(WORKS, image_seconds=0.1, budget=budget, classes=100, can_skip_training=True)
    assert most.side == MIN_SIDE
    assert most.train >= many.train


def test_a_sample_that_is_large_enough_is_trained_on() -> None:
    """Training on a few hundred images per class gains more than a probe of all images."""
    large = replace(WORK, train=50_000, validation=5_000)
    works = dict.fromkeys(WORKS, large)
    budget = large.seconds(0.02 / 4, epochs=0) / PLANNED_SHARE  # a probe of everything at 112 pixels
    plan = fit_plan(works, image_seconds=0.02, budget=1.01 * budget, classes=10, can_skip_training=True)
    assert plan.is_trained
    assert 200 * 10 <= plan.train < large.train
    share, image = plan.train / large.train, 0.02 * (plan.side / 224) ** 2
    sampled = replace(large, train=plan.train, validation=int(share * 5_000), test=plan.test, extra_views=0)
    assert sampled.seconds(image) <= 1.02 * PLANNED_SHARE * budget  # the 300 images for novelty are not fewer
    many = fit_plan(works, image_seconds=0.02, budget=1.01 * budget, classes=200, can_skip_training=True)
    assert (many.train, many.is_trained) == (50_000, False)


def test_a_budget_that_is_far_too_short_still_has_images_of_every_class() -> None:
    plan = fit_plan(WORKS, image_seconds=5.0, budget=20, classes=10, can_skip_training=True)
    assert (plan.side, plan.train) == (MIN_SIDE, 20)
    assert plan.test < MIN_TEST_IMAGES


def test_a_size_that_was_asked_for_is_kept() -> None:
    plan = fit_plan({518: replace(WORK, validation=0)}, image_seconds=1.0, budget=240, classes=10)
    assert plan.side == 518
    assert plan.train < WORK.train


def test_few_images_still_get_a_useful_number_of_steps() -> None:
    """Two epochs of 100 images are hardly a step of 64, so the plan makes room for 40."""
    few = replace(WORK, train=100, validation=10, test=50, batch=64)
    works = dict.fromkeys(WORKS, few)
    plan = fit_plan(works, image_seconds=0.1, budget=few.seconds(0.1, epochs=TRAINED_EPOCHS), classes=2)
    assert few.seconds(0.1) > 0.1 * 0.5 * 40 * 64
    assert plan.side < 224
    assert plan.is_trained


def test_a_test_image_that_takes_longer_leaves_less_for_training() -> None:
    """A CPU that computes bfloat16 natively trains in it, but measures the test split in float32."""
    slow = {side: replace(work, test_cost=3.0) for side, work in WORKS.items()}
    budget = seconds_of(side=224, test=500, extra_views=0, image=0.1)
    assert fit_plan(WORKS, image_seconds=0.1, classes=10, budget=budget).side == 224
    plan = fit_plan(slow, image_seconds=0.1, classes=10, budget=budget)
    image = 0.1 * (plan.side / 224) ** 2
    assert replace(slow[plan.side], test=plan.test, extra_views=0).seconds(image) <= PLANNED_SHARE * budget
    assert plan.side < 224
    assert 3 * plan.test * image <= 0.25 * PLANNED_SHARE * budget


@pytest.mark.parametrize(("minutes", "seconds"), [(1.0, 3.0), (4.0, 12.0), (60.0, 20.0), (None, 20.0)])
def test_overlays_of_the_report_take_a_small_part_of_a_budget(minutes: float | None, seconds: float) -> None:
    assert drawing_seconds(minutes) == pytest.approx(seconds)


def test_time_is_kept_to_write_large_networks() -> None:
    """A ViT-B has 16 times the weights of a ViT-Ti, which every model and state of the run holds."""
    small, large = (last_seconds(named_config(name), 1.0) for name in ("vit-ti16", "vit-b16"))
    fixed = REPORT_SECONDS + drawing_seconds(1.0)
    assert fixed < small < fixed + 1
    assert large - fixed == pytest.approx(15 * (small - fixed), rel=0.05)
    budget = Budget(end=time.perf_counter() + 60, last_seconds=large)
    assert 59 - large < budget.left <= 60 - large


# ---- the speed is measured again while features are computed ----


def plan_at(seconds: float, choices: tuple[Chosen, ...] = ()) -> Any:
    """Stands for a plan that expects so many seconds per image."""
    return SimpleNamespace(
        image_seconds=seconds,
        choices=choices,
        model=None,
        splits=None,
        config=SimpleNamespace(minutes=1.0),
        is_larger_than=lambda other: seconds < other.image_seconds,
    )


def run_plan(monkeypatch: pytest.MonkeyPatch, *, expected: float, images: int = 40) -> tuple[list[float], list[Any]]:
    """Compute features at 10 ms per image in batches of 4; return the expectations of all plans, and the events."""
    computed: list[float] = []

    def compute(_model: object, _config: object, _dataset: object, _splits: object) -> Generator[Any, None, Any]:
        for done in range(4, images + 1, 4):
            time.sleep(0.04)
            yield Measuring(what="features", done=done, total=images)
        return "features", None

    def replan(plan: Any, seconds: float) -> Any:
        computed.append(seconds)
        if 0.5 < seconds / plan.image_seconds < 2:
            return None
        return plan_at(seconds, (*plan.choices, Chosen(name="image_size", value=1, reason="")))

    monkeypatch.setattr(warm_start, "_compute", compute)
    monkeypatch.setattr(warm_start, "_time_per_image", lambda *_: 0.01)
    monkeypatch.setattr(warm_start, "MIN_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(warm_start, "CHECK_FRACTION", 0.0)
    running = warm_start._compute_in_time(plan_at(expected), None, replan, restarts=2)  # type: ignore[arg-type]
    events: list[Any] = [*running]
    return computed, events


@pytest.mark.parametrize(("expected", "restarts"), [(0.01, 0), (0.1, 1), (0.001, 1)])
def test_a_wrong_first_measurement_is_corrected(
    monkeypatch: pytest.MonkeyPatch, expected: float, restarts: int
) -> None:
    measured, events = run_plan(monkeypatch, expected=expected)
    assert all(0.008 < seconds < 0.03 for seconds in measured)
    assert sum(isinstance(event, Chosen) for event in events) == restarts
    assert events[-1].done == 40


@pytest.mark.parametrize(("expected", "passes"), [(0.01, 1), (0.001, 1), (0.1, 2)])
def test_complete_features_start_over_only_with_a_larger_plan(
    monkeypatch: pytest.MonkeyPatch, expected: float, passes: int
) -> None:
    """Other programs may have slowed down the measurement before the plan and most of the features."""
    measured, events = run_plan(monkeypatch, expected=expected, images=12)
    assert set(measured) == {0.01}  # only complete features were timed
    assert sum(isinstance(event, Measuring) for event in events) == 3 * passes


@pytest.mark.parametrize(
    ("tune", "side", "images", "is_larger"),
    [
        ("last-blocks", 112, 10, True),  # training instead of a probe, whatever else
        ("probe", 128, 100, False),  # 1.3 times the pixels
        ("probe", 168, 100, True),
        ("probe", 112, 200, True),
    ],
)
def test_a_larger_plan_trains_or_sees_many_more_pixels(tune: str, side: int, images: int, is_larger: bool) -> None:
    def plan(tune: str, side: int, images: int) -> FeaturePlan:
        config: Any = SimpleNamespace(tune=SimpleNamespace(what=tune), image_size=side)
        splits: Any = SimpleNamespace(train=range(images))
        unused: Any = None
        return FeaturePlan(
            config=config, splits=splits, model=unused, pools={}, changes=(), choices=(), image_seconds=1.0
        )

    first, second = plan("probe", 112, 100), plan(tune, side, images)
    assert second.is_larger_than(first) is is_larger
    assert not first.is_larger_than(second)


@pytest.mark.parametrize(("seconds", "batches"), [(0.0, 5), (0.05, 3), (0.2, 2)])
def test_large_networks_are_timed_with_fewer_batches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float, batches: int
) -> None:
    """The time of a batch is taken from the budget, too."""
    sizes: list[int] = []

    def compute(images: Tensor) -> None:
        sizes.append(len(images))
        time.sleep(seconds)

    monkeypatch.setattr(timing, "MAX_SECONDS", 0.12)
    items = open_dataset(class_folders(tmp_path, {"red": 2, "green": 3}, size=(16, 16))).splits["train"]
    network = SimpleNamespace(config=SimpleNamespace(step_hw=(4, 4), image_hw=(16, 16)))
    model: Any = SimpleNamespace(preprocess=Preprocess(size=(16, 16)), model=network, features=compute)
    measured = timing.time_image(model, items)
    assert sizes == [4] * batches
    assert seconds / 4 <= measured < seconds / 4 + 0.05
