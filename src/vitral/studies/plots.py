"""Draw the plot of a study: dots per cell and seed, or lines over x."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from vitral.studies.spec import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCURACY = "test accuracy, %"
COLORS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b7791f", "#4a5568")
Rows = Mapping[str, Sequence[Mapping[str, Any]]]
"""The results of each cell, one per seed, by the cell's name."""


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
