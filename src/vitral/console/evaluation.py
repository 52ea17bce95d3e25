"""Print an evaluation."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vitral.console.output import human_console, plain_table, print_line, print_lines
from vitral.files import printable
from vitral.report.text import format_count, format_percent, score_columns, summary_lines

if TYPE_CHECKING:
    from rich.table import Table

MAX_CLASSES, MAX_LISTED = 20, 5


def show_evaluation(scores: Mapping[str, Any]) -> None:
    """Print the scores of `Evaluation.as_dict()`, the main result first."""
    console = human_console()
    print_lines(console, summary_lines(scores))
    if scores.get("per_class"):
        rows, hidden = worst_classes(scores["per_class"])
        console.print(class_table(rows))
        if hidden:
            print_line(console, f"... and {format_count(hidden, 'better class', 'better classes')}", "dim")
    for label, prediction, count in (scores.get("confused") or [])[:MAX_LISTED]:
        print_line(console, f"{label} was predicted as {prediction} {format_count(count, 'time')}", "dim")
    unreadable = scores["unreadable"]
    for key, reason in unreadable[:MAX_LISTED]:
        print_line(console, f"unreadable: {key} ({reason})", "yellow")
    if (hidden := len(unreadable) - MAX_LISTED) > 0:
        print_line(console, f"... and {format_count(hidden, 'more unreadable image')}", "yellow")


def worst_classes(rows: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], int]:
    """Return all rows of a per-class table, or the worst of many that have images and the number of the others."""
    if len(rows) <= MAX_CLASSES:
        return rows, 0
    present = sorted((row for row in rows if row["images"]), key=lambda row: row["f1"] or 0)
    return present[:MAX_CLASSES], max(0, len(present) - MAX_CLASSES)


def class_table(rows: Sequence[Mapping[str, Any]]) -> "Table":
    """Return a table of the scores of each class."""
    from rich.text import Text

    names = score_columns(rows)
    table = plain_table("class", *(name.replace("_", " ") for name in (*names, "images")))
    for row in rows:
        scores = (format_percent(row.get(name)) for name in names)
        table.add_row(Text(printable(row["class"])), *scores, f"{row['images']:,}")
    return table
