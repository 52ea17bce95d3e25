"""What is known about a model's answers on a set of pictures: numbers, mistakes, and how far to trust them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import nan
from typing import Any

import torch
from torch import Tensor

from vitral.evaluation.metrics import (
    Bin,
    ClassScores,
    Scores,
    calibration,
    confusion,
    fit_temperature,
    mean_average_precision,
    per_class,
    per_label,
    score,
    wilson,
    without_nan,
)
from vitral.inference.pipeline import ModelOutputs

MOST_MISTAKES, LARGEST_MATRIX, MOST_PAIRS = 12, 100, 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """A wrong answer that the model was sure of."""

    key: str
    truth: str
    answer: str
    probability: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    error: float
    """Expected calibration error: 0.05 means that confidence is 5 points off, on average."""
    bins: list[Bin]
    temperature: float | None = None
    """What logits were divided by; fitted on the other half of the pictures, each half for the other."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation:
    scores: Scores
    interval: tuple[float, float]
    """95 % interval of top1 (Wilson)."""
    classes: tuple[str, ...]
    per_class: list[ClassScores]
    confusion: list[list[int]] | None = None
    """A row for each true class; None for multi-label data and for over 100 classes."""
    confused: tuple[tuple[str, str, int], ...] = ()
    """The commonest (truth, answer, times)."""
    calibration: Calibration | None = None
    scaled: Calibration | None = None
    """The same after temperature scaling, where that was asked for."""
    mean_average_precision: float | None = None
    mistakes: tuple[Mistake, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()
    """Pictures that do not count, and why."""
    images_per_second: float | None = None
    few_shot: dict[str, Any] | None = None
    knn: dict[str, Any] | None = None
    real: dict[str, float] | None = None
    """With several true labels a picture (ReaL): top1, and the images that have any."""
    against: dict[str, Any] | None = None
    """The difference to another model."""
    split: str = ""
    """Which pictures these are."""
    notes: tuple[str, ...] = ()
    """What may surprise."""

    def __repr__(self) -> str:
        low, high = self.interval
        seen = (
            f"{self.scores.top1:.2%} right of {self.scores.images:,} pictures (95 % interval {low:.2%} to {high:.2%})"
        )
        return f"<Evaluation: {seen}>"

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON; the contract's names are at the top."""
        rows = [
            {"class": name, **without_nan(asdict(found))}
            for name, found in zip(self.classes, self.per_class, strict=True)
        ]
        told = {
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
        return {name: value for name, value in without_nan(told).items() if value is not None}


def summarize(answers: ModelOutputs, classes: Sequence[str], *, temperature: bool = False) -> Evaluation:
    """From the logits of every picture, its label and its name."""
    logits, labels = answers.rows, answers.labels
    scores = score(logits, labels)
    found = Evaluation(
        scores=scores,
        interval=wilson(scores.top1 * scores.images, scores.images),
        classes=tuple(classes),
        per_class=[],
        unreadable=answers.unreadable,
    )
    if labels.ndim == 2:
        rows = per_label(logits, labels)
        return replace(found, per_class=rows, mean_average_precision=mean_average_precision(rows))
    predicted = logits.argmax(1)
    is_small = len(classes) <= LARGEST_MATRIX
    return replace(
        found,
        per_class=per_class(predicted, labels, len(classes)),
        confusion=confusion(predicted, labels, len(classes)).tolist() if is_small else None,
        confused=_commonest(predicted, labels, classes),
        calibration=_calibrate(logits, labels),
        scaled=_calibrate_scaled(logits, labels) if temperature else None,
        mistakes=_worst(logits, labels, classes, answers.keys),
    )


def _commonest(predicted: Tensor, labels: Tensor, classes: Sequence[str]) -> tuple[tuple[str, str, int], ...]:
    wrong = predicted != labels
    pairs, times = torch.unique(labels[wrong] * len(classes) + predicted[wrong], return_counts=True)
    order = times.argsort(descending=True, stable=True)[:MOST_PAIRS].tolist()
    found: list[tuple[str, str, int]] = []
    for place in order:
        truth, answer = divmod(int(pairs[place]), len(classes))
        found.append((classes[truth], classes[answer], int(times[place])))
    return tuple(found)


def _calibrate(logits: Tensor, labels: Tensor, temperature: float | None = None) -> Calibration:
    sure, answers = logits.double().softmax(dim=1).max(dim=1)
    error, bins = calibration(sure, answers == labels)
    return Calibration(error=error, bins=bins, temperature=temperature)


def _calibrate_scaled(logits: Tensor, labels: Tensor) -> Calibration | None:
    """Each half by the temperature of the other, so that no picture judges what was fitted on it."""
    if len(labels) < 2:
        return None
    half = torch.arange(len(labels)) % 2 == 0
    first, second = fit_temperature(logits[half], labels[half]), fit_temperature(logits[~half], labels[~half])
    scaled = logits.double() / torch.where(half, second, first).double()[:, None]
    return _calibrate(scaled, labels, temperature=(first * second) ** 0.5)


def _worst(logits: Tensor, labels: Tensor, classes: Sequence[str], keys: Sequence[str]) -> tuple[Mistake, ...]:
    sure, answers = logits.softmax(dim=1).max(dim=1)
    sure = sure.masked_fill(answers == labels, -1.0)
    order: list[int] = sure.argsort(descending=True)[:MOST_MISTAKES].tolist()
    return tuple(
        Mistake(
            key=keys[place],
            truth=classes[int(labels[place])],
            answer=classes[int(answers[place])],
            probability=sure[place].item(),
        )
        for place in order
        if sure[place] >= 0
    )


def of_features(
    baseline: dict[str, dict[str, Any]],
    test: ModelOutputs,
    unreadable: tuple[tuple[str, str], ...],
    images_per_second: float | None,
) -> Evaluation:
    """From frozen features there is a top-1 only: the neighbours' where both were asked for."""
    images, top1 = len(test.rows), (baseline.get("knn") or baseline["few_shot"])["top1"]
    return Evaluation(
        scores=Scores(images=images, loss=nan, top1=top1, top5=nan),
        interval=wilson(top1 * images, images),
        classes=(),
        per_class=[],
        unreadable=unreadable,
        images_per_second=images_per_second,
        few_shot=baseline.get("few_shot"),
        knn=baseline.get("knn"),
    )
