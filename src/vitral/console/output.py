"""Print results to standard output, for people or for programs. Progress and messages go to standard error."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from vitral.files import printable, to_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Format = Literal["human", "json", "quiet"]
MIN_WIDTH = 76
"""Narrower terminals wrap whole lines instead of cutting off numbers."""


def human_console(*, stderr: bool = False) -> "Console":
    """Return a console for people, on standard output unless `stderr`."""
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.width >= MIN_WIDTH else Console(stderr=stderr, width=MIN_WIDTH)


def print_line(console: "Console", text: str, style: str | None = None) -> None:
    """Print text literally: no markup, no control characters, no line breaks but its own."""
    lines = "\n".join(map(printable, text.split("\n")))
    console.print(lines, style=style, highlight=False, markup=False, soft_wrap=True)


def print_lines(console: "Console", lines: Sequence[str]) -> None:
    """Print lines, the first one in bold."""
    for index, line in enumerate(lines):
        print_line(console, line, None if index else "bold")


def plain_table(first: str, *numbers: str) -> "Table":
    """Return a table without borders: one column of names, the others right-aligned."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def show_as(format: str, *, json: object, human: Callable[[], None], quiet: Iterable[str] = ()) -> None:
    """Write a result to standard output as JSON, as a few lines for scripts, or as `human` prints it."""
    if format == "json":
        show_json(json)
    elif format == "quiet":
        show_lines(quiet)
    else:
        human()


def show_json(result: object) -> None:
    """Write a result to standard output as indented JSON."""
    sys.stdout.write(to_json(result, sys.stdout, indent=2) + "\n")


def show_lines(lines: Iterable[str]) -> None:
    """Write lines to standard output as they are."""
    for line in lines:
        sys.stdout.write(f"{line}\n")
