"""Numbers and scores as text."""

from typing import Any

import pytest

from vitral.report.text import (
    class_table,
    format_accuracy,
    format_bytes,
    format_clock,
    format_count,
    format_duration,
    format_percent,
    format_units,
    summary_lines,
)

SCORES: dict[str, Any] = dict(
    top1=0.981, top5=0.999, images=1000, loss=0.0612, top1_low=0.9705, top1_high=0.9877, per_class=[{}] * 10
)


@pytest.mark.parametrize(
    ("number", "text"),
    [(7, "7"), (999, "999"), (1234, "1.23 K"), (85_800_000, "85.8 M"), (632e6, "632 M"), (0.5, "0.50")],
)
def test_units(number: float, text: str) -> None:
    assert format_units(number) == text


def test_bytes() -> None:
    assert (format_bytes(512), format_bytes(1536), format_bytes(343 * 2**20)) == ("512 B", "1.50 KiB", "343 MiB")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (192, "3:12"), (3792, "1:03:12")])
def test_clock(seconds: float, text: str) -> None:
    assert format_clock(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(90, "90.0 seconds"), (120, "2.0 minutes"), (3 * 86_400, "3.0 days"), (1e10, "317.1 years")]
)
def test_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_percent_of_an_unknown_number_is_a_dash() -> None:
    assert (format_percent(None), format_percent(float("nan")), format_percent(0.5)) == ("-", "-", "50.0%")


def test_count() -> None:
    assert (format_count(1, "image"), format_count(1000, "image")) == ("1 image", "1,000 images")
    assert format_count(2, "class", "classes") == "2 classes"


def test_accuracy() -> None:
    assert format_accuracy(SCORES) == "Accuracy 98.10% (1,000 images, 95% CI 97.0 to 98.8)"
    assert format_accuracy(dict(top1=0.5, images=1)) == "Accuracy 50.00% (1 image)"


def test_summary_of_a_classifier() -> None:
    scores = SCORES | dict(
        split="the test split",
        calibration=dict(error=0.021),
        scaled=dict(error=0.012, temperature=1.25),
        real=dict(top1=0.99, images=900),
        mean_average_precision=0.75,
        notes=["Two images were skipped."],
        images_per_second=1234.5,
    )
    assert summary_lines(scores) == [
        "Accuracy 98.10% (1,000 images, 95% CI 97.0 to 98.8)",
        "Evaluated on: the test split",
        "Top-5 accuracy 99.90%, loss 0.0612",
        "Mean average precision 75.00%",
        "Accuracy with ReaL labels 99.00% (900 images)",
        "Calibration error 2.10%",
        "Calibration error 1.20% after temperature scaling (temperature 1.250)",
        "Two images were skipped.",
        "1,234 images/s, including loading",
    ]


def test_summary_of_few_classes_omits_top5() -> None:
    assert summary_lines(SCORES | dict(per_class=[{}] * 5))[1] == "Loss 0.0612"


def test_summary_of_frozen_features_has_no_classifier() -> None:
    one_shot = dict(shots=1, top1=0.5, spread=0.01, seeds=[0.49, 0.51])
    five_shot = dict(shots=5, top1=0.75, spread=0.02, seeds=[0.73, 0.77])
    scores = dict(
        top1=None, top5=None, loss=None, images=100,
        knn=dict(k=10, top1=0.9, top1_low=0.83, top1_high=0.94), few_shot={**five_shot, "each": [one_shot, five_shot]},
    )  # fmt: skip
    assert summary_lines(scores) == [
        "10-nearest-neighbor accuracy 90.00% (100 images, 95% CI 83.0 to 94.0)",
        "1-shot accuracy 50.00% (closed form, standard deviation 1.00%; seeds: 49.00%, 51.00%)",
        "5-shot accuracy 75.00% (closed form, standard deviation 2.00%; seeds: 73.00%, 77.00%)",
    ]


@pytest.mark.parametrize(("is_clear", "verdict"), [(True, ", a clear difference;"), (False, ", no clear difference;")])
def test_summary_of_a_comparison(is_clear: bool, verdict: str) -> None:
    against = dict(
        model="base", top1=0.97, difference=-0.011, low=-0.02, high=-0.001, is_clear=is_clear, disagreements=21
    )
    line = summary_lines(SCORES | dict(against=against))[-1]
    assert "base: accuracy 97.00%, -1.10 points (95% CI -2.00 to -0.10)" in line
    assert verdict in line
    assert "21 images" in line


def test_average_precision_is_a_column_of_multi_label_data() -> None:
    row = {"class": "cat", "precision": 0.5, "recall": 1.0, "f1": None, "images": 1000, "average_precision": None}
    assert class_table([row]) == (
        ["class", "precision", "recall", "f1", "images"],
        [["cat", "50.0%", "100.0%", "-", "1,000"]],
    )
    titles, cells = class_table([row | {"average_precision": 0.25}])
    assert (titles[-2], cells[0][-2]) == ("average precision", "25.0%")
