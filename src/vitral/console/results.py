"""Show dataset scans, predictions, features and evaluations."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from vitral.console.output import print_line, print_lines, print_table
from vitral.files import printable
from vitral.report.text import class_table, format_count, summary_lines

if TYPE_CHECKING:
    from vitral.data.scan import Scan
    from vitral.inference.feature_files import FeatureFile
    from vitral.inference.writers import PredictionFile, Row

MAX_CLASSES, MAX_FILES, MAX_LISTED = 20, 10, 5


# ---- datasets ----


def show_scan(result: "Scan", sheet: Path | None) -> None:
    """Print classes, sizes and findings of a scan, and whether training can start."""
    total = sum(result.splits.values())
    splits = ", ".join(f"{split} {count:,}" for split, count in result.splits.items())
    print_line(f"{result.name}: {total:,} images, {len(result.classes):,} classes ({splits})", "bold")
    if sizes := result.sizes:
        height, width = (
            f"{side} {sizes[f'{side}_smallest']} to {sizes[f'{side}_largest']} (median {sizes[f'{side}_median']})"
            for side in ("height", "width")
        )
        print_line(f"{height}, {width}")
    for title, counts in (("aspect", result.aspects), ("mode", result.modes), ("format", result.formats)):
        if counts:
            print_line(f"{title}: " + ", ".join(f"{name} {count:,}" for name, count in counts.items()), "dim")
    for title, count in (("groups", result.groups), ("dropped images", result.dropped)):
        if count:
            print_line(f"{title}: {count:,}", "dim")
    names = result.classes[:MAX_CLASSES]
    rows = ([name, *(f"{counts[index]:,}" for counts in result.per_class.values())] for index, name in enumerate(names))
    print_table(("class", *result.per_class), rows)
    if len(result.classes) > MAX_CLASSES:
        print_line(f"... and {len(result.classes) - MAX_CLASSES:,} more classes", "dim")
    for finding in _findings(result):
        print_line(finding, "yellow")
    for problem in result.problems:
        print_line(f"problem: {problem}", "bold red")
    if sheet is not None:
        print_line(f"Contact sheet: {sheet}")
    print_line("Ready to train." if result.can_train else "Training would fail.", "bold")


def _findings(result: "Scan") -> Iterator[str]:
    for key, reason in list(result.unreadable.items())[:MAX_FILES]:
        yield f"unreadable: {key} ({reason})"
    for train, other in result.leaked[:MAX_FILES]:
        yield f"leaked: {other} = {train}"
    for title, groups in (("different labels", result.contradictions), ("duplicates", result.duplicates)):
        for keys in groups[:MAX_FILES]:
            yield f"{title}: {' = '.join(keys[:4])}{' ...' if len(keys) > 4 else ''}"
    for warning in result.warnings:
        yield f"warning: {warning}"


# ---- predictions and features ----


def write_human(stream: TextIO, row: "Row", top: int) -> None:
    """Write the name of the image and its labels with their probabilities, or that it was rejected as unusual."""
    labels = "  ".join(f"{label} {probability:.1%}" for label, probability in row.top[:top])
    if not row.top and row.unusual is not None:
        labels = f"unusual ({row.unusual:.3f})"
    text = labels if row.error is None else f"error: {row.error}"
    stream.write(f"{printable(row.file)}  {printable(text)}\n")


def write_quiet(stream: TextIO, row: "Row", top: int) -> None:
    """Write the most probable label, or an empty line for an unusable or rejected image."""
    stream.write(f"{printable(row.top[0][0]) if row.top else ''}\n")


def describe_prediction_file(result: "PredictionFile") -> str:
    """Return one line about a file of predictions."""
    failed = f", {result.failed:,} with an error" if result.failed else ""
    return f"{printable(str(result.path))}: {format_count(result.rows, 'row')}{failed}{_computed_by(result.engine)}"


def _computed_by(engine: str) -> str:
    return "" if engine == "torch float32" else f" (computed by {engine})"


def describe_feature_file(result: "FeatureFile") -> list[str]:
    """Return lines about a file of features and the images that are missing from it."""
    images = format_count(result.images, "image")
    head = f"{printable(str(result.path))}: {images}, {result.width} features per image{_computed_by(result.engine)}"
    return [head, *(f"skipped {printable(file)}: {printable(reason)}" for file, reason in result.failures)]


# ---- evaluations ----


def show_evaluation(scores: Mapping[str, Any]) -> None:
    """Print the scores of `Evaluation.as_dict()`, the main result first."""
    print_lines(summary_lines(scores))
    if scores.get("per_class"):
        rows, hidden = worst_classes(scores["per_class"])
        print_table(*class_table(rows))
        if hidden:
            print_line(f"... and {format_count(hidden, 'better class', 'better classes')}", "dim")
    for label, prediction, count in (scores.get("confused") or [])[:MAX_LISTED]:
        print_line(f"{label} was predicted as {prediction} {format_count(count, 'time')}", "dim")
    unreadable = scores["unreadable"]
    for key, reason in unreadable[:MAX_LISTED]:
        print_line(f"unreadable: {key} ({reason})", "yellow")
    if (hidden := len(unreadable) - MAX_LISTED) > 0:
        print_line(f"... and {format_count(hidden, 'more unreadable image')}", "yellow")


def worst_classes(rows: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], int]:
    """Return all rows of a per-class table, or the worst of many that have images and the number of the others."""
    if len(rows) <= MAX_CLASSES:
        return rows, 0
    present = sorted((row for row in rows if row["images"]), key=lambda row: row["f1"] or 0)
    return present[:MAX_CLASSES], max(0, len(present) - MAX_CLASSES)


def describe_inspection(facts: Mapping[str, Any]) -> list[str]:
    """Return the path of the page, a prediction per image, and the faithfulness of the maps if it was measured."""
    lines = [f"Wrote {facts['page']}"]
    for image in facts["images"]:
        if image["predictions"]:
            best = image["predictions"][0]
            lines.append(f"  {printable(image['name'])}: {printable(best['label'])} {best['probability']:.1%}")
    for name, result in facts["faithfulness"].items():
        interval, verdict = "", "too few images for a verdict; pass at least 10"
        if result["low"] is not None:
            interval = f", 95% CI {result['low']:+.3f} to {result['high']:+.3f}"
            verdict = "better than chance" if result["low"] > 0 else "not clearly better than chance"
        count = format_count(result["images"], "image")
        lines.append(f"Faithfulness of {name}: {result['score']:+.3f} ({count}{interval}): {verdict}")
    return lines
