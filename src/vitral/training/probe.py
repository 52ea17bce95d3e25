"""The linear probe that every fine-tuning starts from: the best linear classifier of the checkpoint's features."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from vitral.data.dataset import Item
from vitral.data.scan import Progress
from vitral.evaluation.feature_cache import cached_features
from vitral.evaluation.label_errors import LabelErrorRow, find_label_errors
from vitral.evaluation.linear_probe import (
    CrossValidation,
    LinearProbe,
    choose_folds,
    cross_validate,
    cross_validate_discriminant,
    refit_probe,
    sample_rows,
)
from vitral.evaluation.metrics import Scores, score, wilson
from vitral.inference.pipeline import ModelOutputs
from vitral.model.config import Pool, ViTConfig
from vitral.model.network import Network, build
from vitral.training.config import ResolvedConfig
from vitral.training.events import Candidate, Event, Measuring
from vitral.training.mixing import balanced_weights
from vitral.weights.formats.safetensors import write_safetensors

if TYPE_CHECKING:
    from vitral.inference.loaded_model import LoadedModel

Result = TypeVar("Result")
POOLS = {"token": "class token", "mean": "mean of patches", "token+mean": "class token and mean"}
METHODS = {"discriminant": "discriminant", "logistic": "logistic regression"}
AVERAGE = "average of both"


class Head(NamedTuple):
    """The parameters of a linear classifier."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """A linear probe as the head of a network."""

    head: Head
    """Fitted to the training images."""
    final_head: Head
    """Fitted to the validation images as well, if they were taken from the training images."""
    pool: str
    scores: Scores
    """On images that the probe was not fitted to: the validation split, or out of fold."""
    candidates: tuple[Candidate, ...]
    """One per kind of pooling that was tried, and the best of them on the validation split."""
    features: Tensor
    """(N, D) of the training and validation images, as the head receives them."""
    labels: Tensor
    unreadable: tuple[tuple[str, str], ...] = ()
    """Names of the images that cannot be read, each with the reason."""
    label_errors: tuple[LabelErrorRow, ...] = ()
    """Training and validation images whose label is probably wrong."""

    def save(self, path: Path) -> None:
        """Write both heads, which a resumed run needs."""
        heads = {"head": self.head, "final_head": self.final_head}
        parts = {f"{name}.{part}": getattr(head, part) for name, head in heads.items() for part in Head._fields}
        write_safetensors(path, {name: tensor.clone().contiguous() for name, tensor in parts.items()}, {})


def load_heads(path: Path) -> tuple[Head, Head]:
    """Return the head of the probe and its final head, as `Probe.save` wrote them."""
    tensors = load_file(path)
    head, final_head = (Head(tensors[f"{name}.weight"], tensors[f"{name}.bias"]) for name in ("head", "final_head"))
    return head, final_head


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeFeatures:
    """The inputs of the head for the training images, in several views, and for the validation images."""

    train: Sequence[Tensor]
    """(N, D) per view."""
    labels: Tensor
    validation: Sequence[Tensor]
    """(N, D) per view; one view unless a head is fitted to them; none without validation images."""
    validation_labels: Tensor
    items: Sequence[Item]
    """The training images, then the validation images."""
    seconds: float
    passes: float
    """Number of forward passes that took these seconds."""
    unreadable: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchedProbe:
    """A kind of probe with its regularization, judged by cross-validation."""

    pool: str
    parts: tuple[CrossValidation, ...]
    """Calibrated linear classifiers, whose average is the probe."""
    scores: Scores
    candidate: Candidate

    @property
    def out_of_fold(self) -> Tensor:
        return average([part.out_of_fold for part in self.parts])


def fit_probes(
    features: ProbeFeatures,
    config: ResolvedConfig,
    *,
    names: Sequence[str],
    pools: Mapping[str, slice],
    groups: Mapping[str, str],
    can_refit: bool,
) -> Generator[Event, None, Probe]:
    """Fit several kinds of probes and return the best by cross-validated loss.

    `names` are those of the classes. Images of one of the `groups` are in one fold.
    """
    labels, classes = features.labels, len(names)
    folds = choose_folds(labels, seed=config.seed, groups=_group_numbers(features.items[: len(labels)], groups))
    weights = _class_weights(labels, config, classes)
    rows = sample_rows(labels, classes=classes, seed=config.seed)
    searched = search_probes(features, pools, folds=folds, rows=rows, classes=classes, class_weights=weights)
    best = min(searched, key=lambda probe: probe.scores.loss)
    columns, chosen, index = pools[best.pool], best.scores, searched.index(best)
    if len(rows) < len(labels):
        views = [view[:, columns] for view in features.train]
        parts = [
            _validate(part, views, labels, folds=folds, classes=classes, class_weights=weights) for part in best.parts
        ]
        best = replace(best, parts=tuple(parts))
    probes, candidates = [part.fit() for part in best.parts], [probe.candidate for probe in searched]
    head = _average_heads(probes)
    final_head, held_out = head, best.out_of_fold[:0]
    if features.validation:
        held_out = F.linear(features.validation[0][:, columns], *head)
        chosen = score(held_out, features.validation_labels)
        index = len(candidates)
        evidence = f"{chosen.images:,} validation images"
        candidates.append(describe_candidate("probe", chosen, evidence, seconds=features.seconds))
        if can_refit:
            final_head = _fit_to_all(probes, features, config, columns)
    candidates[index] = replace(candidates[index], chosen=True)
    yield from candidates
    return Probe(
        head=head,
        final_head=final_head,
        pool=best.pool,
        scores=chosen,
        candidates=tuple(candidates),
        features=torch.cat([features.train[0], *features.validation[:1]])[:, columns],
        labels=torch.cat([labels, features.validation_labels]),
        unreadable=features.unreadable,
        label_errors=_label_errors(features, torch.cat([best.out_of_fold, held_out]), folds, names),
    )


def search_probes(
    features: ProbeFeatures,
    pools: Mapping[str, slice],
    *,
    folds: Tensor,
    rows: Tensor,
    classes: int,
    class_weights: Tensor | None,
) -> list[SearchedProbe]:
    """Search the regularization of each kind of probe on some rows of the features.

    A discriminant is quick, so it is fitted to every pooling and chooses the one for logistic regression. Multi-label
    data only has the latter.
    """
    labels = features.labels[rows]
    settings: dict[str, Any] = {"classes": classes, "folds": folds[rows], "class_weights": class_weights}

    def judge(pool: str, method: str, *parts: CrossValidation, seconds: float) -> SearchedProbe:
        scores = score(average([part.out_of_fold for part in parts]), labels)
        name, evidence = f"probe ({POOLS.get(pool, 'features')}, {method})", f"cross-validation on {len(rows):,} images"
        candidate = describe_candidate(name, scores, evidence, seconds=features.seconds + seconds)
        return SearchedProbe(pool=pool, parts=parts, scores=scores, candidate=candidate)

    def search(function: Callable[..., CrossValidation], pool: str) -> SearchedProbe:
        start = time.perf_counter()
        first, *others = (view[rows][:, pools[pool]] for view in features.train)
        result = function(first, labels, extra_views=others, **settings).calibrate()
        return judge(pool, METHODS[result.method], result, seconds=time.perf_counter() - start)

    if labels.ndim == 2:
        return [search(cross_validate, pool) for pool in pools]
    searched = [search(cross_validate_discriminant, pool) for pool in pools]
    best = min(searched, key=lambda probe: probe.scores.loss)
    logistic = search(cross_validate, best.pool)
    seconds = best.candidate.seconds + logistic.candidate.seconds - 2 * features.seconds
    return [*searched, logistic, judge(best.pool, AVERAGE, *best.parts, *logistic.parts, seconds=seconds)]


def _validate(found: CrossValidation, views: Sequence[Tensor], labels: Tensor, **settings: Any) -> CrossValidation:
    """Return the cross-validation on all images of a regularization that was found on some of them."""
    first, *others = views
    if found.method == "logistic":
        start = {"start": found.strength, "strides": ()}
        return cross_validate(first, labels, extra_views=others, **start, **settings).calibrate()
    return cross_validate_discriminant(first, labels, extra_views=others, shrinkages=(found.strength,), **settings)


def _group_numbers(items: Sequence[Item], groups: Mapping[str, str]) -> Tensor:
    """Return (N,): a number per group, in order of appearance. Images without a group have one of their own."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(groups.get(item.key, item.key), len(numbers)) for item in items])


def _label_errors(
    features: ProbeFeatures, logits: Tensor, folds: Tensor, names: Sequence[str]
) -> tuple[LabelErrorRow, ...]:
    """Return the images whose label is probably wrong. The validation images, in no fold, count as another one."""
    labels = torch.cat([features.labels, features.validation_labels])
    if labels.ndim == 2:
        return ()
    folds = torch.cat([folds, torch.full((len(features.validation_labels),), -1)])
    files = [item.key for item in features.items]
    return tuple(error.as_row(files, names) for error in find_label_errors(logits, labels, folds=folds))


def _fit_to_all(probes: Sequence[LinearProbe], features: ProbeFeatures, config: ResolvedConfig, columns: slice) -> Head:
    """Fit the probe to training and validation images together."""
    labels = torch.cat([features.labels, features.validation_labels])
    first, *others = (torch.cat(pair)[:, columns] for pair in zip(features.train, features.validation, strict=True))
    weights = _class_weights(labels, config, len(probes[0].bias))
    return _average_heads(
        [refit_probe(probe, first, labels, extra_views=others, class_weights=weights) for probe in probes]
    )


def _average_heads(probes: Sequence[LinearProbe]) -> Head:
    return Head(average([probe.weight for probe in probes]), average([probe.bias for probe in probes]))


def average(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([*tensors]).mean(0)


def _class_weights(labels: Tensor, config: ResolvedConfig, classes: int) -> Tensor | None:
    if config.loss.class_weights != "balanced":
        return None
    counts = labels.bincount(minlength=classes) if labels.ndim == 1 else labels.sum(0)
    return balanced_weights([int(count) for count in counts])


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
def with_head(network: Network, head: Head) -> Network:
    """Return the network with these weights in its head."""
    for parameter, value in zip(network.head.parameters(), head, strict=True):
        parameter.copy_(value)
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


def compute_features(
    model: "LoadedModel", train: Sequence[Item], validation: Sequence[Item], *, mirrored: bool, all_views: bool
) -> Generator[Event, None, ProbeFeatures]:
    """Return the features of the training images, also of mirrored ones, and those of the validation images.

    With `all_views` the validation images are mirrored as well.
    """
    start = time.perf_counter()
    flips = (False, True) if mirrored else (False,)
    passes = [(train, flip) for flip in flips]
    passes += [(validation, flip) for flip in (flips if all_views else (False,)) if validation]
    total, done = sum(len(items) for items, _ in passes), 0
    computed: list[ModelOutputs] = []
    for items, is_mirrored in passes:
        progress = cached_features(model, items, mirrored=is_mirrored, multi_label=model.multi_label)
        computed.append((yield from measuring(progress, "features", before=done, total=total)))
        done += len(items)
    views, held_out = computed[: len(flips)], computed[len(flips) :]
    return ProbeFeatures(
        train=[view.outputs for view in views],
        labels=views[0].labels,
        validation=[view.outputs for view in held_out],
        validation_labels=held_out[0].labels if held_out else views[0].labels[:0],
        items=[part.items[int(index)] for part in (views[0], *held_out[:1]) for index in part.indices],
        seconds=time.perf_counter() - start,
        passes=sum(len(part.items) - part.cached for part in computed),
        unreadable=tuple(dict.fromkeys(bad for part in computed for bad in part.unreadable)),
    )


def measuring(
    progress: Generator[Progress, None, Result], what: str, *, before: int = 0, total: int | None = None
) -> Generator[Event, None, Result]:
    """Re-emit loader progress as Measuring events; `before` images of `total` are done already."""
    while True:
        try:
            event = next(progress)
        except StopIteration as end:
            return end.value
        yield Measuring(what=what, done=before + event.done, total=total or event.total)
