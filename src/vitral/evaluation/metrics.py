"""Compute metrics as pure functions of logits and labels.

Labels are (N,) classes, or (N, K) of 0 and 1 for multi-label data. Fractions range from 0 to 1.
"""

from dataclasses import dataclass
from math import isnan, nan, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_Z = 1.959963984540054  # the normal quantile of a two-sided 95% interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The main scores of a model on a split. top5 is top-min(5, K)."""

    images: int
    loss: float
    top1: float
    top5: float

    def as_dict(self) -> dict[str, float | None]:
        """Return the scores for JSON, None in place of NaN."""
        return without_nan({"top1": self.top1, "top5": self.top5, "images": self.images, "loss": self.loss})


def without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN values by None, because JSON has no NaN."""
    return {name: None if isinstance(value, float) and isnan(value) else value for name, value in values.items()}


def score(logits: Tensor, labels: Tensor) -> Scores:
    """Return loss and accuracies. On multi-label data, a prediction is correct if it is any of the true classes."""
    images, classes = logits.shape
    if not images:
        return Scores(images=0, loss=nan, top1=nan, top5=nan)
    if labels.ndim == 1:
        # The first of equal logits wins, as in argmax; topk would return any of them.
        true_logit, index = logits.gather(1, labels[:, None]), torch.arange(classes, device=logits.device)
        rank = ((logits > true_logit) | ((logits == true_logit) & (index < labels[:, None]))).sum(1, keepdim=True)
        hits = rank <= torch.tensor([0, 4], device=logits.device)
        loss = F.cross_entropy(logits.double(), labels)
    else:
        hits = labels.gather(1, logits.argsort(dim=1, descending=True, stable=True)[:, :5]) > 0
        loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double()) * classes
    top1, top5 = hits[:, 0].double().mean().item(), hits.any(dim=1).double().mean().item()
    return Scores(images=images, loss=loss.item(), top1=top1, top5=top5)


def wilson(correct: float, images: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a fraction, which stays sensible near 0 and 1 and for few images."""
    if not images:
        return 0.0, 1.0
    fraction, spread = correct / images, _Z**2 / images
    center = fraction + spread / 2
    reach = _Z * sqrt(fraction * (1 - fraction) / images + spread / (4 * images))
    return max(0.0, (center - reach) / (1 + spread)), min(1.0, (center + reach) / (1 + spread))


def confusion(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return (K, K) counts: a row per true class, a column per predicted class."""
    return torch.bincount(labels * classes + predicted, minlength=classes * classes).view(classes, classes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassScores:
    """Scores of one class. Precision is NaN if it was never predicted, recall if no image has it."""

    images: int
    precision: float
    recall: float
    f1: float
    average_precision: float | None = None
    """Set for multi-label data only."""


def per_class(predicted: Tensor, labels: Tensor, classes: int) -> list[ClassScores]:
    """Return the scores of each class from predicted and true classes."""
    columns = (labels[predicted == labels], labels, predicted)
    hits, actual, guesses = (torch.bincount(column, minlength=classes).tolist() for column in columns)
    return [_class_scores(*counts) for counts in zip(hits, actual, guesses, strict=True)]


def per_label(logits: Tensor, labels: Tensor) -> list[ClassScores]:
    """Return the scores of each label of multi-label data, with a decision threshold of 0.5."""
    predicted, actual = logits > 0, labels > 0
    counts = ((predicted & actual).sum(0).tolist(), actual.sum(0).tolist(), predicted.sum(0).tolist())
    areas = [average_precision(logits[:, k], labels[:, k]) for k in range(logits.shape[1])]
    return [_class_scores(*row) for row in zip(*counts, areas, strict=True)]


def _class_scores(hits: int, actual: int, predicted: int, area: float | None = None) -> ClassScores:
    return ClassScores(
        images=actual,
        precision=hits / predicted if predicted else nan,
        recall=hits / actual if actual else nan,
        f1=2 * hits / (actual + predicted) if actual + predicted else nan,
        average_precision=area,
    )


def average_precision(scores: Tensor, labels: Tensor) -> float:
    """Return the area under the precision-recall curve in steps (equal scores form one), or NaN without a positive."""
    positives = int((labels > 0).sum())
    if not positives:
        return nan
    order = scores.argsort(descending=True, stable=True)
    hits = (labels[order] > 0).double().cumsum(0)
    scores = scores[order]
    ends = torch.cat([scores[1:] != scores[:-1], torch.ones(1, dtype=torch.bool)])  # the last of each equal score
    hits, ranks = hits[ends], torch.arange(1, len(scores) + 1, dtype=torch.double)[ends]
    gained = torch.diff(hits, prepend=torch.zeros(1, dtype=torch.double))
    return (gained / positives * hits / ranks).sum().item()


def mean_average_precision(classes: list[ClassScores]) -> float:
    """Return the mean over the classes that have at least one image."""
    areas = [scores.average_precision for scores in classes if scores.images and scores.average_precision is not None]
    return sum(areas) / len(areas) if areas else nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The top-1 accuracy of a second model minus that of the first, on the same images."""

    difference: float
    low: float
    high: float
    only_first: int
    """Images that only the first model classifies correctly."""
    only_second: int
    both: int
    neither: int

    @property
    def is_clear(self) -> bool:
        """Return whether the 95% interval excludes zero."""
        return self.low > 0 or self.high < 0


def compare(first: Tensor, second: Tensor) -> Difference:
    """Compare two models on the same images: a paired interval resolves smaller differences than two intervals."""
    first, second = first.bool(), second.bool()
    images = max(1, len(first))
    both, neither = int((first & second).sum()), int((~first & ~second).sum())
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    low, high = _paired_interval(both, only_first, only_second, neither)
    counts = {"only_first": only_first, "only_second": only_second, "both": both, "neither": neither}
    return Difference(difference=(only_second - only_first) / images, low=low, high=high, **counts)


def _paired_interval(both: int, only_first: int, only_second: int, neither: int) -> tuple[float, float]:
    """Return the 95% interval of a difference of paired fractions (Newcombe 1998, method 10).

    Unlike the plain interval, it does not call a difference of two images certain.
    """
    images = both + only_first + only_second + neither
    if not images:
        return -1.0, 1.0
    fractions = [(both + only_second) / images, (both + only_first) / images]
    (low2, high2), (low1, high1) = (wilson(fraction * images, images) for fraction in fractions)
    totals = [(both + only_first), (only_second + neither), (both + only_second), (only_first + neither)]
    product = totals[0] * totals[1] * totals[2] * totals[3]
    covariance = both * neither - only_first * only_second
    if covariance > 0:
        covariance = max(covariance - images / 2, 0.0)
    phi = covariance / sqrt(product) if product else 0.0
    second, first = fractions
    difference = second - first
    down = (second - low2) ** 2 - 2 * phi * (second - low2) * (high1 - first) + (high1 - first) ** 2
    up = (high2 - second) ** 2 - 2 * phi * (high2 - second) * (first - low1) + (first - low1) ** 2
    return max(-1.0, difference - sqrt(max(0.0, down))), min(1.0, difference + sqrt(max(0.0, up)))
