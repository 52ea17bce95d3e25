"""A dataset on the console."""

from pathlib import Path
from typing import Any

from vitral.console.output import human_console
from vitral.files import printable

MOST_CLASSES, MOST_FILES = 20, 10


def show_scan(found: Any, sheet: Path | None) -> None:
    from rich.table import Table
    from rich.text import Text

    console = human_console()

    def line(text: str, style: str | None = None) -> None:
        console.print(printable(text), style=style, highlight=False, markup=False, soft_wrap=True)

    total = sum(found.splits.values())
    parts = ", ".join(f"{split} {number:,}" for split, number in found.splits.items())
    line(f"{found.name}: {total:,} pictures, {len(found.classes)} classes ({parts})", "bold")
    if found.sizes:
        sizes = found.sizes
        line(
            f"height {sizes['height_smallest']} to {sizes['height_largest']} (median {sizes['height_median']}), "
            f"width {sizes['width_smallest']} to {sizes['width_largest']} (median {sizes['width_median']})"
        )
    for title, numbers in (("shape", found.aspects), ("colours", found.modes), ("files", found.formats)):
        if numbers:
            line(f"{title}: " + ", ".join(f"{name} {number:,}" for name, number in numbers.items()), "dim")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("class", no_wrap=True)
    for split in found.splits:
        table.add_column(split, justify="right")
    for index, name in enumerate(found.classes[:MOST_CLASSES]):
        table.add_row(Text(printable(name)), *(f"{found.per_class[split][index]:,}" for split in found.splits))
    console.print(table)
    if len(found.classes) > MOST_CLASSES:
        line(f"... and {len(found.classes) - MOST_CLASSES} more classes", "dim")
    for key, reason in list(found.unreadable.items())[:MOST_FILES]:
        line(f"unreadable  {key}: {reason}", "yellow")
    for train, held in found.leaked[:MOST_FILES]:
        line(f"leaked      {held} is {train}", "yellow")
    for keys in found.contradictions[:MOST_FILES]:
        line(f"two labels  {' = '.join(keys)}", "yellow")
    for keys in found.duplicates[:MOST_FILES]:
        line(f"copies      {' = '.join(keys[:4])}{' ...' if len(keys) > 4 else ''}", "yellow")
    for sentence in found.warnings:
        line(f"warning: {sentence}", "yellow")
    for sentence in found.problems:
        line(f"problem: {sentence}", "bold red")
    if sheet is not None:
        line(f"Contact sheet: {sheet}")
    line("Training can go on." if found.can_train else "Training cannot go on.", "bold")
