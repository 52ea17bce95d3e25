"""Calibration against plain arithmetic."""

import numpy as np
import pytest
import torch

from tests.evaluation.test_metrics import predictions
from vitral.evaluation.calibration import calibration_error, fit_temperature


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
