"""Find likely label errors with confident learning (Northcutt et al. 2021) on out-of-fold predictions.

A probability counts as confident if it reaches the mean that images of that class have for their own label. The number
of images that are confidently another class estimates the number of errors; the images whose label is least probable
beside another class are the suspects.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitral.errors import ConfigError

PRIOR_IMAGES = 50
"""The threshold of a class is averaged with that of all classes, which counts as this many images: the mean of a few
out-of-fold probabilities is too noisy to be a threshold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelErrorRow:
    """A row of label-errors.csv."""

    file: str
    label: str
    suggested: str
    probability: float
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelError:
    """An image whose label is probably wrong."""

    index: int
    label: int
    suggested: int
    probability: float
    """The probability of the suggested label."""
    score: float
    """From 0.5 to 1: the probability of the suggested label if it is that one or the given one."""

    def as_row(self, files: Sequence[str], classes: Sequence[str]) -> LabelErrorRow:
        """Return the row of an image among these files."""
        return LabelErrorRow(
            file=files[self.index],
            label=classes[self.label],
            suggested=classes[self.suggested],
            probability=self.probability,
            score=self.score,
        )


def find_label_errors(logits: Tensor, labels: Tensor, *, folds: Tensor | None = None) -> list[LabelError]:
    """Return the suspects among images with (N, K) out-of-fold logits and (N,) labels, the most likely errors first.

    An image whose class is in no other of the `folds` (or in no other image) is never a suspect: the classifier that
    predicted it had not seen its class.
    """
    if labels.ndim != 1:
        raise ConfigError("Label errors need one label per image, but this dataset is multi-label.")
    if not len(labels):
        return []
    probabilities = logits.double().softmax(1)
    own = probabilities.gather(1, labels[:, None])
    thresholds = _confidence_thresholds(own[:, 0], labels, logits.shape[1])
    confident = probabilities.masked_fill(probabilities < thresholds, -1.0)
    known = _has_peers(labels, torch.arange(len(labels)) if folds is None else folds)
    expected_errors = int(((confident.max(1).values > 0) & (confident.argmax(1) != labels) & known).sum())
    others, suggested = probabilities.scatter(1, labels[:, None], -1.0).max(1)
    scores = others / (others + own[:, 0]).clamp(min=1e-300)
    log_odds = logits.double().gather(1, suggested[:, None]) - logits.double().gather(1, labels[:, None])
    order = log_odds[:, 0].masked_fill(~known, -torch.inf).argsort(descending=True, stable=True)
    return [
        LabelError(
            index=index,
            label=int(labels[index]),
            suggested=int(suggested[index]),
            probability=others[index].item(),
            score=scores[index].item(),
        )
        for index in order[:expected_errors].tolist()
        if known[index] and log_odds[index] > 0
    ]


def _confidence_thresholds(own: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return (K,): the mean probability that images of a class have for their label, drawn towards the overall mean."""
    sums = own.new_zeros(classes).index_add_(0, labels, own)
    return (sums + PRIOR_IMAGES * own.mean()) / (labels.bincount(minlength=classes) + PRIOR_IMAGES)


def _has_peers(labels: Tensor, folds: Tensor) -> Tensor:
    """Return (N,): whether the class of each image also occurs in another fold."""
    pairs = torch.stack([labels, folds], dim=1).unique(dim=0)
    return pairs[:, 0].bincount(minlength=int(labels.max()) + 1)[labels] > 1
