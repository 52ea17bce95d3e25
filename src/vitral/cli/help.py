"""The help pages: plain text with the sections Usage, Arguments, Options and Examples, readable at any width."""

import re
from collections.abc import Iterable, Iterator
from inspect import cleandoc
from textwrap import wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

MAX_WIDTH = 100
MAX_LABEL = 24
"""A longer label stands on a line of its own."""
COMMAND_COLUMN = 14
"""The column at which the summaries of the commands start, in every group."""
MIN_DESCRIPTION = 30
"""In a terminal too narrow for a column this wide, every description stands below its label."""


class PlainHelp:
    """Render cyclopts' help panels as plain text."""

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: "HelpPanel") -> None:
        """Print one section of a page."""
        if panel.entries:
            rows = [(_label(entry), _description(entry)) for entry in panel.entries]
            self._print(console, "", str(panel.title), bold=True)
            column = COMMAND_COLUMN if panel.format == "command" else 0
            self._print(console, *align(rows, console.width, column))

    def render_usage(self, console: "Console", options: "ConsoleOptions", usage: object) -> None:
        """Print the first line of a page."""
        self._print(console, f"Usage: {str(usage).strip()}")

    def render_description(self, console: "Console", options: "ConsoleOptions", description: object) -> None:
        """Print the docstring of a command, without its sections."""
        for paragraph in re.split(r"\n\s*\n", _plain(description).strip()):
            self._print(console, "", *wrap(paragraph, min(console.width, MAX_WIDTH)))

    def _print(self, console: "Console", *lines: str, bold: bool = False) -> None:
        for line in lines:
            console.print(line, style="bold" if bold else None, highlight=False, markup=False, soft_wrap=True)


def align(rows: Iterable[tuple[str, str]], width: int, column: int = 0) -> Iterator[str]:
    """Yield labels with their descriptions beside them (at `column` or further right), or below if it is narrow."""
    rows, width = list(rows), min(width, MAX_WIDTH)
    column = max([column, *(len(label) + 4 for label, _ in rows if len(label) <= MAX_LABEL)])
    is_narrow = width - column < MIN_DESCRIPTION
    indent = " " * (6 if is_narrow else column)
    for label, description in rows:
        bound = re.sub(r"\[default: [^]]*]", lambda note: note[0].replace(" ", "\xa0"), description)
        wrapped = wrap(bound, max(width - len(indent), 20), break_on_hyphens=False)
        lines = [line.replace("\xa0", " ") for line in wrapped]
        if is_narrow or len(label) > MAX_LABEL or not lines:
            yield f"  {label}"
        else:
            yield f"  {label}".ljust(column) + lines.pop(0)
        yield from (indent + line for line in lines)


def examples(docstring: str | None) -> str:
    """Return the section Examples of a command's docstring, as it stands on its help page."""
    _, _, text = cleandoc(docstring or "").partition("Examples\n--------\n")
    lines = [line.strip() for line in text.split("\n\n")[0].splitlines()]
    return "\n".join(["Examples", *(f"  {line}" for line in lines)]) if text else ""


def _label(entry: "HelpEntry") -> str:
    # A switch that is on by default is shown by the option that turns it off.
    if entry.default == "True" and entry.negative_names:
        return entry.negative_names[0]
    return ", ".join(entry.display_labels_with_metavar)


def _description(entry: "HelpEntry") -> str:
    notes = [
        entry.choices and f"[choices: {', '.join(entry.choices)}]",
        entry.default not in (None, "True", "False") and f"[default: {entry.default}]",
        entry.required and entry.positional_label is None and "[required]",
    ]
    return " ".join([_plain(entry.description), *filter(None, notes)])


def _plain(text: object) -> str:
    """Return the text inside cyclopts' renderables."""
    text = getattr(text, "primary_renderable", text)
    return getattr(text, "plain", str(text))
