"""Decide which epoch's model to keep, and which of several models, from their validation scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, sqrt
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from vitral.evaluation.metrics import Scores, compare

if TYPE_CHECKING:
    from vitral.inference.pipeline import ModelOutputs

MIN_RELATIVE_IMPROVEMENT = 1e-4
"""A smaller drop of the validation loss does not count as progress."""


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

    The first is the simplest. Another replaces it if it classifies more images correctly, or as many at a loss that is
    lower by more than one standard error of the paired difference.
    """
    best = 0
    for index in range(1, len(outputs)):
        difference = compare(outputs[best].correct, outputs[index].correct)
        gaps = image_losses(outputs[best]) - image_losses(outputs[index])
        standard_error = gaps.std().item() / sqrt(len(gaps)) if len(gaps) > 1 else 0.0
        is_tied = difference.only_first == difference.only_second
        if difference.difference > 0 or (is_tied and gaps.mean().item() > standard_error):
            best = index
    if not best:
        return 0, "no other model classifies more of the validation images correctly"
    difference = compare(outputs[0].correct, outputs[best].correct)
    gained, lost, images = difference.only_second, difference.only_first, len(outputs[0].labels)
    return best, f"it gains {gained} of {images:,} validation images on the linear probe and loses {lost}"


def image_losses(outputs: "ModelOutputs") -> Tensor:
    """Return (N,) losses, one per image."""
    logits, labels = outputs.outputs.double(), outputs.labels
    if labels.ndim == 1:
        return F.cross_entropy(logits, labels, reduction="none")
    return F.binary_cross_entropy_with_logits(logits, labels.double(), reduction="none").sum(1)
