"""Decide which epoch's model to keep, and which of several models, from their validation scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, sqrt
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from vitral.evaluation.metrics import Scores, compare, fit_temperature

if TYPE_CHECKING:
    from vitral.inference.pipeline import ModelOutputs

MIN_RELATIVE_IMPROVEMENT = 1e-4
"""A smaller drop of the validation loss does not count as progress."""
MIN_LOSSES = 10
"""The losses of fewer images do not show which of two models is better."""


@dataclass(kw_only=True, slots=True)
class BestEpoch:
    """The best epoch so far.

    Epochs are compared by accuracy. Within one standard error of the best accuracy they are compared by loss, which is
    less noisy on small validation sets.
    """

    top1: float = -1.0
    """The highest accuracy so far, of any epoch."""
    loss: float = float("inf")
    """The validation loss of the model that is kept, from `step` and `epoch`."""
    step: int = 0
    epoch: int = -1

    def update(self, scores: Scores, *, step: int, epoch: int) -> bool:
        """Record the scores of an epoch and return whether its model should be kept."""
        is_better = scores.loss < self.loss * (1 - MIN_RELATIVE_IMPROVEMENT)
        if not isnan(scores.top1):  # pixels that are predicted have none
            standard_error = sqrt(scores.top1 * (1 - scores.top1) / max(1, scores.images))
            is_close = scores.top1 >= self.top1 - standard_error
            is_better = scores.top1 > self.top1 + standard_error or (is_close and is_better)
            self.top1 = max(self.top1, scores.top1)
        if is_better:
            self.loss, self.step, self.epoch = scores.loss, step, epoch
        return is_better

    @property
    def is_set(self) -> bool:
        """Return whether there is a model to keep; that of step 0 is the linear probe."""
        return self.loss < float("inf")

    def should_stop(self, epoch: int, *, patience: int) -> bool:
        """Return whether no epoch has improved on the best one for `patience` epochs."""
        return bool(patience) and self.is_set and epoch - self.epoch >= patience


def choose_model(outputs: "Sequence[ModelOutputs]") -> tuple[int, str]:
    """Return the index of the best of several models on the same images, and the reason.

    The first is the simplest. Another replaces it if it classifies more images correctly. Within one standard error of
    the paired difference the loss decides first, which is less noisy; it is that of calibrated probabilities. On very
    few images neither decides and the simpler model stays. No model is chosen that classifies fewer images correctly
    than the first.
    """
    best, right, losses = 0, [int(output.correct.sum()) for output in outputs], [*map(calibrated_losses, outputs)]
    for index in range(1, len(outputs)):
        if right[index] < right[0]:
            continue
        difference, gaps = compare(outputs[best].correct, outputs[index].correct), losses[best] - losses[index]
        gained, lost = difference.only_second, difference.only_first
        if abs(gained - lost) <= sqrt(gained + lost):
            gain, standard_error = gaps.mean().item(), gaps.std(correction=0).item() / sqrt(max(1, len(gaps) - 1))
            is_better = gain > standard_error or (abs(gain) <= standard_error and gained > lost)
            is_better = is_better and len(gaps) >= MIN_LOSSES
        else:
            is_better = gained > lost
        if is_better:
            best = index
    if not best:
        return 0, "no other model is better on the validation images"
    difference = compare(outputs[0].correct, outputs[best].correct)
    gained, lost, images = difference.only_second, difference.only_first, len(outputs[0].labels)
    reason = f"it gains {gained} of {images:,} validation images on the linear probe and loses {lost}"
    return best, reason if gained > lost else f"its loss is lower; {reason}"


def calibrated_losses(outputs: "ModelOutputs") -> Tensor:
    """Return (N,) losses, one per image, after temperature scaling if each image has one label."""
    logits, labels = outputs.outputs.double(), outputs.labels
    if labels.ndim == 1:
        return F.cross_entropy(logits / temperature_of(outputs), labels, reduction="none")
    return F.binary_cross_entropy_with_logits(logits, labels.double(), reduction="none").sum(1)


def temperature_of(outputs: "ModelOutputs") -> float:
    """Return the divisor of the logits that makes the probabilities right on these images.

    As in Platt scaling, a few images that are all correct must not make the model certain.
    """
    return fit_temperature(outputs.outputs, outputs.labels, smoothing=1 / (len(outputs.labels) + 2))
