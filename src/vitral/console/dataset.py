"""Print the result of a dataset scan."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vitral.console.output import human_console, plain_table, print_line
from vitral.files import printable

if TYPE_CHECKING:
    from rich.table import Table

    from vitral.data.scan import Scan

MAX_CLASSES, MAX_FILES = 20, 10


def show_scan(result: "Scan", sheet: Path | None) -> None:
    """Print classes, sizes and findings of a scan, and whether training can start."""
    console = human_console()
    total = sum(result.splits.values())
    splits = ", ".join(f"{split} {count:,}" for split, count in result.splits.items())
    print_line(console, f"{result.name}: {total:,} images, {len(result.classes):,} classes ({splits})", "bold")
    if sizes := result.sizes:
        height, width = (
            f"{side} {sizes[f'{side}_smallest']} to {sizes[f'{side}_largest']} (median {sizes[f'{side}_median']})"
            for side in ("height", "width")
        )
        print_line(console, f"{height}, {width}")
    for title, counts in (("aspect", result.aspects), ("mode", result.modes), ("format", result.formats)):
        if counts:
            print_line(console, f"{title}: " + ", ".join(f"{name} {count:,}" for name, count in counts.items()), "dim")
    console.print(_class_table(result))
    if len(result.classes) > MAX_CLASSES:
        print_line(console, f"... and {len(result.classes) - MAX_CLASSES:,} more classes", "dim")
    for finding in _findings(result):
        print_line(console, finding, "yellow")
    for problem in result.problems:
        print_line(console, f"problem: {problem}", "bold red")
    if sheet is not None:
        print_line(console, f"Contact sheet: {sheet}")
    print_line(console, "Ready to train." if result.can_train else "Training would fail.", "bold")


def _class_table(result: "Scan") -> "Table":
    from rich.text import Text

    table = plain_table("class", *result.splits)
    for index, name in enumerate(result.classes[:MAX_CLASSES]):
        table.add_row(Text(printable(name)), *(f"{result.per_class[split][index]:,}" for split in result.splits))
    return table


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
