"""Plan what a run from a checkpoint computes before its linear probe, so that it fits the time and the disk."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, lcm, prod

import torch

from vitral.data.dataset import DatasetIndex
from vitral.data.splits import Splits, sample_items
from vitral.inference.engines.choosing import SUPPORTED
from vitral.inference.loaded_model import LoadedModel
from vitral.inference.torch_backend import with_engine
from vitral.model.network import Network
from vitral.model.vit import ViT
from vitral.preprocess import Preprocess
from vitral.training.budget import (
    MIN_SIDE,
    MIN_SIDE_STEP,
    SPEED_TOLERANCE,
    Budget,
    Workload,
    fit_plan,
    last_seconds,
)
from vitral.training.config import ResolvedConfig, TrainConfig
from vitral.training.events import Chosen, Warned
from vitral.training.networks import build_model
from vitral.training.probe import choose_pools, with_pool
from vitral.training.timing import time_image, time_test_image
from vitral.training.token_views import TokenPlan
from vitral.training.tokens import affordable_views, count_patches, token_bytes

BATCH = 64
"""Images per batch of the features."""
WORTHWHILE_GROWTH = 1.5
"""Complete features are computed again if the machine turns out to have time for so many times the pixels."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FeaturePlan:
    """The features to compute before the probe is fitted: settings that fit the time, with their network and images."""

    config: ResolvedConfig
    splits: Splits
    model: LoadedModel
    """With the widest pooling."""
    pools: Mapping[str, slice]
    changes: Sequence[str]
    """Changes of weights that do not fit the settings."""
    choices: tuple[Chosen, ...]
    image_seconds: float
    """Expected time of a forward pass; 0 without a time budget."""

    def is_larger_than(self, other: "FeaturePlan") -> bool:
        """Return whether this plan trains and the other stops at a probe, or learns from many more pixels."""
        trains, trained = (plan.config.tune.what != "probe" for plan in (self, other))
        if trains != trained:
            return trains
        pixels, before = (len(plan.splits.train) * prod(hw_of(plan.config.image_size)) for plan in (self, other))
        return pixels > WORTHWHILE_GROWTH * before


Replan = Callable[[FeaturePlan, float], FeaturePlan | None]
"""Return another plan if the given seconds per image call for one."""


def plan_features(
    config: ResolvedConfig,
    choices: Sequence[Chosen] = (),
    image_seconds: float = 0.0,
    *,
    dataset: DatasetIndex,
    splits: Splits,
    built: tuple[Network, Preprocess, list[str]],
) -> FeaturePlan:
    """Return the images of these settings and their network, which is the one that was `built` unless its size changes.

    There are as many views as the disk has room for.
    """
    network, preprocess, changes = built
    if network.config.image_hw != hw_of(config.image_size):
        network, preprocess, changes = build_model(config, len(dataset.classes))
    splits = limit_splits(splits, config)
    config, lack_of_space = limit_views_to_disk(config, network, splits)
    pools = choose_pools(network, config)
    model = as_loaded(with_pool(network, list(pools)[-1]), preprocess, config, dataset)
    model, engine = choose_feature_engine(model, config, splits)
    return FeaturePlan(
        config=config,
        splits=splits,
        model=model,
        pools=pools,
        changes=changes,
        choices=(*choices, *lack_of_space, *engine),
        image_seconds=image_seconds,
    )


def choose_feature_engine(
    model: LoadedModel, config: ResolvedConfig, splits: Splits
) -> tuple[LoadedModel, tuple[Chosen, ...]]:
    """Return the model with the engine that computes the features of the probe."""
    if config.engine == "torch":
        return model, ()
    if config.tune.views:  # their features come with the tokens of the lower blocks
        reason = "this run needs the tokens of the lower blocks, which other engines do not return"
        return model, (Chosen(name="engine", value=model.computed_by, reason=reason),)
    precision = "auto" if config.engine == "auto" or config.precision == "float16" else config.precision
    if config.engine != "auto" and precision not in SUPPORTED[config.engine]:
        precision = "float32"
    items = (*splits.train, *splits.validation)
    model, reason = with_engine(model, config.engine, precision, batch=BATCH, items=items)
    reason = reason or "too few images to measure engines"
    return model, (Chosen(name="engine", value=model.computed_by, reason=reason.removeprefix("engine: ")),)


def replan_features(
    plan: FeaturePlan,
    seconds: float,
    *,
    fit: Callable[..., tuple[ResolvedConfig, list[Chosen], float]],
    prepare: Callable[..., FeaturePlan],
    side: int | tuple[int, int],
) -> FeaturePlan | None:
    """Return another plan if an image takes so many seconds, or None if that is about as expected."""
    slowdown = seconds / plan.image_seconds
    if 1 / SPEED_TOLERANCE < slowdown < SPEED_TOLERANCE:
        return None
    (height, _), (planned, _) = hw_of(side), hw_of(plan.config.image_size)
    config, choices, image_seconds = fit(seconds * (height / planned) ** 2, before=plan.config)
    return prepare(config, (*plan.choices, *choices), image_seconds) if choices else None


def plan_tokens(network: Network, config: ResolvedConfig, splits: Splits) -> TokenPlan:
    """Return which tokens the run trains on. Validation images have all views if they are trained on in the end."""
    assert isinstance(network, ViT)
    return TokenPlan(
        trained=config.tune.blocks,
        views=config.tune.views,
        viewed=len(splits.train) + (len(splits.validation) if config.refit else 0),
        view_patches=count_patches(network.config, config.tune.dropped)[1],
        augment=config.augment,
        seed=config.seed,
        workers=config.workers,
    )


def as_loaded(network: Network, preprocess: Preprocess, config: ResolvedConfig, dataset: DatasetIndex) -> LoadedModel:
    """Return the network ready to run, in the precision of the run."""
    device = torch.device(config.device)
    return LoadedModel(
        model=network.to(device).eval(),
        preprocess=preprocess,
        labels=dataset.classes,
        has_names=True,
        multi_label=dataset.multi_label,
        device=device,
        precision=config.precision,
        run=None,
    )


def hw_of(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


# ---- what fits ----


def fit_to_budget(
    budget: Budget,
    model: LoadedModel,
    config: ResolvedConfig,
    splits: Splits,
    requested: TrainConfig,
    seconds: float,
    *,
    before: ResolvedConfig,
    test_cost: float,
) -> tuple[ResolvedConfig, list[Chosen], float]:
    """Choose the size, the number of images and whether to train, if a forward pass takes so many seconds per image.

    A test image takes `test_cost` times as long. Sizes and ways that were requested stay. Return the settings, the
    choices that differ from those `before`, and the time of a forward pass at the chosen size.
    """
    side = config.image_size
    height, _ = hw_of(side)
    count = partial(count_work, model.model, config, splits, test_cost=test_cost)
    workloads = {height: count()}
    if requested.image_size == "auto" and isinstance(side, int):
        multiple = lcm(*model.model.config.step_hw)
        step = multiple * ceil(MIN_SIDE_STEP / multiple)
        for smaller in range(height - step, MIN_SIDE - 1, -step):
            workloads[smaller] = count(side=smaller)
    plan = fit_plan(
        workloads,
        image_seconds=seconds,
        budget=budget.left,
        can_skip_training=requested.tune.what == "auto",
        classes=len(model.labels),
    )
    work = workloads[height]
    fitted = replace(
        config,
        image_size=plan.side if isinstance(side, int) else side,
        max_train_images=plan.train if plan.train < work.train else config.max_train_images,
        max_test_images=plan.test if plan.test < work.test else config.max_test_images,
    )
    views = 1 + plan.extra_views if config.tune.views else 0
    fitted = replace(fitted, tune=replace(fitted.tune, views=views)) if plan.is_trained else as_probe(fitted)
    reason = f"everything at {height} pixels would take {work.seconds(seconds) / 60:.1f} minutes"
    return fitted, list_changes(before, fitted, reason), seconds * (plan.side / height) ** 2


def list_changes(before: ResolvedConfig, after: ResolvedConfig, reason: str) -> list[Chosen]:
    """Return the settings of the plan that differ."""
    names = ("image_size", "max_train_images", "max_test_images")
    changes = {name: (getattr(before, name), getattr(after, name)) for name in names}
    changes["tune.what"] = before.tune.what, after.tune.what
    if after.tune.what != "probe":
        changes["tune.views"] = before.tune.views, after.tune.views
    return [
        Chosen(name=name, value="all" if new is None else new, reason=reason)
        for name, (old, new) in changes.items()
        if old != new
    ]


def warn_short_budget(budget: Budget, plan: FeaturePlan) -> Iterator[Warned]:
    """Warn if the run takes longer than its time budget, whatever is left out."""
    if budget.left >= 1:
        return
    config, images = plan.config, len(plan.splits.train)
    work = count_work(plan.model.model, config, plan.splits)
    seconds = work.seconds(plan.image_seconds, epochs=0) + budget.last_seconds
    smallest = f"the smallest plan, a linear probe on {images:,} images and its report"
    yield Warned(message=f"--minutes {config.minutes:g} is too short: {smallest}, takes about {seconds:.0f} s more.")


def as_probe(config: ResolvedConfig) -> ResolvedConfig:
    """Return the settings of a run that takes no steps after the linear probe."""
    tune, optim = replace(config.tune, what="probe", views=0), replace(config.optim, warmup_steps=0)
    return replace(config, tune=tune, optim=optim, epochs=0)


def mirrors_features(config: ResolvedConfig) -> bool:
    """Return whether a probe sees mirrored images as well. A time budget is better spent on larger images."""
    return config.augment.flip > 0 and config.minutes is None


def count_work(
    network: Network, config: ResolvedConfig, splits: Splits, side: int | None = None, *, test_cost: float = 1.0
) -> Workload:
    """Return what a run has to compute with images of `side` pixels (default: the size of the network)."""
    extra_views, view_cost, step_cost, check_cost = int(mirrors_features(config)), 1.0, 3.0, 1.0
    if config.tune.what in ("probe", "head"):
        step_cost = 0.0 if config.tune.what == "probe" else 1.2
    if config.tune.views:
        assert isinstance(network, ViT)
        vit = network.config if side is None else replace(network.config, image_size=side)
        trained = config.tune.blocks / len(network.blocks)
        of_step, of_view = (
            patches / prod(vit.grid(*vit.image_hw)) for patches in count_patches(vit, config.tune.dropped)
        )
        extra_views, view_cost, step_cost = config.tune.views - 1, (1 - trained) * of_view, 3 * trained * of_step
        check_cost = trained
    return Workload(
        train=len(splits.train),
        validation=0 if splits.validation is splits.train else len(splits.validation),
        test=len(splits.test),
        extra_views=extra_views,
        view_cost=view_cost,
        step_cost=step_cost,
        refit=config.refit,
        batch=config.batch_size,
        check_cost=check_cost,
        test_cost=test_cost,
    )


def estimate_time(model: LoadedModel, config: ResolvedConfig, splits: Splits) -> Chosen:
    """Return the estimated time of a run without a time budget."""
    seconds = time_image(model, splits.train)
    work = count_work(model.model, config, splits, test_cost=time_test_image(model, splits.train, seconds) / seconds)
    epochs = float(config.epochs)
    minutes = (work.seconds(seconds, epochs=epochs) + last_seconds(model.model.config, None)) / 60
    views = (1 + work.extra_views) * work.train
    reason = f"{views:,} training views, {work.test:,} test images, {epochs:.3g} epochs"
    return Chosen(name="estimated time", value=f"{minutes:.1f} minutes", reason=reason)


def limit_views_to_disk(
    config: ResolvedConfig, network: Network, splits: Splits
) -> tuple[ResolvedConfig, list[Chosen]]:
    """Keep the tokens of fewer views if the disk is too small."""
    if not config.tune.views:
        return config, []
    assert isinstance(network, ViT)
    plan, images = plan_tokens(network, config, splits), len(splits.train) + len(splits.validation)
    if (views := affordable_views(network, plan, images)) == plan.views:
        return config, []
    size = token_bytes(network, plan, images, plan.views) / 1e9
    choice = Chosen(name="tune.views", value=views, reason=f"the tokens of all views would take {size:.1f} GB")
    return replace(config, tune=replace(config.tune, views=views)), [choice]


def limit_splits(splits: Splits, config: ResolvedConfig) -> Splits:
    """Return the splits with the number of images that the settings allow."""
    train, validation, test = splits.train, splits.validation, splits.test
    if config.max_train_images is not None and config.max_train_images < len(train):
        share = config.max_train_images / len(train)
        is_separate = validation is not train
        train = sample_items(train, config.max_train_images, balanced=True)
        validation = sample_items(validation, ceil(share * len(validation))) if is_separate else train
    if config.max_test_images is not None:
        test = sample_items(test, config.max_test_images)
    return replace(splits, train=train, validation=validation, test=test)
