"""Decide which epoch's model to keep, from its validation scores."""

from dataclasses import dataclass
from math import isnan, sqrt

from vitral.evaluation.metrics import Scores

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
