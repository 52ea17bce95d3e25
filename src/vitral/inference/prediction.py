"""The result of a prediction. This module does not import torch."""

from dataclasses import dataclass, field

import numpy as np

from vitral.errors import check_int


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Prediction:
    """The labels of one image with their probabilities."""

    label: str
    """The most probable label."""
    probability: float
    labels: tuple[str, ...] = field(repr=False)
    probabilities: np.ndarray = field(repr=False)
    """(K,): the probability of each label. They sum to 1 unless the model is multi-label."""
    unusual: float | None = None
    """From 0 to 1: the fraction of images like those of the training that are less unusual. None without a run that
    stored the statistics of its training features."""
    engine: str = field(default="torch float32", repr=False)
    """The engine and the precision that computed the probabilities."""

    def top(self, k: int = 5) -> list[tuple[str, float]]:
        """Return the k most probable labels with their probabilities, most probable first."""
        check_int("k", k, minimum=1)
        order = np.argsort(-self.probabilities, kind="stable")[:k]
        return [(self.labels[index], float(self.probabilities[index])) for index in order]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The reason why an image cannot be used."""

    reason: str
