"""Print results to standard output, for people or for programs. Progress and messages go to standard error."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitral.files import printable, to_json

Format = Literal["human", "json", "quiet"]
MIN_WIDTH = 76
"""Narrower terminals wrap whole lines instead of cutting off numbers."""


def human_console() -> Console:
    """Return a console for people, on standard output."""
    console = Console()
    return console if console.width >= MIN_WIDTH else Console(width=MIN_WIDTH)


def print_line(text: str, style: str | None = None, console: Console | None = None) -> None:
    """Print text literally: no markup, no control characters, no line breaks but its own."""
    lines = "\n".join(map(printable, text.split("\n")))
    (console or human_console()).print(lines, style=style, highlight=False, markup=False, soft_wrap=True)


def print_lines(lines: Sequence[str]) -> None:
    """Print lines, the first one in bold."""
    for index, line in enumerate(lines):
        print_line(line, None if index else "bold")


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, bold: Sequence[int] = ()) -> None:
    """Print a table without borders: one column of names, the others right-aligned; `bold` rows stand out."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, title in enumerate(titles):
        table.add_column(title, justify="right" if index else "left", no_wrap=True)
    for index, row in enumerate(rows):
        table.add_row(*(Text(printable(cell)) for cell in row), style="bold" if index in bold else None)
    human_console().print(table)


def show_as(format: str, *, json: object, human: Callable[[], None], quiet: Iterable[str] = ()) -> None:
    """Write a result to standard output as JSON, as a few lines for scripts, or as `human` prints it."""
    if format == "json":
        sys.stdout.write(to_json(json, sys.stdout, indent=2) + "\n")
    elif format == "quiet":
        show_lines(quiet)
    else:
        human()


def show_lines(lines: Iterable[str]) -> None:
    """Write lines to standard output as they are."""
    sys.stdout.writelines(f"{line}\n" for line in lines)
