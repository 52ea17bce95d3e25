"""Start from a checkpoint: make its images fit the time, compute their features, and fit the linear probe."""

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from vitral.collectives import from_first
from vitral.data.dataset import DatasetIndex, Item
from vitral.data.splits import Splits
from vitral.devices import keep_freed_memory
from vitral.inference.loaded_model import LoadedModel
from vitral.model.network import Network
from vitral.preprocess import Preprocess
from vitral.runs import Run
from vitral.training.budget import (
    CHECK_FRACTION,
    MAX_REPLANS,
    MIN_CHECK_SECONDS,
    Budget,
)
from vitral.training.config import ResolvedConfig, TrainConfig
from vitral.training.events import Chosen, Event, Measuring, Warned
from vitral.training.feature_plan import (
    FeaturePlan,
    Replan,
    as_loaded,
    count_work,
    estimate_time,
    fit_to_budget,
    limit_splits,
    mirrors_features,
    plan_features,
    plan_tokens,
    replan_features,
    warn_short_budget,
)
from vitral.training.networks import build_model
from vitral.training.probe import (
    Head,
    Probe,
    ProbeFeatures,
    compute_features,
    fit_probes,
    load_heads,
    measuring,
    with_head,
    with_pool,
)
from vitral.training.state import check_unreadable
from vitral.training.timing import time_image, time_test_image
from vitral.training.token_views import TokenPlan
from vitral.training.tokens import TokenSet, compute_tokens, restore_tokens


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
    test_seconds: float = 0.0
    """Measured time of a test image."""


def start_from_checkpoint(
    requested: TrainConfig, config: ResolvedConfig, dataset: DatasetIndex, splits: Splits, budget: Budget | None
) -> Generator[Event, None, WarmStart]:
    """Start a new run: choose what fits into the time, warn of changed weights, and fit a linear probe."""
    if config.device == "cpu":
        keep_freed_memory()
    network, preprocess, changes = build_model(config, len(dataset.classes))
    loaded, limited = as_loaded(network, preprocess, config, dataset), limit_splits(splits, config)
    prepare = partial(plan_features, dataset=dataset, splits=splits, built=(network, preprocess, changes))
    replan: Replan | None = None
    if budget is None or isinstance(requested, ResolvedConfig):  # the latter was planned before its run was killed
        yield estimate_time(loaded, config, limited)
        plan = prepare(config)
    else:
        seconds = time_image(loaded, limited.train)
        test_cost = time_test_image(loaded, limited.train, seconds) / seconds
        fit = partial(fit_to_budget, budget, loaded, config, limited, requested, test_cost=test_cost)
        plan = prepare(*fit(seconds, before=config))
        replan = partial(replan_features, fit=fit, prepare=prepare, side=config.image_size)
        yield from warn_short_budget(budget, plan)
    yield from plan.choices
    yield from (Warned(message=f"{config.from_weights}: {change}") for change in plan.changes)
    plan, image_seconds, features, tokens = yield from _compute_in_time(plan, dataset, replan, restarts=MAX_REPLANS)
    config, splits = plan.config, plan.splits
    keys = {item.key for item in splits.train}
    check_unreadable([bad for bad in features.unreadable if bad[0] in keys], len(keys), config.max_bad_fraction)
    can_refit = config.refit and config.tune.what != "probe"
    probe = yield from fit_probes(
        features, config, names=dataset.classes, pools=plan.pools, groups=splits.groups, can_refit=can_refit
    )
    if probe.pool != network.config.pool:
        config = replace(config, network={**config.network, "pool": probe.pool, "class_token": True})
    return WarmStart(
        config=config,
        splits=splits,
        network=with_head(with_pool(plan.model.model, probe.pool), probe.head),
        preprocess=plan.model.preprocess,
        choices=plan.choices,
        probe=probe,
        heads=(probe.head, probe.final_head),
        tokens=tokens,
        image_seconds=image_seconds,
        test_seconds=time_test_image(plan.model, splits.train, image_seconds),
    )


def _compute_in_time(
    plan: FeaturePlan, dataset: DatasetIndex, replan: Replan | None, *, restarts: int
) -> Generator[Event, None, tuple[FeaturePlan, float, ProbeFeatures, TokenSet | None]]:
    """Compute the features, and return them with their plan and the seconds of a forward pass.

    The first seconds of a run decide its plan, but other programs may have slowed them down. So the features start over
    with another plan if the machine is much faster or slower than expected. Complete features start over only if the
    time that is left allows a larger plan.
    """
    minutes = plan.config.minutes
    check_after = max(MIN_CHECK_SECONDS, CHECK_FRACTION * 60 * minutes) if minutes and replan and restarts else None
    start: tuple[float, int] | None = None
    with closing(_compute(plan.model, plan.config, dataset, plan.splits)) as computing:
        while True:
            try:
                event = next(computing)
            except StopIteration as end:
                features, tokens = end.value
                image_seconds = _time_per_image(features, plan.model, plan.splits)
                other = replan(plan, image_seconds) if replan and restarts else None
                if other is None or not other.is_larger_than(plan):
                    return plan, image_seconds, features, tokens
                if tokens is not None:
                    tokens.remove()
                break
            yield event
            if check_after is None or not isinstance(event, Measuring):
                continue
            now, (first, done) = from_first(time.perf_counter()), start or (0.0, 0)
            if start is None:  # the first batch warms up
                start = now, event.done
            elif now - first >= check_after and event.done > done:
                check_after, seconds = None, (now - first) / (event.done - done)
                assert replan is not None
                if 2 * event.done < event.total and (other := replan(plan, seconds)):
                    break
    yield from other.choices[len(plan.choices) :]
    return (yield from _compute_in_time(other, dataset, replan, restarts=restarts - 1))


def _time_per_image(features: ProbeFeatures, model: LoadedModel, splits: Splits) -> float:
    """Return the seconds of a forward pass, the shorter of two measurements: other programs may have slowed one down.

    Features that were cached took no time.
    """
    fastest = time_image(model, splits.train)
    is_cached = features.passes < len(splits.train) / 2
    return from_first(fastest if is_cached else min(fastest, features.seconds / features.passes))


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
        passes=passes * tokens.computed,
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
