"""The console: results on standard output, everything else on standard error."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console

from vitral.files import to_json

Format = Literal["human", "json", "quiet"]


def human_console() -> "Console":
    """A console that is never so narrow that numbers are cut off: lines then wrap, which can still be read."""
    from rich.console import Console

    console = Console()
    return console if console.width >= 76 else Console(width=76)


def show_json(result: Any) -> None:
    sys.stdout.write(to_json(result, sys.stdout, indent=2) + "\n")


def show_lines(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")


def in_units(number: float, steps: tuple[str, ...], base: float = 1000) -> str:
    """12_345_678, ("", "K", "M") -> '12.3 M'; three digits, with the largest step that keeps them above 1."""
    step = 0
    while number >= base and step < len(steps) - 1:
        number /= base
        step += 1
    digits = 0 if number >= 100 else 1 if number >= 10 else 2
    return f"{number:.{digits}f} {steps[step]}".rstrip()


def in_bytes(number: float) -> str:
    return in_units(number, ("B", "KiB", "MiB", "GiB", "TiB"), base=1024)
