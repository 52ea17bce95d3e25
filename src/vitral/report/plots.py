"""Plots as SVG text, so that a page needs no other file and stays sharp."""

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isnan
from typing import Any

BLUE, ORANGE, GREY, INK = "#2b6cb0", "#c05621", "#a0aec0", "#2d3748"
LARGEST_NAMED = 30


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Any, list[str]]]:
    """A figure, and where its SVG ends up."""
    import matplotlib
    from matplotlib.figure import Figure

    told: list[str] = []
    style: Any = {
        "font.size": 9,
        "axes.edgecolor": GREY,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.fonttype": "none",  # letters stay letters: the browser has those that no font here has
        "svg.hashsalt": "vitral",  # the same plot is the same text
    }
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of letters that the font for measuring lacks
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, told
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True)
        told.append(re.sub(r".*?(<svg.*?)<metadata>.*?</metadata>", r"\1", stream.getvalue(), count=1, flags=re.DOTALL))


def draw_curves(losses: Sequence[dict[str, str]], epochs: Sequence[dict[str, str]]) -> str:
    """Loss while training and on the validation; top-1 on the validation."""
    from matplotlib.ticker import MaxNLocator

    with _figure(8.6, 2.9) as (figure, told):
        shares = [100 * float(row["top1"]) for row in epochs]
        panels = figure.subplots(1, 1 if shares and all(map(isnan, shares)) else 2, squeeze=False)[0]
        left = panels[0]
        steps, values = [int(row["step"]) for row in losses], [float(row["loss"]) for row in losses]
        if steps:
            left.plot(steps, values, color=BLUE, alpha=0.25, linewidth=1)
            left.plot(steps, _smoothed(values), color=BLUE, linewidth=1.6, label="training")
        ends = [int(row["step"]) for row in epochs]
        many = "o-" if len(ends) < 40 else "-"
        left.plot(ends, [float(row["loss"]) for row in epochs], many, color=ORANGE, markersize=3, label="validation")
        left.set(xlabel="step", ylabel="loss", ylim=(0, None))
        left.legend(frameon=False)
        for right in panels[1:]:
            right.plot(ends, shares, many, color=ORANGE, markersize=3)
            right.set(xlabel="step", ylabel="right on the validation, %")
            right.set_ylim(top=min(100.5, right.get_ylim()[1]))
        for axes in panels:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
    return told[0]


def _smoothed(values: Sequence[float]) -> list[float]:
    """A running mean over a twentieth of the curve."""
    reach = max(1, len(values) // 40)
    parts = [values[max(0, at - reach) : at + reach + 1] for at in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def draw_confusion(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Rows are the truth; each is coloured by its part of the row."""
    count = len(names)
    side = min(9.0, 2.2 + 0.36 * min(count, LARGEST_NAMED))
    with _figure(side, side) as (figure, told):
        axes = figure.subplots()
        parts = [[number / max(1, sum(row)) for number in row] for row in matrix]
        axes.imshow(parts, cmap="Blues", vmin=0, vmax=1)
        axes.set(xlabel="answer", ylabel="truth")
        if count <= LARGEST_NAMED:
            axes.set_xticks(range(count), [_short(name) for name in names], rotation=60, ha="right")
            axes.set_yticks(range(count), [_short(name) for name in names])
            for row, numbers in enumerate(matrix):
                for column, number in enumerate(numbers):
                    if number:
                        light = parts[row][column] > 0.5
                        style = dict(ha="center", va="center", fontsize=7, color="white" if light else INK)
                        axes.text(column, row, str(number), **style)
    return told[0]


def _short(name: str) -> str:
    """Dollar signs would be read as mathematics."""
    name = name.replace("$", r"\$")
    return name if len(name) <= 18 else f"{name[:17]}…"


def draw_reliability(bins: Sequence[dict[str, float]]) -> str:
    """How often answers of each confidence are right, and how many there are."""
    with _figure(4.3, 3.6) as (figure, told):
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        width = 1 / len(bins)
        places = [width * (number + 0.5) for number in range(len(bins))]
        above.bar(places, [one["right"] if one["images"] else 0 for one in bins], width * 0.9, color=BLUE, alpha=0.75)
        above.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
        above.set(ylabel="part that is right", xlim=(0, 1), ylim=(0, 1))
        below.bar(places, [one["images"] for one in bins], width * 0.9, color=GREY)
        below.set(xlabel="confidence", ylabel="pictures")
    return told[0]
