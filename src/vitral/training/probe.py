"""The linear probe that every fine-tuning starts from: the best linear classifier of the checkpoint's features."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from vitral.data.dataset import DatasetIndex, Item, class_counts
from vitral.data.scan import Progress
from vitral.data.splits import Splits
from vitral.evaluation.feature_cache import cached_features
from vitral.evaluation.linear_probe import LinearProbe, choose_folds, fit_probe
from vitral.evaluation.metrics import Scores, score, wilson
from vitral.inference.loaded_model import LoadedModel
from vitral.inference.pipeline import ModelOutputs
from vitral.model.config import Pool, ViTConfig
from vitral.model.network import Network, build
from vitral.training.config import ResolvedConfig
from vitral.training.events import Candidate, Event, Measuring
from vitral.training.mixing import balanced_weights

POOLS = {"token": "class token", "mean": "mean of patches", "token+mean": "class token and mean"}


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbedNetwork:
    """A network whose head is a linear probe."""

    network: Network
    scores: Scores
    """On images that the probe was not fitted to: the validation split, or out of fold."""
    candidates: tuple[Candidate, ...]
    """One per kind of pooling that was tried, and the best of them on the validation split."""


def fit_head(
    model: LoadedModel, config: ResolvedConfig, dataset: DatasetIndex, splits: Splits
) -> Generator[Event, None, ProbedNetwork]:
    """Fit a probe to each kind of pooled features, and return the network with the best one as its head.

    The probe is fitted to the training images. With tune.what=probe it is the final model and therefore also fitted to
    the validation images, if they were taken from the training images.
    """
    start = time.perf_counter()
    pools = choose_pools(model.model, config)
    model = replace(model, model=with_pool(model.model, list(pools)[-1]))
    train, validation = splits.train, splits.validation
    if config.tune.what == "probe" and splits.is_validation_carved:
        train, validation = (*train, *validation), ()
    elif validation is train:
        validation = ()
    views, held_out = yield from _compute_features(model, train, validation, mirrored=config.augment.flip > 0)
    feature_seconds = time.perf_counter() - start
    labels, classes = views[0].labels, len(dataset.classes)
    folds = choose_folds(labels, seed=config.seed)
    is_balanced = config.loss.class_weights == "balanced"
    weights = balanced_weights(class_counts(train, classes)) if is_balanced else None
    probes: dict[str, LinearProbe] = {}
    scores: dict[str, Scores] = {}
    candidates: list[Candidate] = []
    for pool, columns in pools.items():
        start = time.perf_counter()
        first, *others = (view.outputs[:, columns] for view in views)
        probe = fit_probe(first, labels, classes=classes, folds=folds, extra_views=others, class_weights=weights)
        probes[pool], scores[pool] = probe, score(probe.out_of_fold, labels)
        name, evidence = f"probe ({POOLS.get(pool, 'features')})", f"cross-validation on {len(labels):,} images"
        seconds = feature_seconds + time.perf_counter() - start
        candidates.append(describe_candidate(name, scores[pool], evidence, seconds=seconds))
    best = min(scores, key=lambda pool: scores[pool].loss)
    chosen, index = scores[best], list(pools).index(best)
    if held_out is not None:
        chosen, index = score(probes[best](held_out.outputs[:, pools[best]]), held_out.labels), len(candidates)
        evidence = f"{chosen.images:,} validation images"
        candidates.append(describe_candidate("probe", chosen, evidence, seconds=feature_seconds))
    candidates[index] = replace(candidates[index], chosen=True)
    yield from candidates
    network = with_head(with_pool(model.model, best), probes[best])
    return ProbedNetwork(network=network, scores=chosen, candidates=tuple(candidates))


def choose_pools(network: Network, config: ResolvedConfig) -> dict[str, slice]:
    """Return the kinds of pooling to try, each with its columns in the features of the last, which is the widest."""
    given, width = network.config, network.config.width
    is_plain = isinstance(given, ViTConfig) and given.has_class_token and not given.norm_after_pool
    if not is_plain or given.pool not in POOLS or given.representation is not None or "pool" in config.network:
        return {given.pool: slice(None)}
    return {"token": slice(0, width), "mean": slice(width, 2 * width), "token+mean": slice(0, 2 * width)}


def with_pool(network: Network, pool: str) -> Network:
    """Return a network with another pooling and a new head; the same network if it has this pooling."""
    config = network.config
    if config.pool == pool:
        return network
    assert isinstance(config, ViTConfig)
    config = replace(config, pool=cast("Pool", pool), class_token=config.has_class_token)
    pooled = build(config).to(next(network.parameters()))
    kept = {name: tensor for name, tensor in network.state_dict().items() if not name.startswith("head.")}
    pooled.load_state_dict(kept, strict=False)
    return pooled.train(network.training)


@torch.no_grad()
def with_head(network: Network, probe: LinearProbe) -> Network:
    """Return the network with the weights of the probe in its head."""
    weight, bias = network.head.parameters()
    weight.copy_(probe.weight)
    bias.copy_(probe.bias)
    return network


def describe_candidate(name: str, scores: Scores, evidence: str, *, seconds: float, chosen: bool = False) -> Candidate:
    interval = wilson(scores.top1 * scores.images, scores.images)
    return Candidate(
        name=name,
        top1=scores.top1,
        interval=interval,
        loss=scores.loss,
        evidence=evidence,
        seconds=round(seconds, 3),
        chosen=chosen,
    )


# ---- features ----


def _compute_features(
    model: LoadedModel, train: Sequence[Item], validation: Sequence[Item], *, mirrored: bool
) -> Generator[Event, None, tuple[list[ModelOutputs], ModelOutputs | None]]:
    """Return the features of the training images, also of mirrored ones, and those of the validation images."""
    views = [(train, False), (train, True)] if mirrored else [(train, False)]
    passes = [*views, *([(validation, False)] if validation else [])]
    total, done = sum(len(items) for items, _ in passes), 0
    features: list[ModelOutputs] = []
    for items, is_mirrored in passes:
        progress = _features_of(model, items, mirrored=is_mirrored)
        features.append((yield from measuring(progress, "features", before=done, total=total)))
        done += len(items)
    return features[: len(views)], features[-1] if validation else None


def _features_of(
    model: LoadedModel, items: Sequence[Item], *, mirrored: bool
) -> Generator[Progress, None, ModelOutputs]:
    """Return the features of some images, from the cache if they are there."""
    return (yield from cached_features(model, items, mirrored=mirrored, multi_label=model.multi_label))


def measuring(
    progress: Generator[Progress, None, ModelOutputs], what: str, *, before: int = 0, total: int | None = None
) -> Generator[Event, None, ModelOutputs]:
    """Re-emit loader progress as Measuring events; `before` images of `total` are done already."""
    while True:
        try:
            event = next(progress)
        except StopIteration as end:
            return end.value
        yield Measuring(what=what, done=before + event.done, total=total or event.total)
