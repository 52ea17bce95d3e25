"""The page of a study, docs/results/NAME.md: the question, the table, the plot and the paper's numbers are written from
the TOML and the runs; the words behind them by hand."""

import json
from collections.abc import Sequence
from itertools import cycle
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from studies.cell import build_network
from studies.plan import Cell, Job, Study
from vitral.model.config import ViTConfig
from vitral.model.cost import count_cost
from vitral.training.masked_patches import MaskedPatches
from vitral.training.masking import Masking

BEGIN, END = "<!-- table -->", "<!-- end of table -->"
LEGEND = (
    "Mean and standard deviation over the seeds. An accuracy near 50 % of {images:,} test pictures has a 95 % interval "
    "of ± {points:.1f} points; all cells share the pictures, so differences are known better. TFLOP: of the training, "
    "as the paper counts it. Minutes: of training{threads}, of the fastest seed, since the machine is "
    "shared and times scatter. {minutes:.0f} for all cells and seeds at that speed."
)
COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b7791f", "#4a5568")


def write_report(study: Study, place: Path, results: Path) -> Path:
    """The page; beside it the plot, and the numbers as JSON."""
    rows = {cell.name: _results(study, place, cell) for cell in study.cells}
    results.mkdir(parents=True, exist_ok=True)
    page = results / f"{study.name}.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else f"{BEGIN}{END}\n"
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page} must have {BEGIN} and {END} once, so that the words behind them can be kept")
    _, _, after = text.partition(END)
    measured = [one for found in rows.values() for one in found if one["top1"] is not None or one["others"]]
    picture = f"\n\n![{study.title}]({study.name}.png)" if measured else ""
    page.write_text(
        f"{_head(study)}{BEGIN}\n{_table(study, rows)}{picture}\n{_papers(study)}{END}{after}", encoding="utf-8"
    )
    if picture:
        _draw(study, rows, results / f"{study.name}.png")
        content = {"study": study.name, "cells": rows}
        if study.flops:
            content["flops"] = picture_flops(study)
        (results / f"{study.name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return page


def _results(study: Study, place: Path, cell: Cell) -> list[dict[str, Any]]:
    paths = (Job(study.name, cell, seed).folder(place) / "study.json" for seed in study.seeds)
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]
    return [one for one in found if cell.was_trained_so(one)]  # others were trained before the settings changed


def _head(study: Study) -> str:
    settings = f"[studies/{study.name}.toml](../../studies/{study.name}.toml)"
    command = f"`python -m studies.run {study.name} DATA`, settings in {settings}."
    return f"# {study.title}\n\n{study.question}\n\n{command}\n\n"


def _papers(study: Study) -> str:
    return f"\n## The paper's\n\n{study.paper.strip()}\n" if study.paper else ""


def _table(study: Study, rows: dict[str, list[dict[str, Any]]]) -> str:
    others = list(dict.fromkeys(name for cell in study.cells for name in cell.evaluations))
    head = ["cell", "top-1, %", *others, "seeds", "parameters", "TFLOP", "minutes"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for cell in study.cells:
        found = rows[cell.name]
        if not found:
            lines.append(f"| {cell.name} | not run yet |{' |' * (len(head) - 2)}")
            continue
        cells = [
            cell.name,
            _spread([one["top1"] for one in found]),
            *(_spread([one["others"].get(other) for one in found]) for other in others),
            str(len(found)),
            f"{found[0]['parameters']:,}",
            _rounded(training_flops(cell) / 1e12) if found[0]["steps"] else "-",
            _rounded(_minutes(found)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    ran = [one for found in rows.values() for one in found]
    images = max((one["images"] for one in ran), default=0)
    minutes = sum(len(found) * _minutes(found) for found in rows.values() if found)
    if images:
        is_one = {one.get("threads", 1) for one in ran} == {1}
        threads = " on one core, with another cell on the other" if is_one else ""
        told = LEGEND.format(images=images, points=98 / sqrt(images), threads=threads, minutes=minutes)
        lines += ["", told[:-1] + f", {minutes / 2:.0f} on two cores." if is_one else told]
    return "\n".join(lines)


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def _minutes(found: list[dict[str, Any]]) -> float:
    return min(one["seconds"] for one in found) / 60


def _spread(values: Sequence[float | None]) -> str:
    """45.10 ± 0.31: mean and standard deviation over the seeds."""
    known = [100 * value for value in values if value is not None]
    if not known:
        return "-"
    return f"{mean(known):.2f}" + (f" ± {stdev(known):.2f}" if len(known) > 1 else "")


def training_flops(cell: Cell) -> float:
    """As the paper counts them: three forward passes for every picture of every step."""
    config = build_network(cell.settings)[0].config
    each = count_cost(config).forward_flops
    if cell.settings.get("objective") == "masked-patches":  # its head answers for those that are hidden
        assert isinstance(config, ViTConfig)
        how = {name.removeprefix("masking."): cell.settings[name] for name in cell.settings if "masking." in name}
        rows, columns = config.grid(*config.image_hw)
        masking = Masking(**how)
        each += 2 * masking.number_of(rows * columns) * MaskedPatches(config, masking).head.weight.numel()
    return 3.0 * each * cell.settings["batch_size"] * cell.settings["steps"]


def _draw(study: Study, rows: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    figure = _lines(study, rows, pyplot) if study.x_label else _dots(rows, pyplot)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _dots(rows: dict[str, list[dict[str, Any]]], pyplot: Any) -> Any:
    """A dot for every seed, a stroke at the mean; a panel for every way of measuring with the cells that were measured
    so, all at one scale."""
    ways: dict[str, dict[str, list[float]]] = {}
    for name, found in rows.items():
        for one in found:
            for way, value in {"test pictures that are right, %": one["top1"], **one["others"]}.items():
                if value is not None:
                    ways.setdefault(way, {}).setdefault(name, []).append(100 * value)
    are_alike = len({tuple(scores) for scores in ways.values()}) == 1
    columns = 2 if are_alike and len(ways) > 1 else 1
    heights = [0.9 + 0.32 * len(scores) for scores in list(ways.values())[::columns]]
    figure, panels = pyplot.subplots(
        len(heights),
        columns,
        figsize=(4.2 + 2.6 * columns, sum(heights)),
        height_ratios=heights,
        sharex=True,
        sharey=are_alike,
        squeeze=False,
        layout="constrained",
    )
    for axes in panels.flat[len(ways) :]:
        axes.remove()
    for axes, (way, scores) in zip(panels.flat, ways.items(), strict=False):
        for place, values in enumerate(reversed(scores.values())):
            axes.plot(values, [place] * len(values), "o", color="#2b6cb0", alpha=0.7, markersize=5)
            axes.plot([mean(values)] * 2, [place - 0.28, place + 0.28], color="#c05621", linewidth=2)
        axes.set(
            yticks=range(len(scores)), yticklabels=list(reversed(scores)), ylim=(-0.6, len(scores) - 0.4), title=way
        )
        axes.title.set_size("medium")
        axes.tick_params(labelbottom=True)
        axes.grid(axis="x", alpha=0.3)
    return figure


def _lines(study: Study, rows: dict[str, list[dict[str, Any]]], pyplot: Any) -> Any:
    """Accuracy against x, a line through the means of the cells and evaluations that share one."""
    lines: dict[str, dict[float, list[float]]] = {}
    for cell in study.cells:
        for one in rows[cell.name]:
            if cell.line is not None and cell.x is not None and one["top1"] is not None:
                lines.setdefault(cell.line, {}).setdefault(cell.x, []).append(100 * one["top1"])
            for name, how in cell.evaluations.items():
                if "line" in how and name in one["others"]:
                    lines.setdefault(how["line"], {}).setdefault(how["x"], []).append(100 * one["others"][name])
    panels = 2 if study.flops else 1
    figure, (drawn,) = pyplot.subplots(1, panels, figsize=(3.5 + 4 * panels, 4.2), squeeze=False, layout="constrained")
    axes = drawn[0]
    for (name, points), colour in zip(lines.items(), cycle(COLOURS), strict=False):
        places = sorted(points)
        axes.plot(places, [mean(points[x]) for x in places], color=colour, linewidth=1.5, label=name)
        for x in places:
            axes.plot([x] * len(points[x]), points[x], "o", color=colour, alpha=0.6, markersize=4)
    axes.set_ylabel("test pictures that are right, %")
    axes.legend(frameon=False)
    if study.flops:
        costs = picture_flops(study)
        drawn[1].plot(sorted(costs), [costs[x] / 1e6 for x in sorted(costs)], "o-", color=COLOURS[-1], markersize=4)
        drawn[1].set(ylabel="MFLOPs of one picture, forward", ylim=(0, None))
    places = sorted({x for points in lines.values() for x in points})
    for axes in drawn:
        axes.set(xscale="log", xlabel=study.x_label)
        axes.set_xticks(places, [f"{x:,.0f}" for x in places])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    return figure


def picture_flops(study: Study) -> dict[float, int]:
    """Of a forward pass, at every x: that of a cell, or of an evaluation at another size."""
    costs: dict[float, int] = {}
    for cell in study.cells:
        config = build_network(cell.settings)[0].config
        if cell.x is not None:
            costs[cell.x] = count_cost(config).forward_flops
        for how in cell.evaluations.values():
            if "x" in how:
                costs[how["x"]] = count_cost(config, tuple(how["image_size"])).forward_flops
    return costs
