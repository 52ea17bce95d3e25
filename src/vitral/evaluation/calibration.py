"""Measure how well a model's confidence matches its accuracy, before and after temperature scaling."""

from dataclasses import dataclass
from math import exp, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor


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


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the divisor of the logits that minimizes the loss, by golden-section search."""
    logits = logits.double()
    low, high = -5.0, 5.0  # log temperature; the loss is convex in 1 / temperature
    golden = (sqrt(5) - 1) / 2

    def loss_at(log_temperature: float) -> float:
        return F.cross_entropy(logits / exp(log_temperature), labels).item()

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
