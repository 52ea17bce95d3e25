"""The plots: well-formed SVG with theme colors, whatever the numbers and names."""

from xml.etree import ElementTree

import pytest

from tests.report.example_run import HOSTILE_NAMES
from vitral.report.plots import CSS_COLORS, MAX_NAMED_CLASSES, draw_confusion, draw_curves, draw_reliability

LOSSES = [{"step": str(step), "loss": str(3 / step)} for step in range(1, 100)]
EPOCHS = [{"step": str(step), "loss": "1.5", "top1": "0.5"} for step in range(10, 100, 10)]


def texts(svg: str) -> list[str]:
    """Return the texts of an SVG; raise ParseError if it is not well-formed XML."""
    elements = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(element.itertext()) for element in elements]


def test_curves_have_a_panel_for_the_loss_and_one_for_the_accuracy() -> None:
    labels = texts(draw_curves(LOSSES, EPOCHS))
    assert {"loss", "training", "validation", "validation accuracy (%)"} <= set(labels)


def test_curves_without_labels_have_no_panel_for_the_accuracy() -> None:
    labels = texts(draw_curves(LOSSES, [{**row, "top1": "nan"} for row in EPOCHS]))
    assert "loss" in labels
    assert "validation accuracy (%)" not in labels


@pytest.mark.parametrize(("losses", "epochs"), [([], EPOCHS), (LOSSES, []), (LOSSES[:1], EPOCHS[:1])])
def test_curves_of_short_runs(losses: list[dict[str, str]], epochs: list[dict[str, str]]) -> None:
    assert "step" in texts(draw_curves(losses, epochs))


def test_confusion_matrix_shows_hostile_names_as_text() -> None:
    size = len(HOSTILE_NAMES)
    svg = draw_confusion([[row * size + column for column in range(size)] for row in range(size)], HOSTILE_NAMES)
    labels = texts(svg)
    assert labels.count("<script>alert(1)<…") == 2  # on both axes
    assert labels.count("犬と猫") == 2
    assert "\x1b" not in svg
    assert str(size * size - 1) in labels  # the count in the last cell
    assert "0" not in labels  # empty cells stay empty


def test_large_confusion_matrix_has_no_names() -> None:
    count = MAX_NAMED_CLASSES + 1
    svg = draw_confusion([[1] * count] * count, [f"class {n}" for n in range(count)])
    assert not any(text.startswith("class") for text in texts(svg))


def test_reliability_accepts_empty_bins() -> None:
    bins = [{"images": 0, "confidence": 0.0, "accuracy": 0.0}, {"images": 5, "confidence": 0.75, "accuracy": 0.6}]
    assert {"accuracy", "confidence", "images"} <= set(texts(draw_reliability(bins)))


def test_plots_are_repeatable_and_follow_the_theme() -> None:
    svg = draw_curves(LOSSES, EPOCHS)
    assert svg == draw_curves(LOSSES, EPOCHS)
    assert not any(color in svg for color in CSS_COLORS)
    assert {"var(--ink)", "var(--blue)", "var(--orange)"} <= {color for color in CSS_COLORS.values() if color in svg}
