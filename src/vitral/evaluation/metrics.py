"""Compute metrics as pure functions of logits and labels.

Labels are (N,) classes, or (N, K) of 0 and 1 for multi-label data. Fractions range from 0 to 1.
"""

from dataclasses import asdict, dataclass
from math import exp, isnan, nan, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_Z = 1.959963984540054  # the normal quantile of a two-sided 95% interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The main scores of a model on a split. top5 is top-min(5, K)."""

    top1: float
    top5: float
    images: int
    loss: float

    def as_dict(self) -> dict[str, float | None]:
        """Return the scores for JSON, None in place of NaN."""
        return without_nan(asdict(self))


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
    counts = {
        "only_first": int((first & ~second).sum()),
        "only_second": int((second & ~first).sum()),
        "both": int((first & second).sum()),
        "neither": int((~first & ~second).sum()),
    }
    low, high = _paired_interval(**counts)
    difference = (counts["only_second"] - counts["only_first"]) / max(1, len(first))
    return Difference(difference=difference, low=low, high=high, **counts)


def _paired_interval(both: int, only_first: int, only_second: int, neither: int) -> tuple[float, float]:
    """Return the 95% interval of a difference of paired fractions (Newcombe 1998, method 10).

    Unlike the plain interval, it does not call a difference of two images certain.
    """
    images = both + only_first + only_second + neither
    if not images:
        return -1.0, 1.0
    first, second = (both + only_first) / images, (both + only_second) / images
    (low1, high1), (low2, high2) = wilson(first * images, images), wilson(second * images, images)
    product = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    covariance = both * neither - only_first * only_second
    if covariance > 0:
        covariance = max(covariance - images / 2, 0.0)
    phi = covariance / sqrt(product) if product else 0.0
    difference = second - first
    down = (second - low2) ** 2 - 2 * phi * (second - low2) * (high1 - first) + (high1 - first) ** 2
    up = (high2 - second) ** 2 - 2 * phi * (high2 - second) * (first - low1) + (first - low1) ** 2
    return max(-1.0, difference - sqrt(max(0.0, down))), min(1.0, difference + sqrt(max(0.0, up)))


# ---- calibration ----


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """Predictions of about the same confidence."""

    images: int
    confidence: float
    accuracy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """How far confidence is from accuracy."""

    error: float
    """Expected calibration error: 0.05 means that confidence is off by 5 points on average."""
    bins: list[Bin]
    temperature: float | None = None
    """The divisor of the logits, if temperature scaling was applied."""


def calibrate(logits: Tensor, labels: Tensor, temperature: float | None = None) -> Calibration:
    """Return the calibration of the predicted classes, recording the temperature that the logits were divided by."""
    confidence, predicted = logits.double().softmax(dim=1).max(dim=1)
    error, bins = calibration_error(confidence, predicted == labels)
    return Calibration(error=error, bins=bins, temperature=temperature)


def calibrate_scaled(logits: Tensor, labels: Tensor) -> Calibration | None:
    """Return the calibration with each half of the images scaled by the other's temperature; None below two images."""
    if len(labels) < 2:
        return None
    half = torch.arange(len(labels)) % 2 == 0
    first, second = fit_temperature(logits[half], labels[half]), fit_temperature(logits[~half], labels[~half])
    scaled = logits.double() / torch.where(half, second, first).double()[:, None]
    return calibrate(scaled, labels, temperature=(first * second) ** 0.5)


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = 15) -> tuple[float, list[Bin]]:
    """Return the expected calibration error over bins of equal width, and the bins."""
    confidence, correct = confidence.double(), correct.double()
    index = (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)  # (0, 1/15], (1/15, 2/15], ...
    images = torch.bincount(index, minlength=bins)
    sums = [torch.zeros(bins, dtype=torch.double).index_add_(0, index, values) for values in (confidence, correct)]
    means = [values / images.clamp(min=1) for values in sums]
    error = ((means[0] - means[1]).abs() * images).sum().item() / max(1, len(confidence))
    rows = zip(images.tolist(), means[0].tolist(), means[1].tolist(), strict=True)
    return error, [Bin(images=count, confidence=mean, accuracy=accuracy) for count, mean, accuracy in rows]


def fit_temperature(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> float:
    """Return the divisor of the logits that minimizes the loss, by golden-section search."""
    logits = logits.double()
    low, high = -5.0, 5.0  # log temperature; the loss is convex in 1 / temperature
    golden = (sqrt(5) - 1) / 2

    def loss_at(log_temperature: float) -> float:
        return F.cross_entropy(logits / exp(log_temperature), labels, label_smoothing=smoothing).item()

    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = loss_at(left), loss_at(right)
    for _ in range(40):  # each step keeps 0.618 of the interval and needs one new loss
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = loss_at(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = loss_at(right)
    return exp((low + high) / 2)
