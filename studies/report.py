"""The page of a study: docs/results/NAME.md gets its table and its plot between two marks; the words around them are
written by hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from studies.plan import Study

RESULTS = Path(__file__).parent.parent / "docs" / "results"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def write_report(study: Study, place: Path) -> None:
    rows = {cell.name: _results(study, place, cell.name) for cell in study.cells}
    RESULTS.mkdir(parents=True, exist_ok=True)
    page = RESULTS / f"{study.name}.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else _page(study)
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{_table(study, rows)}\n{END}{after}", encoding="utf-8")
    if any(rows.values()):
        _draw(study, rows)
        content = {"study": study.name, "cells": rows}
        (RESULTS / f"{study.name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _results(study: Study, place: Path, cell: str) -> list[dict[str, Any]]:
    found = []
    for job in study.jobs():
        path = job.folder(place) / "study.json"
        if job.cell.name == cell and path.is_file():
            found.append(json.loads(path.read_text(encoding="utf-8")))
    return found


def _page(study: Study) -> str:
    settings = f"[studies/{study.name}.toml](../../studies/{study.name}.toml)"
    return (
        f"# {study.title}\n\n{study.question}\n\n"
        f"`python -m studies.run {study.name} SHARDS`, settings in {settings}.\n\n"
        f"{BEGIN}\n{END}\n\n![{study.title}]({study.name}.png)\n\n## The paper's\n\n{study.paper}\n"
    )


def _table(study: Study, rows: dict[str, list[dict[str, Any]]]) -> str:
    others = list(dict.fromkeys(name for found in rows.values() for one in found for name in one["others"]))
    head = ["cell", "top-1, %", "spread", "seeds", *others, "parameters", "minutes each"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, found in rows.items():
        if not found:
            lines.append(f"| {name} | not run yet |{' |' * (len(head) - 2)}")
            continue
        scores = [100 * one["top1"] for one in found]
        beside = [_mean([100 * one["others"][other] for one in found if other in one["others"]]) for other in others]
        cells = [
            name,
            f"{mean(scores):.2f}",
            f"{stdev(scores):.2f}" if len(scores) > 1 else "-",
            str(len(scores)),
            *beside,
            f"{found[0]['parameters']:,}",
            f"{mean(one['seconds'] for one in found) / 60:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\nSpread is the standard deviation over the seeds."


def _mean(values: Sequence[float]) -> str:
    return f"{mean(values):.2f}" if values else "-"


def _draw(study: Study, rows: dict[str, list[dict[str, Any]]]) -> None:
    """A dot for every seed, a line at the mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name, found in rows.items() if found]
    figure, axes = pyplot.subplots(figsize=(7.5, 0.8 + 0.36 * len(names)), layout="constrained")
    for place, name in enumerate(reversed(names)):
        scores = [100 * one["top1"] for one in rows[name]]
        axes.plot(scores, [place] * len(scores), "o", color="#2b6cb0", alpha=0.7, markersize=5)
        axes.plot([mean(scores)] * 2, [place - 0.28, place + 0.28], color="#c05621", linewidth=2)
    axes.set(yticks=range(len(names)), yticklabels=list(reversed(names)), xlabel="test pictures that are right, %")
    axes.grid(axis="x", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(RESULTS / f"{study.name}.png", dpi=110)
    pyplot.close(figure)
