"""Summarize a model's outputs on a split as an Evaluation: scores, mistakes and calibration."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor

from vitral.evaluation import metrics
from vitral.evaluation.metrics import Calibration, ClassScores, Scores, without_nan
from vitral.inference.pipeline import ModelOutputs

MAX_MISTAKES, MAX_CONFUSION_CLASSES, MAX_CONFUSED_PAIRS = 12, 100, 10
PERMANENT_KEYS = ("top1", "top5", "images", "loss", "mistakes", "unreadable")
"""Keys that `Evaluation.as_dict` always has; scores are None for frozen features without a classifier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """A wrong prediction with a high probability."""

    key: str
    label: str
    """The class of the image; on multi-label data all its labels, such as "cat, dog"."""
    prediction: str
    probability: float


@dataclass(frozen=True, kw_only=True, repr=False, slots=True)
class Evaluation:
    """The result of `vitral.evaluate`."""

    scores: Scores
    """Scores of the classifier; NaN except `images` if frozen features were evaluated without one."""
    classes: tuple[str, ...] = ()
    mean_average_precision: float | None = None
    calibration: Calibration | None = None
    scaled: Calibration | None = None
    """The calibration after temperature scaling, if requested."""
    per_class: list[ClassScores] = field(default_factory=list)
    confusion: list[list[int]] | None = None
    """Counts with a row per true class; None for multi-label data and for more than 100 classes."""
    confused: tuple[tuple[str, str, int], ...] = ()
    """The most frequent mistakes: (label, prediction, count)."""
    mistakes: tuple[Mistake, ...] = ()
    """The wrong predictions with the highest probabilities, one per image."""
    unreadable: tuple[tuple[str, str], ...] = ()
    """Images that are excluded from all scores, each with the reason."""
    images_per_second: float | None = None
    few_shot: dict[str, Any] | None = None
    """Few-shot regression on frozen features: shots, top1, spread, seeds; `each` with several numbers of shots."""
    knn: dict[str, Any] | None = None
    """Nearest neighbors on frozen features: k, top1, top1_low, top1_high."""
    real: dict[str, float] | None = None
    """Accuracy with ReaL labels: top1, and the number of images that have any."""
    against: dict[str, Any] | None = None
    """The comparison with a second model."""
    split: str = ""
    """The origin of the test images."""
    engine: str = "torch float32"
    """The engine and the precision that computed the outputs."""
    notes: tuple[str, ...] = ()
    """Facts about the evaluation that may surprise."""

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95% confidence interval of top1 (Wilson); NaN without a classifier."""
        top1, images = self.scores.top1, self.scores.images
        return (nan, nan) if isnan(top1) else metrics.wilson(top1 * images, images)

    def __repr__(self) -> str:
        images = f"{self.scores.images:,} images"
        if features := self.knn or self.few_shot:
            return f"<Evaluation: accuracy {features['top1']:.2%} on frozen features ({images})>"
        low, high = self.interval
        return f"<Evaluation: accuracy {self.scores.top1:.2%} ({images}, 95% CI {low:.2%} to {high:.2%})>"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. Entries without a value are left out, except the main scores."""
        fields = asdict(self).items()
        values: dict[str, Any] = {name: list(value) if isinstance(value, tuple) else value for name, value in fields}
        scores, classes, rows = values.pop("scores"), values.pop("classes"), values["per_class"]
        values["per_class"] = [{"class": name, **without_nan(row)} for name, row in zip(classes, rows, strict=True)]
        low, high = self.interval
        values = without_nan({**scores, "top1_low": low, "top1_high": high, **values})
        return {name: value for name, value in values.items() if name in PERMANENT_KEYS or value not in (None, [], ())}


def summarize(outputs: ModelOutputs, classes: Sequence[str], *, temperature: bool = False) -> Evaluation:
    """Return the evaluation of a classifier from its logits; ``temperature`` adds the calibration after scaling."""
    logits, labels = outputs.outputs, outputs.labels
    scores = metrics.score(logits, labels)
    evaluation = Evaluation(scores=scores, classes=tuple(classes), unreadable=outputs.unreadable)
    if labels.ndim == 2:
        rows = metrics.per_label(logits, labels)
        mean = metrics.mean_average_precision(rows)
        mistakes = _worst_mistakes(logits, labels, classes, outputs.keys)
        return replace(evaluation, per_class=rows, mean_average_precision=mean, mistakes=mistakes)
    predicted = logits.argmax(1)
    has_matrix = len(classes) <= MAX_CONFUSION_CLASSES
    return replace(
        evaluation,
        per_class=metrics.per_class(predicted, labels, len(classes)),
        confusion=metrics.confusion(predicted, labels, len(classes)).tolist() if has_matrix else None,
        confused=_most_confused(predicted, labels, classes),
        calibration=metrics.calibrate(logits, labels),
        scaled=metrics.calibrate_scaled(logits, labels) if temperature else None,
        mistakes=_worst_mistakes(logits, labels, classes, outputs.keys),
    )


def _most_confused(predicted: Tensor, labels: Tensor, classes: Sequence[str]) -> tuple[tuple[str, str, int], ...]:
    wrong = predicted != labels
    pairs, counts = torch.unique(labels[wrong] * len(classes) + predicted[wrong], return_counts=True)
    order = counts.argsort(descending=True, stable=True)[:MAX_CONFUSED_PAIRS]
    rows: list[tuple[int, int]] = list(zip(pairs[order].tolist(), counts[order].tolist(), strict=True))
    return tuple((classes[pair // len(classes)], classes[pair % len(classes)], count) for pair, count in rows)


def _worst_mistakes(logits: Tensor, labels: Tensor, classes: Sequence[str], keys: Sequence[str]) -> tuple[Mistake, ...]:
    """Return the wrong predictions with the highest probabilities, one per image.

    On multi-label data, they are labels with a probability above 0.5 that the image does not have."""
    if labels.ndim == 1:
        confidence, predicted = logits.softmax(dim=1).max(dim=1)
        is_wrong = predicted != labels
    else:
        highest, predicted = logits.masked_fill(labels > 0, -torch.inf).max(dim=1)
        confidence, is_wrong = highest.sigmoid(), highest > 0
    confidence = confidence.masked_fill(~is_wrong, -1.0)
    order: list[int] = confidence.argsort(descending=True)[:MAX_MISTAKES].tolist()
    return tuple(
        Mistake(
            key=keys[index],
            label=join_labels(labels[index], classes),
            prediction=classes[int(predicted[index])],
            probability=confidence[index].item(),
        )
        for index in order
        if confidence[index] >= 0
    )


def join_labels(labels: Tensor, classes: Sequence[str]) -> str:
    """Return the class of an image as text, or all its labels: "cat, dog", or "none"."""
    indices: list[int] = [int(labels)] if labels.ndim == 0 else labels.nonzero()[:, 0].tolist()
    return ", ".join(classes[index] for index in indices) or "none"
