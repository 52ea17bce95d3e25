"""Write the page of a study: the question, the table, the plot and the paper's numbers.

The text below the table is written by hand, and kept when the page is written again.
"""

import os
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from vitral.errors import ConfigError
from vitral.files import write_json, write_text
from vitral.studies.plots import Rows, draw_study
from vitral.studies.spec import Study, load_result, study_names, study_path

BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def check_page(study: Study, results: Path) -> str:
    """Return the text below the table of an existing page; raise ConfigError if the table cannot be found."""
    page = results / f"{study.name}.md"
    if not page.is_file():
        return "\n"
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ConfigError(
            f"{page} must contain {BEGIN} and {END} once; vitral replaces what lies between them.",
            hint="Add both lines, or pass another --results.",
        )
    return text.partition(END)[2]


def write_page(study: Study, out: Path, results: Path) -> Path:
    """Write the page, and beside it the plot and the results as JSON; return the path of the page."""
    page, below = results / f"{study.name}.md", check_page(study, results)
    rows: dict[str, list[dict[str, Any]]] = {cell.name: [] for cell in study.cells}
    for job in study.jobs():
        if (result := load_result(job.folder(out))) and job.cell.matches(result):  # trained with today's settings
            rows[job.cell.name].append(result)
    has_scores = any(row["top1"] is not None or row["scores"] for of_cell in rows.values() for row in of_cell)
    image = f"\n\n![{study.title}]({study.name}.png)" if has_scores else ""
    paper = f"\n## In the paper\n\n{study.paper.strip()}\n" if study.paper else ""
    text = f"{page_head(study, results)}{BEGIN}\n{results_table(study, rows)}{image}\n{paper}{END}{below}"
    write_text(page, text, ConfigError)
    if has_scores:
        draw_study(study, rows, results / f"{study.name}.png")
        write_json(results / f"{study.name}.json", {"study": study.name, "cells": rows}, ConfigError)
    return page


def page_head(study: Study, results: Path) -> str:
    link = Path(os.path.relpath(study.path, results)).as_posix()
    is_shipped = study.name in study_names() and study_path(study.name) == study.path
    name = study.name if is_shipped else study.path.name
    command = f"`vitral study {name} DATA`, with the settings of [{study.path.name}]({link})."
    question = f"{study.question}\n\n" if study.question else ""
    return f"# {study.title}\n\n{question}{command}\n\n"


def results_table(study: Study, rows: Rows) -> str:
    """Return the table with one line per cell, and its legend."""
    evaluations = list(dict.fromkeys(name for cell in study.cells for name in cell.evaluations))
    head = ["cell", "top-1, %", *evaluations, "seeds", "parameters", "TFLOP", "minutes"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for cell in study.cells:
        if not (of_cell := rows[cell.name]):
            lines.append(f"| {cell.name} | not run yet |{' |' * (len(head) - 2)}")
            continue
        first = of_cell[0]
        columns = [
            cell.name,
            _mean_and_deviation([row["top1"] for row in of_cell]),
            *(_mean_and_deviation([row["scores"].get(name) for row in of_cell]) for name in evaluations),
            str(len(of_cell)),
            f"{first['parameters']:,}",
            _rounded(first["flops"] / 1e12) if first.get("flops") else "-",
            _rounded(_minutes(of_cell)),
        ]
        lines.append(f"| {' | '.join(columns)} |")
    legend = _legend(rows)
    return "\n".join([*lines, "", legend] if legend else lines)


def _legend(rows: Rows) -> str:
    results = [row for of_cell in rows.values() for row in of_cell]
    images = max((row["images"] for row in results), default=0)
    if not images:
        return ""
    has_several = any(len(of_cell) > 1 for of_cell in rows.values())
    seeds = "Mean ± standard deviation over the seeds" if has_several else "One seed per cell"
    is_one_thread = {row.get("threads", 1) for row in results} == {1}
    minutes = sum(len(of_cell) * _minutes(of_cell) for of_cell in rows.values() if of_cell)
    total = f"{minutes:.0f} minutes" + (f" on one core, {minutes / 2:.0f} on two" if is_one_thread else "")
    return (
        f"{seeds}. Near 50 %, {images:,} test images give an accuracy a 95 % confidence interval of "
        f"± {98 / sqrt(images):.1f} points. All cells share the test images, so differences between cells are more "
        "certain than that. TFLOP: operations of one training run, counted as in the paper. Minutes: training time "
        f"of the fastest seed{' on one core' if is_one_thread else ''}. All cells and seeds together: {total}."
    )


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def _minutes(rows: Sequence[Mapping[str, Any]]) -> float:
    return min(row["seconds"] for row in rows) / 60


def _mean_and_deviation(values: Sequence[float | None]) -> str:
    """Return "45.10 ± 0.31"; without the standard deviation for a single seed."""
    percent = [100 * value for value in values if value is not None]
    if not percent:
        return "-"
    return f"{mean(percent):.2f}" + (f" ± {stdev(percent):.2f}" if len(percent) > 1 else "")
