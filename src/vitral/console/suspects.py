"""Show the likely label errors and near-duplicates of a dataset."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitral.console.output import print_line, print_table
from vitral.report.text import format_count, format_percent

if TYPE_CHECKING:
    from vitral.evaluation.suspects import Suspects

MAX_ROWS = 10


def show_suspects(suspects: "Suspects", files: Sequence[Path]) -> None:
    """Print the most likely label errors, the most similar pairs, and the paths of the files that list all of them."""
    errors, pairs = suspects.label_errors, suspects.near_duplicates
    print_line(f"\n{format_count(len(errors), 'likely label error')} in {suspects.images:,} images", "bold")
    if errors:
        rows = ([row.file, row.label, row.suggested, format_percent(row.probability, 0)] for row in errors[:MAX_ROWS])
        print_table(("file", "label", "suggested", "probability"), rows)
        _show_rest(len(errors))
    print_line(f"\n{format_count(len(pairs), 'pair')} of near-duplicates", "bold")
    if pairs:
        rows = ([row.file, row.other, f"{row.similarity:.3f}"] for row in pairs[:MAX_ROWS])
        print_table(("file", "other", "similarity"), rows)
        _show_rest(len(pairs))
        if across := sum(row.split != row.other_split for row in pairs):
            warning = "Scores on the second split will be inflated."
            print_line(f"{format_count(across, 'pair')} between splits. {warning}", "yellow")
    for note in suspects.notes:
        print_line(note, "yellow")
    for path in files:
        print_line(f"Written: {path}")


def _show_rest(total: int) -> None:
    if total > MAX_ROWS:
        print_line(f"... and {total - MAX_ROWS:,} more", "dim")
