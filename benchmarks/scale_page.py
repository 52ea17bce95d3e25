"""Write the newest results of memory, sharding and scaling into docs/explanation/scale.md.

    python -m benchmarks.memory --save; python -m benchmarks.sharding --save; python -m benchmarks.scaling --save
    python -m benchmarks.scale_page

A table without a result is left as it is.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.timing import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "scale.md"


def memory_table(result: dict[str, Any]) -> list[str]:
    lines = [
        "| model | images | setting | measured | planned | error | sent per step | planned |",
        "|" + "---|" * 8,
    ]
    for row in result["rows"]:
        names = ("measured_bytes", "planned_bytes", "sent_bytes", "planned_sent")
        measured, planned, sent, planned_sent = (f"{row[name] / 1e6:,.0f} MB" if row[name] else "-" for name in names)
        words = [row["parallel"], row["attention"], row["precision"], *["checkpointing"] * row["checkpointing"]]
        setting = ", ".join(word for word in words if word not in ("none", "fused", "float32"))
        error = f"{row['planned_bytes'] / row['measured_bytes'] - 1:+.1%}"
        cells = (row["model"], row["batch"], setting, measured, planned, error, sent, planned_sent)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    errors = [abs(row["planned_bytes"] / row["measured_bytes"] - 1) for row in result["rows"]]
    return [*lines, "", f"The plan differs from the measured peak by at most {max(errors):.1%}; the goal is 15%."]


def sharding_table(result: dict[str, Any]) -> list[str]:
    lines = ["| model | images | one process | two, DDP | two, FSDP | FSDP by one process |", "|" + "---|" * 6]
    for row in sorted(result["rows"], key=lambda row: row["one process"]):
        sizes = (f"{row[name] / 1e6:,.0f} MB" if name in row else "-" for name in ("one process", "ddp", "fsdp"))
        lines.append(f"| {row['model']} | {row['batch']} | {' | '.join(sizes)} | {row['fsdp ratio']:.2f} |")
    return [*lines, "", "`images` are those of a step over all processes; the goal of the last column is 0.6."]


def scaling_table(result: dict[str, Any]) -> list[str]:
    lines = ["| model | kind | images per process | one process | two | efficiency | predicted |", "|" + "---|" * 7]
    for row in result["rows"]:
        each = row["batch"] if row["kind"] == "weak" else row["batch"] // 2
        speeds = (f"{row[name]:.1f} images/s" for name in ("one", "two"))
        cells = (row["model"], row["kind"], str(each), *speeds, f"{row['efficiency']:.0%}", f"{row['predicted']:.0%}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "memory": memory_table,
    "sharding": sharding_table,
    "scaling": scaling_table,
}


def renew_page(text: str) -> str:
    """Return the page with the newest tables between their markers."""
    for name, make_table in TABLES.items():
        if not (paths := sorted(RESULTS.glob(f"{name}-*.json"))):
            continue
        result = json.loads(paths[-1].read_text(encoding="utf-8"))
        machine = result["machine"]
        about = f"`python -m benchmarks.{name}`, {machine['date']}, {machine['cpu']}:"
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        table = "\n".join([about, "", *make_table(result)])
        text = f"{text.split(start)[0]}{start}\n{table}\n{end}{text.split(end)[1]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(renew_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
