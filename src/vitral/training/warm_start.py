"""Start from a checkpoint: make its images fit the time, compute their features, and fit the linear probe."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from math import ceil, lcm, prod

import torch

from vitral.data.dataset import DatasetIndex, Item
from vitral.data.splits import Splits, sample_items
from vitral.devices import keep_freed_memory
from vitral.inference.loaded_model import LoadedModel
from vitral.model.network import Network
from vitral.model.vit import ViT
from vitral.preprocess import Preprocess
from vitral.runs import Run
from vitral.training.budget import MIN_SIDE, MIN_SIDE_STEP, REPORT_SECONDS, Budget, Workload, fit_plan
from vitral.training.config import ResolvedConfig, TrainConfig
from vitral.training.events import Chosen, Event, Warned
from vitral.training.networks import build_model
from vitral.training.probe import (
    Head,
    Probe,
    ProbeFeatures,
    choose_pools,
    compute_features,
    fit_probes,
    load_heads,
    measuring,
    with_head,
    with_pool,
)
from vitral.training.state import check_unreadable
from vitral.training.timing import time_image
from vitral.training.tokens import (
    TokenPlan,
    TokenSet,
    affordable_views,
    compute_tokens,
    count_patches,
    restore_tokens,
    token_bytes,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class WarmStart:
    """A run from a checkpoint before its first step."""

    config: ResolvedConfig
    splits: Splits
    network: Network
    """The checkpoint with the probe as its head."""
    preprocess: Preprocess
    choices: tuple[Chosen, ...] = ()
    probe: Probe | None = None
    """None in a resumed run, whose heads are in its state."""
    heads: tuple[Head, Head] | None = None
    """The heads of the probe: fitted to the training images, and to the validation images as well."""
    tokens: TokenSet | None = None
    image_seconds: float = 0.0
    """Measured time of a forward pass, with reading the image."""


def start_from_checkpoint(
    requested: TrainConfig, config: ResolvedConfig, dataset: DatasetIndex, splits: Splits, budget: Budget | None
) -> Generator[Event, None, WarmStart]:
    """Start a new run: choose what fits into the time, warn of changed weights, and fit a linear probe."""
    if config.device == "cpu":
        keep_freed_memory()
    network, preprocess, changes = build_model(config, len(dataset.classes))
    loaded, limited = as_loaded(network, preprocess, config, dataset), limit_splits(splits, config)
    choices: list[Chosen] = []
    if budget is None or isinstance(requested, ResolvedConfig):  # the latter was planned before its run was killed
        yield estimate_time(loaded, config, limited)
    else:
        smaller, choices = fit_to_budget(budget, loaded, config, limited, requested)
        if smaller.image_size != config.image_size:
            network, preprocess, changes = build_model(smaller, len(dataset.classes))
        config, limited = smaller, limit_splits(splits, smaller)
    splits = limited
    config, lack_of_space = limit_views_to_disk(config, network, splits)
    choices += lack_of_space
    yield from choices
    yield from (Warned(message=f"{config.from_weights}: {change}") for change in changes)
    pools, pool = choose_pools(network, config), network.config.pool
    model = as_loaded(with_pool(network, list(pools)[-1]), preprocess, config, dataset)
    features, tokens = yield from _compute(model, config, dataset, splits)
    check_unreadable(features.unreadable, len(splits.train), config.max_bad_fraction)
    can_refit = config.refit and config.tune.what != "probe"
    probe = yield from fit_probes(
        features, config, names=dataset.classes, pools=pools, groups=splits.groups, can_refit=can_refit
    )
    if probe.pool != pool:
        config = replace(config, network={**config.network, "pool": probe.pool, "class_token": True})
    return WarmStart(
        config=config,
        splits=splits,
        network=with_head(with_pool(model.model, probe.pool), probe.head),
        preprocess=preprocess,
        choices=tuple(choices),
        probe=probe,
        heads=(probe.head, probe.final_head),
        tokens=tokens,
        image_seconds=_time_per_image(features, model, splits),
    )


def _time_per_image(features: ProbeFeatures, model: LoadedModel, splits: Splits) -> float:
    """Return the seconds of a forward pass: those of the features, unless most of them were cached."""
    if features.passes < len(splits.train) / 2:
        return time_image(model, splits.train)
    return features.seconds / features.passes


def _compute(
    model: LoadedModel, config: ResolvedConfig, dataset: DatasetIndex, splits: Splits
) -> Generator[Event, None, tuple[ProbeFeatures, TokenSet | None]]:
    """Return the features of the probe and, if blocks are trained on them, the tokens of the lower blocks."""
    train, validation = splits.train, splits.validation
    if config.tune.what == "probe" and config.refit:
        train, validation = (*train, *validation), ()
    elif validation is train:
        validation = ()
    if config.tune.views:
        plan, work = plan_tokens(model.model, config, splits), count_work(model.model, config, splits)
        tokens, features = yield from _compute_with_tokens(model, train, validation, plan, passes=work.feature_passes)
        return features, tokens
    mirrored = mirrors_features(config)
    features = yield from compute_features(model, train, validation, mirrored=mirrored, all_views=config.refit)
    return features, None


def _compute_with_tokens(
    model: LoadedModel, train: Sequence[Item], validation: Sequence[Item], plan: TokenPlan, *, passes: float
) -> Generator[Event, None, tuple[TokenSet, ProbeFeatures]]:
    """Return the features of the probe together with the tokens that they are computed from."""
    start = time.perf_counter()
    computing = compute_tokens(model, (*train, *validation), plan)
    tokens, pooled = yield from measuring(computing, "features")
    trained = tokens.rows_before(len(train))
    features = ProbeFeatures(
        train=[pooled[:trained]],
        labels=tokens.labels[:trained],
        validation=[pooled[trained:]] if len(pooled) > trained else [],
        validation_labels=tokens.labels[trained:],
        items=[tokens.items[int(index)] for index in tokens.indices],
        seconds=time.perf_counter() - start,
        passes=passes,
        unreadable=tokens.unreadable,
    )
    return tokens, features


def restore_warm_start(
    config: ResolvedConfig, dataset: DatasetIndex, splits: Splits, run: Run
) -> Generator[Event, None, WarmStart]:
    """Continue a run: build its network, and read or compute the tokens of its lower blocks."""
    splits = limit_splits(splits, config)
    network, preprocess, _ = build_model(config, len(dataset.classes))
    head, final_head = load_heads(run.probe)
    tokens = None
    if config.tune.views:
        model = as_loaded(network, preprocess, config, dataset)
        plan = plan_tokens(network, config, splits)
        restoring = restore_tokens(model, (*splits.train, *splits.validation), plan)
        tokens = yield from measuring(restoring, "features")
    return WarmStart(
        config=config,
        splits=splits,
        network=with_head(network, head),
        preprocess=preprocess,
        heads=(head, final_head),
        tokens=tokens,
    )


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


# ---- what fits ----


def fit_to_budget(
    budget: Budget, model: LoadedModel, config: ResolvedConfig, splits: Splits, requested: TrainConfig
) -> tuple[ResolvedConfig, list[Chosen]]:
    """Choose the size, the number of images and whether to train by the speed of a forward pass.

    Sizes and ways that were requested stay.
    """
    side, seconds = config.image_size, time_image(model, splits.train)
    height = side if isinstance(side, int) else side[0]
    workloads = {height: count_work(model.model, config, splits)}
    if requested.image_size == "auto" and isinstance(side, int):
        multiple = lcm(*model.model.config.step_hw)
        step = multiple * ceil(MIN_SIDE_STEP / multiple)
        for smaller in range(height - step, MIN_SIDE - 1, -step):
            workloads[smaller] = count_work(model.model, config, splits, smaller)
    plan = fit_plan(
        workloads,
        image_seconds=seconds,
        budget=budget.left,
        can_skip_training=requested.tune.what == "auto",
        classes=len(model.labels),
    )
    work = workloads[height]
    reason = f"everything at {height} pixels would take {work.seconds(seconds) / 60:.1f} minutes"
    changes: dict[str, tuple[object, object]] = {
        "image_size": (plan.side, height),
        "tune.views": (1 + plan.extra_views, 1 + work.extra_views),
        "max_train_images": (plan.train, work.train),
        "max_test_images": (plan.test, work.test),
    }
    if not plan.is_trained:
        changes["tune.what"] = ("probe", config.tune.what)
        del changes["tune.views"]
    choices = [Chosen(name=name, value=new, reason=reason) for name, (new, old) in changes.items() if new != old]
    config = replace(
        config,
        image_size=plan.side if isinstance(side, int) else side,
        max_train_images=plan.train if plan.train < work.train else config.max_train_images,
        max_test_images=plan.test if plan.test < work.test else config.max_test_images,
    )
    if plan.is_trained:
        views = 1 + plan.extra_views if config.tune.views else 0
        return replace(config, tune=replace(config.tune, views=views)), choices
    return as_probe(config), choices


def as_probe(config: ResolvedConfig) -> ResolvedConfig:
    """Return the settings of a run that takes no steps after the linear probe."""
    tune, optim = replace(config.tune, what="probe", views=0), replace(config.optim, warmup_steps=0)
    return replace(config, tune=tune, optim=optim, epochs=0)


def mirrors_features(config: ResolvedConfig) -> bool:
    """Return whether a probe sees mirrored images as well. A time budget is better spent on larger images."""
    return config.augment.flip > 0 and config.minutes is None


def count_work(network: Network, config: ResolvedConfig, splits: Splits, side: int | None = None) -> Workload:
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
    )


def estimate_time(model: LoadedModel, config: ResolvedConfig, splits: Splits) -> Chosen:
    """Return the estimated time of a run without a time budget."""
    seconds, work = time_image(model, splits.train), count_work(model.model, config, splits)
    epochs = float(config.epochs)
    minutes = work.seconds(seconds, epochs=epochs) / 60 + REPORT_SECONDS / 60
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
