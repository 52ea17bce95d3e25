"""Show checkpoints and conversions on the console."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rich.columns import Columns
from rich.padding import Padding
from rich.text import Text

from vitral.console.output import human_console, print_line, show_lines
from vitral.files import printable
from vitral.report.text import format_bytes

_LISTS = {
    "unchanged": "same name in file and model",
    "renamed": "another name in the file",
    "resized": "resampled to fit",
    "initialized": "not from the file",
    "ignored": "in the file, but not needed",
}
_NUMBER = re.compile(r"(?<=[._])\d+(?=[./])")


def show_checkpoint(description: Mapping[str, Any]) -> None:
    """Print the description of a checkpoint on one page."""
    report = description["report"]
    print_line(f"{report['dialect']} checkpoint ({report['format']})", "bold")
    print_line(description["path"], "dim")
    if "sha256" in description:
        print_line(f"{format_bytes(description['bytes'])}, sha256 {description['sha256']}", "dim")
    for title, fields in (
        (f"config, {description['parameters']:,} parameters", description["config"]),
        ("preprocessing", description["preprocess"]),
    ):
        print_line(f"\n{title}", "bold")
        _show_fields(fields)
    if labels := description["labels"]:
        print_line(f"\nlabels ({len(labels)})", "bold")
        print_line("  " + ", ".join(labels[:8]) + (", ..." if len(labels) > 8 else ""))
    _show_tensors(report)
    for title in ("assumed", "warnings"):
        if report[title]:
            print_line(f"\n{title}", "bold")
            for sentence in report[title]:
                print_line(f"  {sentence}")


def show_conversion(conversion: Mapping[str, Any], precision: str | None) -> None:
    """Print what was converted and how far the outputs differ."""
    report, constants = conversion["report"], conversion["constants"]
    values = ", ".join(f"{name}={value!r}" for name, value in constants.items())
    under = f" with {conversion['to']}'s {values}" if constants else ""
    lines = [
        f"{conversion['source']} ({conversion['from']}) -> {conversion['target']} ({conversion['to']})",
        f"Verified on {conversion['images']} images: maximum difference of features and logits "
        f"{conversion['difference']:.1e}{under}.",
        *([] if precision is None else [f"Rounding to {precision} changed them by {conversion['rounding']:.1e}."]),
        *conversion["notes"],
        *(f"initialized: {name}: {reason}" for name, reason in report["initialized"].items()),
        *(f"assumed: {sentence}" for sentence in report["assumed"]),
        *(f"warning: {sentence}" for sentence in report["warnings"]),
    ]
    show_lines(map(printable, lines))


def _show_tensors(report: Mapping[str, Any]) -> None:
    print_line(f"\ntensors ({sum(len(report[name]) for name in _LISTS)})", "bold")
    for name, meaning in _LISTS.items():
        print_line(f"  {name:<11} {len(report[name]):>4}  {meaning}")
        for entry in fold(report[name]):
            print_line(f"      {entry}", "dim")


def _show_fields(fields: Mapping[str, Any]) -> None:
    cells = [Text.assemble((name, "dim"), " ", _plain(value)) for name, value in fields.items()]
    human_console().print(Padding(Columns(cells, padding=(0, 3), column_first=True), (0, 0, 0, 2)))


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return " x ".join(map(str, value)) if len(value) == 2 else ", ".join(map(str, value))
    if isinstance(value, Mapping):
        return " ".join(f"{name} {_plain(field)}" for name, field in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def _span(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    whole = sorted(numbers) == list(range(min(numbers), max(numbers) + 1))
    return f"{{{min(numbers)}..{max(numbers)}}}" if whole else f"{{{','.join(map(str, numbers))}}}"


def fold(entries: Mapping[str, str] | Iterable[str]) -> list[str]:
    """Return one line for all blocks, and for weight and bias: blocks.{0..11}.norm1.{weight,bias}."""
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
