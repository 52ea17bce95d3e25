"""Print predictions for people, one line per image."""

from typing import TYPE_CHECKING, TextIO

from vitral.files import printable
from vitral.report.text import format_count

if TYPE_CHECKING:
    from vitral.inference.writers import FeatureFile, PredictionFile, Row


def write_human(stream: TextIO, row: "Row", top: int) -> None:
    """Write the name of the image and its labels with their probabilities."""
    labels = "  ".join(f"{label} {probability:.1%}" for label, probability in row.top[:top])
    text = labels if row.error is None else f"error: {row.error}"
    stream.write(f"{printable(row.file)}  {printable(text)}\n")


def write_quiet(stream: TextIO, row: "Row", top: int) -> None:
    """Write the most probable label, or an empty line for an unusable image."""
    stream.write(f"{printable(row.top[0][0]) if row.error is None else ''}\n")


def describe_prediction_file(result: "PredictionFile") -> str:
    """Return one line about a file of predictions."""
    failed = f", {result.failed:,} with an error" if result.failed else ""
    return f"{printable(str(result.path))}: {format_count(result.rows, 'row')}{failed}"


def describe_feature_file(result: "FeatureFile") -> list[str]:
    """Return lines about a file of features and the images that are missing from it."""
    images = format_count(result.images, "image")
    head = f"{printable(str(result.path))}: {images}, {result.width} features per image"
    return [head, *(f"skipped {printable(file)}: {printable(reason)}" for file, reason in result.failures)]
