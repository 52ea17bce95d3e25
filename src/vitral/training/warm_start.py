"""Start from a checkpoint: make its images fit the time, compute their features, and fit the linear probe."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch

from vitral.data.dataset import DatasetIndex, Item
from vitral.data.splits import Splits, sample_items
from vitral.inference.loaded_model import LoadedModel
from vitral.model.network import Network
from vitral.model.vit import ViT
from vitral.preprocess import Preprocess
from vitral.runs import Run
from vitral.training.budget import REPORT_SECONDS, Budget, Workload, fit_plan
from vitral.training.config import ResolvedConfig
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
from vitral.training.timing import time_image
from vitral.training.tokens import (
    TokenPlan,
    TokenSet,
    affordable_views,
    compute_tokens,
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


def begin(
    config: ResolvedConfig, dataset: DatasetIndex, splits: Splits, budget: Budget | None, *, may_shrink: bool
) -> Generator[Event, None, WarmStart]:
    """Start a new run: choose what fits into the time, warn of changed weights, and fit a linear probe."""
    network, preprocess, changes = build_model(config, len(dataset.classes))
    choices: list[Chosen] = []
    if budget is not None:
        loaded = as_loaded(network, preprocess, config, dataset)
        smaller, choices = fit_into(budget, loaded, config, splits, may_shrink=may_shrink)
        if smaller.image_size != config.image_size:
            network, preprocess, changes = build_model(smaller, len(dataset.classes))
        config, splits = smaller, limit_splits(splits, smaller)
    else:
        yield estimate_time(as_loaded(network, preprocess, config, dataset), config, splits)
    config, lack_of_space = fit_onto_disk(config, network, splits)
    choices += lack_of_space
    yield from choices
    yield from (Warned(message=f"{config.from_weights}: {change}") for change in changes)
    pools, pool = choose_pools(network, config), network.config.pool
    model = as_loaded(with_pool(network, list(pools)[-1]), preprocess, config, dataset)
    features, tokens = yield from _compute(model, config, dataset, splits)
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
        image_seconds=features.seconds / features.passes,
    )


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
        plan = plan_tokens(config, dataset, splits)
        tokens, features = yield from _compute_with_tokens(model, train, validation, plan)
        return features, tokens
    mirrored = config.augment.flip > 0
    features = yield from compute_features(model, train, validation, mirrored=mirrored, all_views=config.refit)
    return features, None


def _compute_with_tokens(
    model: LoadedModel, train: Sequence[Item], validation: Sequence[Item], plan: TokenPlan
) -> Generator[Event, None, tuple[TokenSet, ProbeFeatures]]:
    """Return the features of the probe together with the tokens that they are computed from."""
    start = time.perf_counter()
    computing = compute_tokens(model, (*train, *validation), plan)
    tokens, views = yield from measuring(computing, "features")
    trained = tokens.rows_before(len(train))
    features = ProbeFeatures(
        train=[view[:trained] for view in views],
        labels=tokens.labels[:trained],
        validation=[part for view in views if len(part := view[trained:])],
        validation_labels=tokens.labels[trained:],
        items=[tokens.items[int(index)] for index in tokens.indices],
        seconds=time.perf_counter() - start,
    )
    return tokens, features


def resume(
    config: ResolvedConfig, dataset: DatasetIndex, splits: Splits, run: Run
) -> Generator[Event, None, WarmStart]:
    """Continue a run: build its network, and read or compute the tokens of its lower blocks."""
    splits = limit_splits(splits, config)
    network, preprocess, _ = build_model(config, len(dataset.classes))
    head, final_head = load_heads(run.probe)
    tokens = None
    if config.tune.views:
        model = as_loaded(network, preprocess, config, dataset)
        plan = plan_tokens(config, dataset, splits)
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


def plan_tokens(config: ResolvedConfig, dataset: DatasetIndex, splits: Splits) -> TokenPlan:
    """Return which tokens the run trains on. Validation images have all views if they are trained on in the end."""
    return TokenPlan(
        trained=config.tune.blocks,
        views=config.tune.views,
        viewed=len(splits.train) + (len(splits.validation) if config.refit else 0),
        augment=config.augment,
        seed=config.seed,
        classes=len(dataset.classes),
        multi_label=dataset.multi_label,
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


def fit_into(
    budget: Budget, model: LoadedModel, config: ResolvedConfig, splits: Splits, *, may_shrink: bool
) -> tuple[ResolvedConfig, list[Chosen]]:
    """Choose the size and the number of images by the speed of a forward pass, so that the run ends in time."""
    side, work, seconds = config.image_size, count_work(model, config, splits), time_image(model, splits.train)
    height = side if isinstance(side, int) else side[0]
    step = model.model.config.step_hw[0] if may_shrink and isinstance(side, int) else height
    plan = fit_plan(work, side=height, step=step, image_seconds=seconds, budget=budget.left)
    views = min(plan.views, config.tune.views)
    reason = f"everything at {height} pixels would take {work.seconds(seconds) / 60:.1f} minutes"
    smaller = {
        "image_size": (plan.side, height),
        "tune.views": (views, config.tune.views),
        "max_train_images": (plan.train, work.train),
        "max_test_images": (plan.test, work.test),
    }
    choices = [Chosen(name=name, value=new, reason=reason) for name, (new, old) in smaller.items() if new != old]
    config = replace(
        config,
        image_size=plan.side if isinstance(side, int) else side,
        max_train_images=plan.train if plan.train < work.train else config.max_train_images,
        max_test_images=plan.test if plan.test < work.test else config.max_test_images,
        tune=replace(config.tune, views=views),
    )
    return config, choices


def count_work(model: LoadedModel, config: ResolvedConfig, splits: Splits) -> Workload:
    """Return what a run has to compute."""
    return Workload(
        train=len(splits.train),
        validation=0 if splits.validation is splits.train else len(splits.validation),
        test=len(splits.test),
        views=config.tune.views or 1 + (config.augment.flip > 0),
        step_cost=step_cost(config, model.model),
    )


def estimate_time(model: LoadedModel, config: ResolvedConfig, splits: Splits) -> Chosen:
    """Return the estimated time of a run without a time budget."""
    seconds, work = time_image(model, splits.train), count_work(model, config, splits)
    epochs = float(config.epochs)
    minutes = work.seconds(seconds, epochs=epochs) / 60 + REPORT_SECONDS / 60
    reason = f"{work.views * work.train:,} training views, {work.test:,} test images, {epochs:.3g} epochs"
    return Chosen(name="estimated time", value=f"{minutes:.1f} minutes", reason=reason)


def step_cost(config: ResolvedConfig, network: Network) -> float:
    """Return the cost of an image in a training step, in forward passes: the backward pass counts as two."""
    if config.tune.what == "probe":
        return 0.0
    if not config.tune.views:
        return 1.2 if config.tune.what == "head" else 3.0
    return 3 * config.tune.blocks / len(network.blocks) * (1 - config.tune.dropped)


def fit_onto_disk(config: ResolvedConfig, network: Network, splits: Splits) -> tuple[ResolvedConfig, list[Chosen]]:
    """Keep the tokens of fewer views if the disk is too small."""
    wanted, images = config.tune.views, len(splits.train) + len(splits.validation)
    if not wanted or not isinstance(network, ViT) or (views := affordable_views(network, images, wanted)) == wanted:
        return config, []
    size = token_bytes(network, images, wanted) / 1e9
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
