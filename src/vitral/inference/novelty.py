"""Measure how unusual an image is for a model: how far its features are from those of every class.

The distance is one minus the cosine to the nearest class mean, in features whitened by their covariance. It is
calibrated on images that the statistics were not fitted to, so that 0.95 means: 5 % of ordinary images look as unusual.
docs/decisions/novelty.md compares it with other distances.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from vitral.errors import ConfigError, WeightsError
from vitral.weights.formats.safetensors import write_safetensors

MAX_QUANTILES = 1001
SHRINKAGE = 0.5
FOLDS = 20
"""With fewer folds, the statistics of the others are noticeably worse than those of all images."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Novelty:
    """The statistics of the training features, and the distances of ordinary images."""

    mean: Tensor
    """(D,): the mean of all training features."""
    whitening: Tensor
    """(D, D): (x - mean) @ whitening has the same spread in every direction."""
    directions: Tensor
    """(K, D): the whitened direction from the mean to that of each class."""
    quantiles: Tensor
    """(Q,): evenly spaced quantiles of the distances of ordinary images, ascending."""

    @property
    def width(self) -> int:
        return len(self.mean)

    def distance(self, features: Tensor) -> Tensor:
        """Return (B,): 0 in the direction of a class mean, 1 at a right angle to it, 2 in the opposite direction."""
        whitened = F.normalize((features.float() - self.mean) @ self.whitening, dim=1)
        return 1 - (whitened @ self.directions.T).amax(1)

    def score(self, features: Tensor) -> Tensor:
        """Return (B,) from 0 to 1: the fraction of ordinary images that are less unusual than each image.

        Beyond the most unusual of the ordinary images, the rest up to 1 decays with the distance.
        """
        distance = self.distance(features)
        steps = len(self.quantiles)
        upper = torch.searchsorted(self.quantiles, distance).clamp(1, steps - 1)
        low, high = self.quantiles[upper - 1], self.quantiles[upper]
        fraction = ((distance - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
        inside = (upper - 1 + fraction) / steps
        largest, spread = self.quantiles[-1], (self.quantiles[-1] - self.quantiles[0]).clamp(min=1e-6)
        beyond = 1 - torch.exp(-(distance - largest) / spread) / steps
        return torch.where(distance > largest, beyond, inside)

    def save(self, path: Path) -> None:
        """Write the statistics as safetensors, in float16 except the quantiles."""
        halved = {name: getattr(self, name).half().contiguous() for name in ("mean", "whitening", "directions")}
        write_safetensors(path, halved | {"quantiles": self.quantiles.contiguous()}, metadata={})

    @classmethod
    def load(cls, path: Path) -> "Novelty":
        """Read statistics that `save` wrote. Raise WeightsError for another or a damaged file."""
        try:
            novelty = cls(**{name: tensor.float() for name, tensor in load_file(path).items()})
            width, classes = novelty.width, len(novelty.directions)
            shapes = (novelty.whitening.shape, novelty.directions.shape)
            is_consistent = shapes == ((width, width), (classes, width)) and novelty.quantiles.ndim == 1
            if not is_consistent or len(novelty.quantiles) < 2 or not classes:
                raise ValueError("unexpected shapes")
        except (OSError, SafetensorError, TypeError, ValueError) as error:
            raise WeightsError(
                f"{path} is damaged: {error}.", hint="Delete it to predict without `unusual`."
            ) from error
        return novelty


def fit_novelty(
    features: Tensor,
    labels: Tensor,
    *,
    held_out: Tensor | None = None,
    folds: Tensor | None = None,
) -> Novelty:
    """Fit the statistics to (N, D) training features with (N,) labels, or (N, K) of 0 and 1 for multi-label data.

    Distances are calibrated on `held_out`, (M, D) features of other images. Without them, each of the `folds` is
    measured by the statistics of the others, which is valid only if the network was not trained on these images.
    """
    statistics = _fit_statistics(features, labels, features.shape[1])
    if held_out is not None:
        return _calibrate(statistics, statistics.distance(held_out))
    if len(features) < 2:
        raise ConfigError(f"Novelty needs at least 2 training images (got {len(features)}).")
    if folds is None or (folds == folds[0]).all():
        folds = torch.randperm(len(features), generator=torch.Generator().manual_seed(0)) % FOLDS
    coordinates, width = _span(features), features.shape[1]
    distances = [
        _fit_statistics(coordinates[folds != fold], labels[folds != fold], width).distance(coordinates[folds == fold])
        for fold in np.unique(folds.numpy())
    ]
    return _calibrate(statistics, torch.cat(distances))


def _calibrate(statistics: Novelty, distances: Tensor) -> Novelty:
    """Return the statistics with the quantiles of these distances."""
    positions = torch.linspace(0, 1, max(2, min(MAX_QUANTILES, len(distances))), dtype=torch.double)
    return replace(statistics, quantiles=torch.quantile(distances.double(), positions).float())


def _span(features: Tensor) -> Tensor:
    """Return coordinates of (N, D) features with the same distances and angles: at most N per image.

    The folds of a few images would otherwise decompose a matrix of all D dimensions each.
    """
    if len(features) >= features.shape[1]:
        return features
    centered = features.double() - features.double().mean(0)
    basis, _ = np.linalg.qr(centered.T.numpy())
    return centered @ torch.tensor(basis)


def _fit_statistics(features: Tensor, labels: Tensor, width: int) -> Novelty:
    """Return statistics without quantiles. Features have `width` dimensions, or fewer if `_span` removed some."""
    features = features.double()
    members = F.one_hot(labels).double() if labels.ndim == 1 else labels.double()
    members = members[:, members.sum(0) > 0]
    class_means = (members.T @ features) / members.sum(0)[:, None]
    mean, whitening = fit_whitening(features, shrinkage=SHRINKAGE, width=width)
    directions = F.normalize((class_means.float() - mean) @ whitening, dim=1)
    return Novelty(mean=mean, whitening=whitening, directions=directions, quantiles=torch.zeros(2))


def fit_whitening(features: Tensor, *, shrinkage: float, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the mean (D,) and a matrix (D, D): (features - mean) @ matrix has an equal spread in every direction.

    The covariance is shrunk towards a sphere by `shrinkage` (from 0 to 1) if there are few images, and less the more
    there are: fully whitened features of fewer images than dimensions are all at right angles. `width` is the number of
    dimensions if the features vary in D of them only.
    """
    features = features.double()
    mean = features.mean(0)
    centered = features - mean
    images, dimensions = centered.shape
    width = width or dimensions
    covariance = centered.T @ centered / images
    variance = (covariance.trace() / width).clamp(min=1e-12)
    weight = shrinkage * width / (images + width)
    sphere = torch.eye(dimensions, dtype=torch.double)
    shrunk = (1 - weight) * covariance + weight * variance * sphere
    factor = cast("Tensor", torch.linalg.cholesky(shrunk))  # pyright: ignore[reportUnknownMemberType]
    solved = torch.linalg.solve_triangular(factor, sphere, upper=False)  # pyright: ignore
    inverse = cast("Tensor", solved)
    scale = dimensions**0.5 / inverse.square().sum().sqrt()  # a cosine has none
    return mean.float(), (scale * inverse.T).float()  # times its transpose: the inverse covariance
