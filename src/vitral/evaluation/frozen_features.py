"""Evaluate frozen features without training: the paper's closed-form few-shot regression (section 4.1) and k nearest
neighbors."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from math import nan
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.scan import Progress
from vitral.errors import ConfigError, DataError, check_int
from vitral.evaluation.feature_cache import cached_features, has_cached_features, model_digest
from vitral.evaluation.label_map import match_classes
from vitral.evaluation.metrics import Scores, score, wilson
from vitral.evaluation.results import Evaluation
from vitral.inference.pipeline import ModelOutputs

if TYPE_CHECKING:
    from vitral.evaluation.evaluator import EvaluateOptions
    from vitral.inference.evaluation_data import EvaluationData
    from vitral.inference.loaded_model import LoadedModel

L2, BIAS, EPSILON = 2.0**10, 100.0, 1e-5
"""Constants of the paper's code: the ridge penalty, the bias feature, and the term added to standard deviations."""
SEEDS = (0, 1, 2)
MAX_SIMILARITIES = 2**26
"""Largest number of cosine similarities held in memory at once."""


def evaluate_features(
    model: "LoadedModel", data: "EvaluationData", options: "EvaluateOptions"
) -> Generator[Progress, None, Evaluation]:
    """Yield progress and return the scores of the features. Few-shot regression computes only the images it draws."""
    if data.dataset.multi_label:
        raise ConfigError("few_shot and knn need one label per image, but this dataset is multi-label.")
    if not data.train:
        raise DataError("few_shot and knn need a train split, but this dataset has none.")
    labels = torch.tensor([item.label for item in data.train])
    notes = (*model.warnings, *_notes_on_shots(labels, data.dataset.classes, options.shots))
    digest = model_digest(model) if options.cache else None
    wanted = torch.arange(len(labels))
    batch_size = options.batch_size
    is_cached = digest and has_cached_features(model, data.train, batch_size=batch_size, digest=digest)
    if options.knn is None and not is_cached:
        wanted = torch.cat([choose_shots(labels, max(options.shots), seed) for seed in SEEDS]).unique()
    start = time.perf_counter()
    compute = partial(
        cached_features, model, batch_size=batch_size, workers=options.workers, cache=options.cache, digest=digest
    )
    train = yield from compute([data.train[i] for i in wanted.tolist()])
    test = yield from compute(data.test)
    seconds = time.perf_counter() - start
    computed = sum(len(split.items) - split.cached for split in (train, test))
    rows = torch.full_like(labels, -1)
    rows[wanted[train.indices]] = torch.arange(len(train.indices))

    def draw_rows(shots: int, seed: int) -> Tensor:
        drawn = rows[choose_shots(labels, shots, seed)]
        return drawn[drawn >= 0]  # unreadable images have no features

    classes = data.dataset.classes
    scores = score_features(train, test, classes=len(classes), shots=options.shots, k=options.knn, draw_rows=draw_rows)
    return Evaluation(
        scores=_classifier_scores(model, test, classes),
        unreadable=train.unreadable + test.unreadable,
        images_per_second=computed / seconds if computed else None,
        few_shot=scores.get("few_shot"),
        knn=scores.get("knn"),
        notes=notes,
    )


def _classifier_scores(model: "LoadedModel", test: ModelOutputs, classes: Sequence[str]) -> Scores:
    """Return the scores of the model's own head on the same features; NaN if it has none for these classes."""
    try:
        indices = match_classes(classes, model.labels, has_names=model.has_names)
    except DataError:
        return Scores(images=len(test.outputs), loss=nan, top1=nan, top5=nan)
    return score(model.classify(test.outputs), torch.tensor(indices)[test.labels])


def _notes_on_shots(labels: Tensor, classes: Sequence[str], shots: Sequence[int]) -> Iterator[str]:
    """Yield a note if some classes have too few images. Raise ConfigError if all have."""
    counts = labels.bincount(minlength=len(classes)).tolist()
    if shots and min(shots) > max(counts):
        raise ConfigError(f"few_shot must be at most {max(counts)}, the size of the largest class (got {min(shots)}).")
    wanted = max(shots, default=0)
    fewer = [f"{name} has {count}" for name, count in zip(classes, counts, strict=True) if count < wanted]
    if fewer:
        examples = f"{', '.join(fewer[:5])}{', ...' if fewer[5:] else ''}"
        yield f"not all classes have {wanted} training images: {examples}"


def score_features(
    train: ModelOutputs,
    test: ModelOutputs,
    *,
    classes: int,
    shots: Sequence[int] = (),
    k: int | None = None,
    draw_rows: Callable[[int, int], Tensor] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the scores of frozen features under "few_shot" (if ``shots`` is not empty) and "knn" (if ``k`` is set).

    The few-shot scores are means over three seeds. With several numbers of shots, the largest one is reported and
    "each" lists all of them. ``draw_rows`` returns the training rows for a number of shots and a seed.
    """
    draw_rows = draw_rows or partial(choose_shots, train.labels)
    scores: dict[str, dict[str, Any]] = {}
    each: list[dict[str, Any]] = []
    for number in sorted(set(shots)):
        draws = [draw_rows(number, seed) for seed in SEEDS]
        seeds = [
            few_shot_accuracy(train.outputs[rows], train.labels[rows], test.outputs, test.labels, classes=classes)
            for rows in draws
        ]
        each.append({"shots": number, "top1": mean(seeds), "spread": stdev(seeds), "seeds": seeds})
    if each:
        scores["few_shot"] = {**each[-1], **({"each": each} if len(each) > 1 else {})}
    if k is not None:
        images = len(test.outputs)
        top1 = knn_accuracy(train.outputs, train.labels, test.outputs, test.labels, k=k, classes=classes)
        low, high = wilson(top1 * images, images)
        scores["knn"] = {"k": k, "top1": top1, "top1_low": low, "top1_high": high}
    return scores


def few_shot_accuracy(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, *, classes: int) -> float:
    """Return the top-1 accuracy of a ridge regression from training features to targets of -1 and 1."""
    weights = fit_ridge(whiten(train, train), one_hot_targets(train_labels, classes))
    predicted = (whiten(test, train) @ weights).argmax(1)
    return (predicted == test_labels).double().mean().item()


def choose_shots(labels: Tensor, shots: int, seed: int) -> Tensor:
    """Return the indices of up to ``shots`` images per class. A smaller number of shots is a subset of a larger one."""
    random = np.random.default_rng(seed)
    chosen: list[Tensor] = []
    for label in labels.unique().tolist():
        members = (labels == label).nonzero()[:, 0]
        chosen.append(members[torch.from_numpy(random.permutation(len(members))[:shots])])
    return torch.cat(chosen)


def whiten(features: Tensor, reference: Tensor) -> Tensor:
    """Standardize features by the reference's mean and standard deviation and append the bias: (N, D) -> (N, D + 1)."""
    features, reference = features.double(), reference.double()
    scaled = (features - reference.mean(0)) / (reference.std(0, unbiased=False) + EPSILON)
    return F.pad(scaled, (0, 1), value=BIAS)


def one_hot_targets(labels: Tensor, classes: int) -> Tensor:
    """Return (N, K) regression targets: 1 for the class, -1 for the others."""
    return 2.0 * F.one_hot(labels, classes).double() - 1.0


def fit_ridge(x: Tensor, y: Tensor) -> Tensor:
    """Return the (D, K) weights of a ridge regression, solved through the smaller of the two Gram matrices."""
    is_wide = x.shape[0] < x.shape[1]
    values, vectors = torch.linalg.eigh(x @ x.T if is_wide else x.T @ x)
    inner = y if is_wide else x.T @ y
    solved = vectors @ ((vectors.T @ inner) / (values + L2)[:, None])
    return x.T @ solved if is_wide else solved


def knn_accuracy(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, *, k: int, classes: int
) -> float:
    """Return the top-1 accuracy of a vote of the k nearest neighbors by cosine similarity, whose sum breaks ties."""
    check_int("knn", k, minimum=1, maximum=len(train))
    train, test = F.normalize(train.double(), dim=1), F.normalize(test.double(), dim=1)
    predicted: list[Tensor] = []
    for rows in test.split(max(1, MAX_SIMILARITIES // len(train))):
        similarity, neighbors = (rows @ train.T).topk(k, dim=1)
        votes = torch.zeros(len(rows), classes, dtype=torch.double)
        votes.scatter_add_(1, train_labels[neighbors], 1 + similarity / (4 * k))  # similarities sum to less than a vote
        predicted.append(votes.argmax(1))
    return (torch.cat(predicted) == test_labels).double().mean().item()
