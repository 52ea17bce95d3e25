"""Metrics against scikit-learn and against plain arithmetic."""

from math import isnan, sqrt

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    average_precision_score,
    confusion_matrix,
    f1_score,
    log_loss,
    precision_score,
    recall_score,
    top_k_accuracy_score,
)

from vitral.evaluation.metrics import (
    average_precision,
    calibration_error,
    compare,
    confusion,
    fit_temperature,
    mean_average_precision,
    per_class,
    per_label,
    score,
    wilson,
)


def predictions(images: int = 500, classes: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (images,), generator=random)
    logits = torch.randn(images, classes, generator=random)
    logits[torch.arange(images), labels] += 1.5
    return logits, labels


def test_top_k_and_loss_equal_scikit_learns() -> None:
    logits, labels = predictions()
    scores = score(logits, labels)
    probabilities = logits.double().softmax(1).numpy()
    assert scores.top1 == pytest.approx(top_k_accuracy_score(labels, probabilities, k=1))
    assert scores.top5 == pytest.approx(top_k_accuracy_score(labels, probabilities, k=5))
    assert scores.loss == pytest.approx(log_loss(labels, probabilities), rel=1e-9)
    assert scores.images == 500


def test_top5_of_three_classes_is_top3() -> None:
    logits, labels = predictions(classes=3)
    assert score(logits, labels).top5 == 1.0


def test_the_first_of_equal_logits_wins_everywhere() -> None:
    logits, labels = (
        torch.randint(0, 3, (2000, 10), generator=torch.Generator().manual_seed(0)),
        torch.arange(2000) % 10,
    )
    scores = score(logits.float(), labels)
    assert scores.top1 == (logits.argmax(1) == labels).double().mean().item()
    assert scores.top5 > scores.top1


def test_confusion_and_every_class_equal_scikit_learns() -> None:
    logits, labels = predictions()
    labels[labels == 6] = 5  # a class without images
    logits[:, 7] = -100  # a class that is never predicted
    predicted = logits.argmax(1)
    table = confusion(predicted, labels, 8)
    assert np.array_equal(table, confusion_matrix(labels, predicted, labels=range(8)))
    classes = per_class(predicted, labels, 8)
    keywords = dict(labels=range(8), average=None, zero_division=np.nan)
    for name, scorer in (("precision", precision_score), ("recall", recall_score), ("f1", f1_score)):
        ours = [getattr(scores, name) for scores in classes]
        assert ours == pytest.approx(scorer(labels, predicted, **keywords), nan_ok=True)
    assert isnan(classes[6].recall)
    assert isnan(classes[7].precision)
    assert sum(scores.images for scores in classes) == 500


def test_average_precision_equals_scikit_learns_with_ties() -> None:
    random = np.random.default_rng(0)
    truth = random.integers(0, 2, (200, 5))
    scores = random.normal(size=(200, 5)).round(1) + truth  # rounded: many equal scores
    for column in range(5):
        ours = average_precision(torch.tensor(scores[:, column]), torch.tensor(truth[:, column]))
        assert ours == pytest.approx(average_precision_score(truth[:, column], scores[:, column]))
    labels = per_label(torch.tensor(scores), torch.tensor(truth))
    assert mean_average_precision(labels) == pytest.approx(average_precision_score(truth, scores, average="macro"))
    positive = scores > 0
    assert [label.recall for label in labels] == pytest.approx(recall_score(truth, positive, average=None))
    assert [label.precision for label in labels] == pytest.approx(precision_score(truth, positive, average=None))
    assert isnan(average_precision(torch.randn(3), torch.zeros(3)))


def test_wilsons_interval_by_hand() -> None:
    low, high = wilson(90, 100)
    z, fraction = 1.959963984540054, 0.9
    center = (fraction + z**2 / 200) / (1 + z**2 / 100)
    reach = z * sqrt(fraction * 0.1 / 100 + z**2 / 40000) / (1 + z**2 / 100)
    assert (low, high) == pytest.approx((center - reach, center + reach))
    assert (round(low, 4), round(high, 4)) == (0.8256, 0.9448)  # as published tables have it
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == pytest.approx(1.0)
    assert wilson(0, 0) == (0.0, 1.0)


def test_wilsons_interval_covers_the_truth_about_95_times_in_100() -> None:
    random = np.random.default_rng(0)
    inside = [low <= 0.93 <= high for low, high in (wilson(k, 200) for k in random.binomial(200, 0.93, 4000))]
    assert 0.93 < np.mean(inside) < 0.97


def test_a_difference_is_paired() -> None:
    first = torch.tensor([1] * 80 + [0] * 20)
    second = torch.tensor([1] * 78 + [0, 0] + [1] * 12 + [0] * 8)
    difference = compare(first, second)
    assert (difference.only_first, difference.only_second, difference.both, difference.neither) == (2, 12, 78, 8)
    assert difference.difference == pytest.approx(0.10)
    assert difference.low < 0.1 < difference.high
    assert difference.is_clear
    assert not compare(first, first).is_clear
    assert compare(first, first).high > 0  # nothing is certain after a hundred images
    assert not compare(torch.tensor([0, 0, 1]), torch.tensor([1, 1, 1])).is_clear
    assert not compare(torch.tensor([0]), torch.tensor([1])).is_clear


def test_the_interval_of_a_difference_covers_the_truth_about_95_times_in_100() -> None:
    random = np.random.default_rng(0)
    inside = []
    for both, first, second, neither in random.multinomial(150, [0.75, 0.05, 0.10, 0.10], 1500):
        right = [1] * both + [1] * first + [0] * second + [0] * neither
        other = [1] * both + [0] * first + [1] * second + [0] * neither
        difference = compare(torch.tensor(right), torch.tensor(other))
        inside.append(difference.low <= 0.05 <= difference.high)
    assert 0.93 < np.mean(inside) < 0.985


def test_multi_label_scores() -> None:
    logits = torch.tensor([[2.0, 1.0, -1.0], [-1.0, 0.5, 0.4], [3.0, -1.0, 0.0]])
    labels = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    scores = score(logits, labels)
    assert scores.top1 == pytest.approx(2 / 3)
    probabilities = logits.double().sigmoid()
    by_hand = -(labels * probabilities.log() + (1 - labels) * (1 - probabilities).log()).sum(1).mean()
    assert scores.loss == pytest.approx(by_hand.item())


# ---- calibration ----


def test_calibration_error_equals_the_plain_sum() -> None:
    logits, labels = predictions(2000)
    confidence, predicted = logits.double().softmax(1).max(1)
    correct = (predicted == labels).double()
    error, bins = calibration_error(confidence, correct)
    expected = 0.0
    for number in range(15):
        low, high = number / 15, (number + 1) / 15
        inside = [(p, c) for p, c in zip(confidence.tolist(), correct.tolist(), strict=True) if low < p <= high]
        if inside:
            expected += abs(np.mean([p for p, _ in inside]) - np.mean([c for _, c in inside])) * len(inside) / 2000
        assert bins[number].images == len(inside)
    assert error == pytest.approx(expected)
    assert calibration_error(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))[0] == 0.0


def test_temperature_recovers_the_scale_of_the_logits() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, 5, generator=random, dtype=torch.double) * 2
    labels = torch.multinomial(logits.softmax(1), 1, generator=random)[:, 0]  # perfectly calibrated
    assert fit_temperature(logits, labels) == pytest.approx(1.0, abs=0.03)
    assert fit_temperature(logits * 3, labels) == pytest.approx(3.0, abs=0.1)
