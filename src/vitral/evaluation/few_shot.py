"""Score frozen features without training: the paper's closed-form few-shot regression (section 4.1) and k nearest
neighbors. Both take seconds, so they serve as the baseline of every fine-tuning run."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import check_int
from vitral.evaluation.metrics import wilson
from vitral.inference.pipeline import ModelOutputs

L2, BIAS, EPSILON = 2.0**10, 100.0, 1e-5
"""Constants of the paper's code: the ridge penalty, the bias feature, and the term added to standard deviations."""
SEEDS = (0, 1, 2)
MAX_SIMILARITIES = 2**26
"""Largest number of cosine similarities held in memory at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShotPool:
    """The labels that shots are drawn from, which may cover more images than have features."""

    labels: Tensor
    rows: Tensor
    """The row of each image in the training features; -1 for images without features."""


def score_features(
    train: ModelOutputs,
    test: ModelOutputs,
    *,
    classes: int,
    shots: Sequence[int] = (),
    k: int | None = None,
    pool: ShotPool | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the scores of frozen features under "few_shot" (if ``shots`` is not empty) and "knn" (if ``k`` is set).

    The few-shot scores are means over three seeds. With several numbers of shots, the largest one is reported and
    "each" lists all of them.
    """
    pool = pool or ShotPool(labels=train.labels, rows=torch.arange(len(train.outputs)))
    scores: dict[str, dict[str, Any]] = {}
    each = [_few_shot(train, test, classes, number, pool) for number in sorted(set(shots))]
    if each:
        scores["few_shot"] = {**each[-1], **({"each": each} if len(each) > 1 else {})}
    if k is not None:
        images = len(test.outputs)
        top1 = knn_accuracy(train.outputs, train.labels, test.outputs, test.labels, k=k, classes=classes)
        low, high = wilson(top1 * images, images)
        scores["knn"] = {"k": k, "top1": top1, "top1_low": low, "top1_high": high}
    return scores


def _few_shot(train: ModelOutputs, test: ModelOutputs, classes: int, shots: int, pool: ShotPool) -> dict[str, Any]:
    seeds: list[float] = []
    for seed in SEEDS:
        rows = pool.rows[choose_shots(pool.labels, shots, seed)]
        rows = rows[rows >= 0]
        examples, labels = train.outputs[rows], train.labels[rows]
        seeds.append(few_shot_accuracy(examples, labels, test.outputs, test.labels, classes=classes))
    return {"shots": shots, "top1": mean(seeds), "spread": stdev(seeds), "seeds": seeds}


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
