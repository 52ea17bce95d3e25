"""Write the page of a study: the question, the table, the plot and the paper's numbers.

The text below the table is written by hand, and kept when the page is written again.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from vitral.errors import ConfigError
from vitral.files import write_json, write_text
from vitral.studies.spec import Study, load_result, study_names, study_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEGIN, END = "<!-- table -->", "<!-- end of table -->"
ACCURACY = "test accuracy, %"
COLORS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b7791f", "#4a5568")
Rows = Mapping[str, Sequence[Mapping[str, Any]]]
"""The results of each cell, one per seed, by the cell's name."""


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


# ---- the plot ----


def draw_study(study: Study, rows: Rows, path: Path) -> None:
    """Draw the results of a study into a PNG file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(layout="constrained")
        if study.x_label:
            _draw_lines(figure, study, rows)
        else:
            _draw_dots(figure, rows)
        figure.savefig(path, dpi=110)


def _draw_dots(figure: "Figure", rows: Rows) -> None:
    """Draw a dot per seed and a stroke at the mean, in one panel per evaluation, all at one scale."""
    panels = _scores_by_evaluation(rows)
    share_cells = len({tuple(scores) for scores in panels.values()}) == 1
    columns = 2 if share_cells and len(panels) > 1 else 1
    heights = [0.9 + 0.32 * len(scores) for scores in list(panels.values())[::columns]]
    figure.set_size_inches(4.2 + 2.6 * columns, sum(heights))
    grid = figure.subplots(len(heights), columns, height_ratios=heights, sharex=True, sharey=share_cells, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (evaluation, scores) in zip(grid.flat, panels.items(), strict=False):
        for y, values in enumerate(reversed(scores.values())):
            axes.plot(values, [y] * len(values), "o", color=COLORS[0], alpha=0.7, markersize=5)
            axes.plot([mean(values)] * 2, [y - 0.28, y + 0.28], color=COLORS[1], linewidth=2)
        axes.set(yticks=range(len(scores)), yticklabels=list(reversed(scores)), ylim=(-0.6, len(scores) - 0.4))
        axes.set_title(evaluation, size="medium")
        axes.tick_params(labelbottom=True)
        axes.grid(axis="x", alpha=0.3)


def _scores_by_evaluation(rows: Rows) -> dict[str, dict[str, list[float]]]:
    """Return percentages by evaluation and cell."""
    panels: dict[str, dict[str, list[float]]] = {}
    for cell, results in rows.items():
        for result in results:
            for evaluation, score in {ACCURACY: result["top1"], **result["scores"]}.items():
                if score is not None:
                    panels.setdefault(evaluation, {}).setdefault(cell, []).append(100 * score)
    return panels


def _draw_lines(figure: "Figure", study: Study, rows: Rows) -> None:
    """Draw accuracy against x, with a line through the means of the cells and evaluations that share one."""
    lines: dict[str, dict[float, list[float]]] = {}
    for line, x, score, _ in _points(study, rows):
        if line is not None and x is not None and score is not None:
            lines.setdefault(line, {}).setdefault(x, []).append(100 * score)
    flops = image_flops(study, rows) if study.flops else {}
    panels = 2 if flops else 1
    figure.set_size_inches(3.5 + 4 * panels, 4.2)
    (drawn,) = figure.subplots(1, panels, squeeze=False)
    for (name, points), color in zip(lines.items(), cycle(COLORS), strict=False):
        positions = sorted(points)
        drawn[0].plot(positions, [mean(points[x]) for x in positions], color=color, linewidth=1.5, label=name)
        for x in positions:
            drawn[0].plot([x] * len(points[x]), points[x], "o", color=color, alpha=0.6, markersize=4)
    drawn[0].set_ylabel(ACCURACY)
    drawn[0].legend(frameon=False)
    if flops:
        drawn[1].plot(sorted(flops), [flops[x] / 1e6 for x in sorted(flops)], "o-", color=COLORS[-1], markersize=4)
        drawn[1].set(ylabel="MFLOPs per image, forward", ylim=(0, None))
    positions = sorted({x for points in lines.values() for x in points})
    for axes in drawn:
        axes.set(xscale="log", xlabel=study.x_label)
        axes.set_xticks(positions, [f"{x:,.0f}" for x in positions])
        axes.minorticks_off()
        axes.grid(alpha=0.3)


def image_flops(study: Study, rows: Rows) -> dict[float, int]:
    """Return the operations of one forward pass at every x."""
    return {x: flops for _, x, _, flops in _points(study, rows) if x is not None and flops is not None}


def _points(study: Study, rows: Rows) -> Iterator[tuple[str | None, float | None, float | None, int | None]]:
    """Yield the line, x, accuracy and operations per image of every result, and of its further evaluations."""
    for cell in study.cells:
        for result in rows[cell.name]:
            yield cell.line, cell.x, result["top1"], result.get("forward_flops")
            flops = result.get("evaluation_flops", {})
            for name, options in cell.evaluations.items():
                yield options.get("line"), options.get("x"), result["scores"].get(name), flops.get(name)
