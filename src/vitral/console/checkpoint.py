"""A checkpoint on the console."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from vitral.console.output import human_console, in_bytes
from vitral.files import printable

_KINDS = {
    "taken": "under the same name",
    "renamed": "the same numbers, called otherwise here",
    "resized": "resampled to fit",
    "fresh": "not from the file",
    "ignored": "in the file, not needed",
}
_NUMBER = re.compile(r"(?<=[._])\d+(?=[./])")


def show_checkpoint(described: Mapping[str, Any]) -> None:
    """One page: what it is, its config, its preprocessing, the five lists, what was assumed."""
    console = human_console()
    report = described["report"]

    def line(text: str, style: str | None = None) -> None:
        console.print(
            "\n".join(map(printable, text.split("\n"))), style=style, highlight=False, markup=False, soft_wrap=True
        )

    line(f"{report['dialect']} checkpoint ({report['format']})", "bold")
    line(described["path"], "dim")
    if "sha256" in described:
        line(f"{in_bytes(described['bytes'])}, sha256 {described['sha256']}", "dim")
    for title, fields in (
        (f"config, {described['parameters']:,} parameters", described["config"]),
        ("preprocessing", described["preprocess"]),
    ):
        line(f"\n{title}", "bold")
        _show_fields(console, fields)
    if labels := described["labels"]:
        line(f"\nlabels ({len(labels)})", "bold")
        line("  " + ", ".join(labels[:8]) + (", ..." if len(labels) > 8 else ""))
    line(f"\ntensors ({sum(len(report[kind]) for kind in _KINDS)})", "bold")
    for kind, meaning in _KINDS.items():
        line(f"  {kind:<8} {len(report[kind]):>4}  {meaning}")
        for entry in fold(report[kind]):
            line(f"      {entry}", "dim")
    for title in ("assumed", "warnings"):
        if report[title]:
            line(f"\n{title}", "bold")
            for sentence in report[title]:
                line(f"  {sentence}")


def _show_fields(console: Any, fields: Mapping[str, Any]) -> None:
    from rich.columns import Columns
    from rich.padding import Padding
    from rich.text import Text

    cells = [Text.assemble((name, "dim"), " ", _plain(value)) for name, value in fields.items()]
    console.print(Padding(Columns(cells, padding=(0, 3), column_first=True), (0, 0, 0, 2)))


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return " x ".join(map(str, value)) if len(value) == 2 else ", ".join(map(str, value))
    if isinstance(value, Mapping):
        return " ".join(f"{name} {_plain(part)}" for name, part in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def _span(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    whole = sorted(numbers) == list(range(min(numbers), max(numbers) + 1))
    return f"{{{min(numbers)}..{max(numbers)}}}" if whole else f"{{{','.join(map(str, numbers))}}}"


def fold(entries: Mapping[str, str] | Iterable[str]) -> list[str]:
    """Names with all blocks, and weight and bias, in one line: blocks.{0..11}.norm1.{weight,bias}."""
    pairs = entries.items() if isinstance(entries, Mapping) else [(name, "") for name in entries]
    blocks: dict[tuple[str, str], list[int]] = {}
    for name, note in pairs:
        number = _NUMBER.search(name)
        key = _NUMBER.sub("*", name, count=1), re.sub(r"(?<=blocks\.)\d+", "i", note)
        blocks.setdefault(key, []).append(int(number[0]) if number else 0)
    kinds: dict[tuple[str, str], list[str]] = {}
    for (pattern, note), numbers in blocks.items():
        shown = pattern.replace("*", _span(numbers), 1)
        stem, kind = re.fullmatch(r"(.*?[./]|)([^./]*)", shown).groups()  # type: ignore[union-attr]
        kinds.setdefault((stem, re.sub(r"\.(weight|bias)$", "", note)), []).append(kind)
    return [
        stem + (kind[0] if len(kind) == 1 else f"{{{','.join(kind)}}}") + (f": {note}" if note else "")
        for (stem, note), kind in kinds.items()
    ]
