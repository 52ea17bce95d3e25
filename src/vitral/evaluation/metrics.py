"""Metrics as pure functions of logits and labels. Labels are (N,) classes, or (N, K) of 0 and 1 for multi-label data;
fractions go from 0 to 1."""

from dataclasses import dataclass
from math import exp, isnan, nan, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_Z = 1.959963984540054  # of 95 %


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Of one split; top5 is top min(5, K)."""

    images: int
    loss: float
    top1: float
    top5: float

    def as_dict(self) -> dict[str, float | None]:
        return without_nan({"top1": self.top1, "top5": self.top5, "images": self.images, "loss": self.loss})


def without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """For JSON, which has no word for what is no number."""
    return {name: None if isinstance(value, float) and isnan(value) else value for name, value in values.items()}


def score(logits: Tensor, labels: Tensor) -> Scores:
    """For multi-label data the largest logit counts as right when it is one of the true classes."""
    images, classes = logits.shape
    if not images:
        return Scores(images=0, loss=nan, top1=nan, top5=nan)
    if labels.ndim == 1:
        # Of equal logits the first counts, as in argmax; topk may take any of them.
        own, place = logits.gather(1, labels[:, None]), torch.arange(classes, device=logits.device)
        ahead = ((logits > own) | ((logits == own) & (place < labels[:, None]))).sum(1, keepdim=True)
        hits = ahead <= torch.tensor([0, 4], device=logits.device)
        loss = F.cross_entropy(logits.double(), labels)
    else:
        hits = labels.gather(1, logits.argsort(dim=1, descending=True, stable=True)[:, :5]) > 0
        loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double()) * classes
    return Scores(
        images=images,
        loss=loss.item(),
        top1=hits[:, 0].double().mean().item(),
        top5=hits.any(dim=1).double().mean().item(),
    )


def wilson(right: float, images: int) -> tuple[float, float]:
    """The 95 % interval of a fraction (Wilson's: sensible also near 0 and 1, and for few pictures)."""
    if not images:
        return 0.0, 1.0
    part, spread = right / images, _Z**2 / images
    middle = part + spread / 2
    reach = _Z * sqrt(part * (1 - part) / images + spread / (4 * images))
    return max(0.0, (middle - reach) / (1 + spread)), min(1.0, (middle + reach) / (1 + spread))


def confusion(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(K, K) counts: a row for each true class, a column for each answer."""
    return torch.bincount(labels * classes + predicted, minlength=classes * classes).view(classes, classes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassScores:
    """Of one class; precision is NaN where it was never answered, recall where it never was the truth."""

    images: int
    precision: float
    recall: float
    f1: float
    average_precision: float | None = None
    """Multi-label only."""


def per_class(predicted: Tensor, labels: Tensor, classes: int) -> list[ClassScores]:
    columns = (labels[predicted == labels], labels, predicted)
    right, truth, answers = (torch.bincount(column, minlength=classes).tolist() for column in columns)
    return [_class_scores(*numbers) for numbers in zip(right, truth, answers, strict=True)]


def per_label(logits: Tensor, labels: Tensor) -> list[ClassScores]:
    """Of multi-label data, where a probability of one half is a yes."""
    yes, truth = logits > 0, labels > 0
    numbers = ((yes & truth).sum(0).tolist(), truth.sum(0).tolist(), yes.sum(0).tolist())
    precisions = [average_precision(logits[:, k], labels[:, k]) for k in range(logits.shape[1])]
    rows = zip(*numbers, precisions, strict=True)
    return [_class_scores(right, known, said, area) for right, known, said, area in rows]


def _class_scores(right: int, truth: int, answers: int, area: float | None = None) -> ClassScores:
    return ClassScores(
        images=truth,
        precision=right / answers if answers else nan,
        recall=right / truth if truth else nan,
        f1=2 * right / (truth + answers) if truth + answers else nan,
        average_precision=area,
    )


def average_precision(scores: Tensor, labels: Tensor) -> float:
    """The area below precision over recall, in steps; NaN without a positive. Equal scores are one step."""
    positives = int((labels > 0).sum())
    if not positives:
        return nan
    order = scores.argsort(descending=True, stable=True)
    found = (labels[order] > 0).double().cumsum(0)
    scores = scores[order]
    ends = torch.cat([scores[1:] != scores[:-1], torch.ones(1, dtype=torch.bool)])  # the last of each equal score
    found, ranks = found[ends], torch.arange(1, len(scores) + 1, dtype=torch.double)[ends]
    gained = torch.diff(found, prepend=torch.zeros(1, dtype=torch.double))
    return (gained / positives * found / ranks).sum().item()


def mean_average_precision(found: list[ClassScores]) -> float:
    """Over the classes that occur."""
    areas = [scores.average_precision for scores in found if scores.images and scores.average_precision is not None]
    return sum(areas) / len(areas) if areas else nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """Answers with about the same confidence."""

    images: int
    confidence: float
    right: float


def calibration(confidence: Tensor, right: Tensor, bins: int = 15) -> tuple[float, list[Bin]]:
    """Expected calibration error over bins of equal width, and the bins: how far confidence is from being right."""
    confidence, right = confidence.double(), right.double()
    place = (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)  # (0, 1/15], (1/15, 2/15], ...
    images = torch.bincount(place, minlength=bins)
    sums = [torch.zeros(bins, dtype=torch.double).index_add_(0, place, values) for values in (confidence, right)]
    means = [values / images.clamp(min=1) for values in sums]
    error = ((means[0] - means[1]).abs() * images).sum().item() / max(1, len(confidence))
    rows = zip(images.tolist(), means[0].tolist(), means[1].tolist(), strict=True)
    return error, [Bin(images=number, confidence=sure, right=part) for number, sure, part in rows]


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """What logits are to be divided by so that the loss is smallest; the order of answers stays."""
    logits = logits.double()
    low, high = -5.0, 5.0  # of the temperature's logarithm; the loss is convex in 1 / temperature
    golden = (sqrt(5) - 1) / 2

    def loss_at(place: float) -> float:
        return F.cross_entropy(logits / exp(place), labels).item()

    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = loss_at(left), loss_at(right)
    for _ in range(40):  # each keeps 0.618 of what is left, and needs one new place
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = loss_at(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = loss_at(right)
    return exp((low + high) / 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Between two models on the same pictures: the second's top-1 minus the first's."""

    difference: float
    low: float
    high: float
    only_first: int
    """Pictures that only the first has right."""
    only_second: int
    both: int
    neither: int

    @property
    def is_clear(self) -> bool:
        """Whether the 95 % interval leaves zero out."""
        return self.low > 0 or self.high < 0


def compare(first: Tensor, second: Tensor) -> Difference:
    """Of two lists of right and wrong, picture by picture, which tells smaller differences than two intervals do."""
    first, second = first.bool(), second.bool()
    images = max(1, len(first))
    both, neither = int((first & second).sum()), int((~first & ~second).sum())
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    difference = (only_second - only_first) / images
    low, high = _paired_interval(both, only_first, only_second, neither)
    return Difference(
        difference=difference,
        low=low,
        high=high,
        only_first=only_first,
        only_second=only_second,
        both=both,
        neither=neither,
    )


def _paired_interval(both: int, only_first: int, only_second: int, neither: int) -> tuple[float, float]:
    """95 % of the second's part minus the first's (Newcombe 1998, method 10): Wilson's intervals of the two, and how
    much they go together. Unlike the plain one it does not call a difference of two pictures certain."""
    images = both + only_first + only_second + neither
    if not images:
        return -1.0, 1.0
    parts = [(both + only_second) / images, (both + only_first) / images]
    (low2, high2), (low1, high1) = (wilson(part * images, images) for part in parts)
    rows = [(both + only_first), (only_second + neither), (both + only_second), (only_first + neither)]
    product = rows[0] * rows[1] * rows[2] * rows[3]
    away = both * neither - only_first * only_second
    if away > 0:
        away = max(away - images / 2, 0.0)
    phi = away / sqrt(product) if product else 0.0
    difference = parts[0] - parts[1]
    down = (parts[0] - low2) ** 2 - 2 * phi * (parts[0] - low2) * (high1 - parts[1]) + (high1 - parts[1]) ** 2
    up = (high2 - parts[0]) ** 2 - 2 * phi * (high2 - parts[0]) * (parts[1] - low1) + (parts[1] - low1) ** 2
    return max(-1.0, difference - sqrt(max(0.0, down))), min(1.0, difference + sqrt(max(0.0, up)))
