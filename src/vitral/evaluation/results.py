"""Summarize a model's outputs on a split as an Evaluation: scores, mistakes and calibration."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor

from vitral.evaluation.calibration import Calibration, calibrate, calibrate_scaled
from vitral.evaluation.metrics import (
    ClassScores,
    Scores,
    confusion,
    mean_average_precision,
    per_class,
    per_label,
    score,
    wilson,
    without_nan,
)
from vitral.inference.pipeline import ModelOutputs

MAX_MISTAKES, MAX_CONFUSION_CLASSES, MAX_CONFUSED_PAIRS = 12, 100, 10
SCORE_NAMES = ("top1", "top5", "images", "loss")
"""Keys that `Evaluation.as_dict` always has; None for frozen features, which have no classifier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """A wrong prediction with a high probability."""

    key: str
    label: str
    prediction: str
    probability: float


@dataclass(frozen=True, kw_only=True, repr=False, slots=True)
class Evaluation:
    """The result of `vitral.evaluate`."""

    scores: Scores
    """Scores of the classifier; NaN except `images` if frozen features were evaluated instead."""
    interval: tuple[float, float]
    """95% confidence interval of top1 (Wilson); NaN if frozen features were evaluated instead."""
    classes: tuple[str, ...]
    per_class: list[ClassScores]
    confusion: list[list[int]] | None = None
    """Counts with a row per true class; None for multi-label data and for more than 100 classes."""
    confused: tuple[tuple[str, str, int], ...] = ()
    """The most frequent mistakes: (label, prediction, count)."""
    calibration: Calibration | None = None
    scaled: Calibration | None = None
    """The calibration after temperature scaling, if requested."""
    mean_average_precision: float | None = None
    mistakes: tuple[Mistake, ...] = ()
    """The wrong predictions with the highest probabilities."""
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
    notes: tuple[str, ...] = ()
    """Facts about the evaluation that may surprise."""

    def __repr__(self) -> str:
        images = f"{self.scores.images:,} images"
        if features := self.knn or self.few_shot:
            return f"<Evaluation: accuracy {features['top1']:.2%} on frozen features ({images})>"
        low, high = self.interval
        return f"<Evaluation: accuracy {self.scores.top1:.2%} ({images}, 95% CI {low:.2%} to {high:.2%})>"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. Entries without a value are left out, except the main scores."""
        pairs = zip(self.classes, self.per_class, strict=True)
        rows = [{"class": name, **without_nan(asdict(scores))} for name, scores in pairs]
        values = {
            **self.scores.as_dict(),
            "top1_low": self.interval[0],
            "top1_high": self.interval[1],
            "mean_average_precision": self.mean_average_precision,
            "calibration": None if self.calibration is None else asdict(self.calibration),
            "scaled": None if self.scaled is None else asdict(self.scaled),
            "per_class": rows or None,
            "confusion": self.confusion,
            "confused": [list(pair) for pair in self.confused] or None,
            "mistakes": [asdict(mistake) for mistake in self.mistakes],
            "unreadable": [list(pair) for pair in self.unreadable],
            "images_per_second": self.images_per_second,
            "few_shot": self.few_shot,
            "knn": self.knn,
            "real": self.real,
            "against": self.against,
            "split": self.split,
            "notes": list(self.notes) or None,
        }
        return {name: value for name, value in without_nan(values).items() if value is not None or name in SCORE_NAMES}


def summarize(outputs: ModelOutputs, classes: Sequence[str], *, temperature: bool = False) -> Evaluation:
    """Return the evaluation of a classifier from its logits; ``temperature`` adds the calibration after scaling."""
    logits, labels = outputs.outputs, outputs.labels
    scores = score(logits, labels)
    interval, names = wilson(scores.top1 * scores.images, scores.images), tuple(classes)
    evaluation = Evaluation(
        scores=scores, interval=interval, classes=names, per_class=[], unreadable=outputs.unreadable
    )
    if labels.ndim == 2:
        rows = per_label(logits, labels)
        return replace(evaluation, per_class=rows, mean_average_precision=mean_average_precision(rows))
    predicted = logits.argmax(1)
    has_matrix = len(classes) <= MAX_CONFUSION_CLASSES
    return replace(
        evaluation,
        per_class=per_class(predicted, labels, len(classes)),
        confusion=confusion(predicted, labels, len(classes)).tolist() if has_matrix else None,
        confused=_most_confused(predicted, labels, classes),
        calibration=calibrate(logits, labels),
        scaled=calibrate_scaled(logits, labels) if temperature else None,
        mistakes=_worst_mistakes(logits, labels, classes, outputs.keys),
    )


def summarize_features(
    feature_scores: dict[str, dict[str, Any]], classifier: Scores, *, unreadable: tuple[tuple[str, str], ...]
) -> Evaluation:
    """Return the evaluation of frozen features from the result of `score_features` and the scores of the head."""
    return Evaluation(
        scores=classifier,
        interval=(nan, nan)
        if isnan(classifier.top1)
        else wilson(classifier.top1 * classifier.images, classifier.images),
        classes=(),
        per_class=[],
        unreadable=unreadable,
        few_shot=feature_scores.get("few_shot"),
        knn=feature_scores.get("knn"),
    )


def _most_confused(predicted: Tensor, labels: Tensor, classes: Sequence[str]) -> tuple[tuple[str, str, int], ...]:
    wrong = predicted != labels
    pairs, counts = torch.unique(labels[wrong] * len(classes) + predicted[wrong], return_counts=True)
    order = counts.argsort(descending=True, stable=True)[:MAX_CONFUSED_PAIRS]
    rows: list[tuple[int, int]] = list(zip(pairs[order].tolist(), counts[order].tolist(), strict=True))
    return tuple((classes[pair // len(classes)], classes[pair % len(classes)], count) for pair, count in rows)


def _worst_mistakes(logits: Tensor, labels: Tensor, classes: Sequence[str], keys: Sequence[str]) -> tuple[Mistake, ...]:
    confidence, predicted = logits.softmax(dim=1).max(dim=1)
    confidence = confidence.masked_fill(predicted == labels, -1.0)
    mistakes: list[Mistake] = []
    order: list[int] = confidence.argsort(descending=True)[:MAX_MISTAKES].tolist()
    for index in order:
        if (probability := confidence[index].item()) >= 0:
            label, prediction = classes[int(labels[index])], classes[int(predicted[index])]
            mistakes.append(Mistake(key=keys[index], label=label, prediction=prediction, probability=probability))
    return tuple(mistakes)
