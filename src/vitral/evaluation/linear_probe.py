"""Fit a linear classifier to frozen features, with its regularization chosen by cross-validation.

There are two kinds. Logistic regression suits any labels and any number of images. A linear discriminant, which is
class means and one covariance that all classes share, is often better with few images per class.

One decomposition of the features serves every strength and fold: in the coordinates of the singular vectors the problem
has at most as many dimensions as there are images, and dividing each by its curvature lets L-BFGS converge in a few
iterations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.evaluation.metrics import fit_temperature, score

STRENGTHS = tuple(10.0 ** (1 - index / 2) for index in range(13))
"""L2 penalties, strongest first. The penalty is strength / 2 times the squared norm of the weights of features whose
root mean square is 1; the loss is a mean over images."""
FIRST_STRENGTH, STRIDES = 8, (4, 2, 1)
"""The search starts at this index and walks downhill, first in large strides."""
SHRINKAGES = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
"""How far the covariance of a discriminant is moved towards a sphere; 1 classifies by the nearest class mean."""
FOLDS = 5
MAX_SEARCHED = 5_000_000
"""If images times classes exceed this, strengths are searched on a random sample of the images."""
SEARCH_ITERATIONS, SEARCH_TOLERANCE = 20, 1e-4
FINAL_ITERATIONS, FINAL_TOLERANCE = 100, 1e-5
HISTORY = 20
"""Gradients that L-BFGS remembers; more take longer and save no iterations here."""
EMPTY_COUNT = 0.5
"""Number of images that a class without images counts as."""
Method = Literal["logistic", "discriminant"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearProbe:
    """A linear classifier of features, and its predictions for images that it was not fitted to."""

    weight: Tensor
    """(K, D)."""
    bias: Tensor
    """(K,)."""
    method: Method
    strength: float
    """The L2 penalty of logistic regression, or the shrinkage of a discriminant."""
    temperature: float
    """The logits are divided by it."""
    out_of_fold: Tensor
    """(N, K) logits of each image, from a classifier fitted without the image's fold."""

    def __call__(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight, self.bias)


def choose_folds(labels: Tensor, *, seed: int = 0, folds: int = FOLDS, groups: Tensor | None = None) -> Tensor:
    """Return the fold of each image. Folds have equal shares of every class, and a group stays in one fold.

    Multi-label images, with (N, K) labels, are dealt by the rarest of their labels.
    """
    if labels.ndim == 2:
        labels = (labels / labels.sum(0).clamp(min=1)).argmax(1)
    groups = torch.arange(len(labels)) if groups is None else groups
    leaders, members = groups.unique(return_inverse=True)
    group_labels = torch.empty(len(leaders), dtype=torch.long).scatter_(0, members, labels)
    shuffled = torch.randperm(len(leaders), generator=torch.Generator().manual_seed(seed))
    by_class = shuffled[group_labels[shuffled].argsort(stable=True)]
    fold_of = torch.empty(len(leaders), dtype=torch.long)
    fold_of[by_class] = torch.arange(len(leaders)) % folds  # continues from class to class, so folds have equal sizes
    return fold_of[members]


def sample_rows(labels: Tensor, *, classes: int, seed: int = 0) -> Tensor:
    """Return the rows to search with: all, or a random sample if there are too many images and classes."""
    limit = max(1, MAX_SEARCHED // classes)
    if len(labels) <= limit:
        return torch.arange(len(labels))
    return torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:limit].sort().values


@dataclass(frozen=True, kw_only=True, eq=False)
class CrossValidation:
    """The best strength for some features, and the predictions that show it."""

    method: Method
    strength: float
    out_of_fold: Tensor
    problem: "_Problem"
    temperature: float = 1.0

    def fit(self) -> LinearProbe:
        """Return the probe fitted to all images."""
        weight, bias = self.problem.fit(self.method, self.strength, self.temperature)
        return LinearProbe(
            weight=weight,
            bias=bias,
            method=self.method,
            strength=self.strength,
            temperature=self.temperature,
            out_of_fold=self.out_of_fold,
        )

    def calibrate(self) -> "CrossValidation":
        """Return the same with logits divided by the temperature that fits the images out of fold.

        As in Platt scaling, a few images that are all correct must not make the probe certain. Multi-label logits stay.
        """
        labels = self.problem.labels[: len(self.out_of_fold)]
        if labels.ndim == 2:
            return self
        temperature = fit_temperature(self.out_of_fold, labels, smoothing=1 / (len(labels) + 2))
        return replace(self, out_of_fold=self.out_of_fold / temperature, temperature=self.temperature * temperature)


def cross_validate(
    features: Tensor,
    labels: Tensor,
    *,
    classes: int,
    folds: Tensor,
    extra_views: Sequence[Tensor] = (),
    class_weights: Tensor | None = None,
    start: float = STRENGTHS[FIRST_STRENGTH],
    strides: Sequence[int] = STRIDES,
) -> CrossValidation:
    """Search the strength for (N, D) features. Labels are (N,) indices, or (N, K) of 0 and 1 for one sigmoid per class.

    `extra_views` are features of the same images seen differently, such as mirrored. Probes are fitted to all views;
    their predictions are those of the first. The search walks from `start` downhill; without `strides` it stays there.
    """
    problem = _Problem(features, labels, classes, extra_views, class_weights)
    tried: dict[int, Tensor] = {}
    losses: dict[int, float] = {}

    def loss_at(index: int) -> float:
        if not 0 <= index < len(STRENGTHS):
            return float("inf")
        if index not in tried:
            tried[index] = problem.cross_validate(STRENGTHS[index], folds)
            losses[index] = score(tried[index], labels).loss
        return losses[index]

    best = STRENGTHS.index(start)
    loss_at(best)
    for stride in strides:
        while (lower := min((best, best - stride, best + stride), key=loss_at)) != best:
            best = lower
    return CrossValidation(method="logistic", strength=STRENGTHS[best], out_of_fold=tried[best], problem=problem)


def cross_validate_discriminant(
    features: Tensor,
    labels: Tensor,
    *,
    classes: int,
    folds: Tensor,
    extra_views: Sequence[Tensor] = (),
    class_weights: Tensor | None = None,
    shrinkages: Sequence[float] = SHRINKAGES,
) -> CrossValidation:
    """Search the shrinkage of a linear discriminant by its calibrated loss. Labels are (N,) indices.

    With `class_weights` all classes are equally probable beforehand, otherwise as often as they occur.
    """
    problem = _Problem(features, labels, classes, extra_views, class_weights)
    logits = problem.cross_validate_discriminants(shrinkages, folds)
    tried = [
        CrossValidation(method="discriminant", strength=shrinkage, out_of_fold=out_of_fold, problem=problem).calibrate()
        for shrinkage, out_of_fold in zip(shrinkages, logits, strict=True)
    ]
    return min(tried, key=lambda result: score(result.out_of_fold, labels).loss)


def refit_probe(
    probe: LinearProbe,
    features: Tensor,
    labels: Tensor,
    *,
    extra_views: Sequence[Tensor] = (),
    class_weights: Tensor | None = None,
) -> LinearProbe:
    """Return the probe fitted to other images at the same strength. It has no predictions out of fold."""
    problem = _Problem(features, labels, len(probe.bias), extra_views, class_weights)
    weight, bias = problem.fit(probe.method, probe.strength, probe.temperature)
    return replace(probe, weight=weight, bias=bias, out_of_fold=torch.empty(0, len(bias)))


class _Problem:
    """Linear classification in the coordinates of the singular vectors of the features."""

    def __init__(
        self,
        features: Tensor,
        labels: Tensor,
        classes: int,
        extra_views: Sequence[Tensor],
        class_weights: Tensor | None,
    ):
        views = (features, *extra_views)
        features, labels = torch.cat(views).double(), torch.cat([labels] * len(views))
        self.mean = features.mean(0)
        centered = features - self.mean
        self.scale = centered.square().mean().sqrt().clamp(min=1e-12)
        coordinates, self.basis = _decompose(centered / self.scale)
        self.coordinates = coordinates.float()
        self.curvature = self.coordinates.square().mean(0) / 4
        self.labels, self.classes, self.class_weights = labels, classes, class_weights
        self.solutions: dict[int, Tensor] = {}

    def fit(self, method: Method, strength: float, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the weight (K, D) and the bias (K,), fitted to all rows."""
        if method == "discriminant":
            solution = self.discriminants((strength,))[0]
        else:
            start = torch.stack([*self.solutions.values()]).mean(0) if self.solutions else None
            solution = self.solve(strength, start=start, iterations=FINAL_ITERATIONS, tolerance=FINAL_TOLERANCE)
        return self.to_features(solution / temperature)

    def cross_validate(self, strength: float, folds: Tensor) -> Tensor:
        """Return the (N, K) out-of-fold logits of the first view. Each fold starts at its solution before this one."""
        rows = folds.repeat(len(self.labels) // len(folds))
        logits = torch.empty(len(folds), self.classes)
        for fold in folds.unique().tolist():
            start = self.solutions.get(fold)
            self.solutions[fold] = solution = self.solve(strength, rows != fold, start=start)
            held_out = (folds == fold).nonzero()[:, 0]
            logits[held_out] = torch.addmm(solution[-1], self.coordinates[held_out], solution[:-1])
        return logits

    def cross_validate_discriminants(self, shrinkages: Sequence[float], folds: Tensor) -> Tensor:
        """Return the (S, N, K) out-of-fold logits of the first view."""
        rows = folds.repeat(len(self.labels) // len(folds))
        logits = torch.empty(len(shrinkages), len(folds), self.classes)
        for fold in folds.unique().tolist():
            held_out = (folds == fold).nonzero()[:, 0]
            solutions = self.discriminants(shrinkages, rows != fold)
            logits[:, held_out] = self.coordinates[held_out] @ solutions[:, :-1] + solutions[:, -1:]
        return logits

    def discriminants(self, shrinkages: Sequence[float], chosen: Tensor | slice = slice(None)) -> Tensor:
        """Return the (S, R + 1, K) weights, the bias last, of a discriminant for each shrinkage.

        They are those of Gaussians with one covariance for all classes. It is measured in units of its mean variance.
        """
        x, labels = self.coordinates[chosen].double(), self.labels[chosen]
        counts = labels.bincount(minlength=self.classes)
        sums = torch.zeros(self.classes, x.shape[1], dtype=x.dtype).index_add_(0, labels, x)
        means = sums / counts.clamp(min=1)[:, None]
        residuals = x - means[labels]
        variances, axes = torch.linalg.eigh(residuals.T @ residuals)
        variances = variances.clamp(min=0)
        variances = variances / variances.mean() if variances.mean() > 0 else torch.ones_like(variances)
        rotated = means @ axes  # (K, R)
        priors = counts.double().clamp(min=EMPTY_COUNT).log() if self.class_weights is None else counts.double() * 0
        shrunk = [(1 - shrinkage) * variances + shrinkage for shrinkage in shrinkages]
        weights = [rotated / variance for variance in shrunk]
        solutions = [torch.cat([axes @ weight.T, (priors - (rotated * weight).sum(1) / 2)[None]]) for weight in weights]
        return torch.stack(solutions).float()

    def solve(
        self,
        strength: float,
        chosen: Tensor | slice = slice(None),
        *,
        start: Tensor | None = None,
        iterations: int = SEARCH_ITERATIONS,
        tolerance: float = SEARCH_TOLERANCE,
    ) -> Tensor:
        """Return the (R + 1, K) weights, the bias last, that minimize the penalized loss on the chosen rows."""
        x, labels = self.coordinates[chosen], self.labels[chosen]
        scale = torch.cat([(self.curvature + strength).rsqrt(), torch.ones(1)])[:, None]
        unknown = torch.zeros(len(scale), self.classes) if start is None else start / scale
        unknown.requires_grad_()
        optimizer = torch.optim.LBFGS(
            [unknown],
            max_iter=iterations,
            history_size=HISTORY,
            tolerance_grad=tolerance,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            weights = unknown * scale
            loss = self.loss(torch.addmm(weights[-1], x, weights[:-1]), labels)
            loss = loss + strength / 2 * weights[:-1].square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return unknown.detach() * scale

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if labels.ndim == 2:
            losses = F.binary_cross_entropy_with_logits(logits, labels.float(), pos_weight=self.class_weights)
            return losses * self.classes
        return F.cross_entropy(logits, labels, weight=self.class_weights)

    def to_features(self, solution: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight (K, D) and the bias (K,) for the original features."""
        weight = (self.basis @ solution[:-1].double()).T / self.scale
        return weight.float(), (solution[-1].double() - weight @ self.mean).float()


def _decompose(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return coordinates (N, R) and an orthogonal basis (D, R) with x = coordinates @ basis.T."""
    if x.shape[0] < x.shape[1]:
        u, values, basis = torch.linalg.svd(x, full_matrices=False)
        return u * values, basis.T
    _, basis = torch.linalg.eigh(x.T @ x)
    return x @ basis, basis
