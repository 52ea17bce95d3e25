"""Draw plots as SVG text, which a page embeds without other files.

Colors are CSS variables that the page defines, so that the plots follow its light or dark theme.
"""

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

from vitral.files import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GRAY, INK = "#2b6cb0", "#c05621", "#8d99ae", "#2d3748"
CSS_COLORS = {BLUE: "var(--blue)", ORANGE: "var(--orange)", GRAY: "var(--gray)", INK: "var(--ink)"}
MAX_NAMED_CLASSES = 30
MAX_NAME_LENGTH = 18
MAX_MARKED_EPOCHS = 40

_STYLE: Any = {
    "font.size": 9,
    "axes.edgecolor": GRAY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # keep text as text: the browser may have letters that no font has here
    "svg.hashsalt": "vitral",  # the same plot gives the same text
}


def draw_curves(losses: Sequence[Mapping[str, str]], epochs: Sequence[Mapping[str, str]]) -> str:
    """Return a plot of the loss and, for a classifier, the accuracy, from the rows of losses.csv and metrics.csv."""
    accuracies = [100 * float(row["top1"]) for row in epochs]
    is_classifier = not (accuracies and all(map(isnan, accuracies)))

    def draw(figure: "Figure") -> None:
        panels = figure.subplots(1, 2 if is_classifier else 1, squeeze=False)[0]
        _draw_losses(panels[0], losses, epochs)
        for panel in panels[1:]:
            _draw_epochs(panel, epochs, accuracies)
            panel.set(xlabel="step", ylabel="validation accuracy (%)")
            panel.set_ylim(top=min(100.5, panel.get_ylim()[1]))
        for panel in panels:
            panel.locator_params(axis="x", integer=True)
            panel.grid(color=GRAY, alpha=0.25, linewidth=0.6)

    return _render(8.6, 2.9, draw)


def _draw_losses(axes: "Axes", losses: Sequence[Mapping[str, str]], epochs: Sequence[Mapping[str, str]]) -> None:
    if losses:
        steps, values = [int(row["step"]) for row in losses], [float(row["loss"]) for row in losses]
        axes.plot(steps, values, color=BLUE, alpha=0.25, linewidth=1)
        axes.plot(steps, _running_mean(values), color=BLUE, linewidth=1.6, label="training")
    _draw_epochs(axes, epochs, [float(row["loss"]) for row in epochs])
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    axes.legend(frameon=False)


def _draw_epochs(axes: "Axes", epochs: Sequence[Mapping[str, str]], values: Sequence[float]) -> None:
    marker = "o-" if len(epochs) < MAX_MARKED_EPOCHS else "-"
    axes.plot([int(row["step"]) for row in epochs], values, marker, color=ORANGE, markersize=3, label="validation")


def _running_mean(values: Sequence[float]) -> list[float]:
    """Return the mean over a window of a twentieth of the curve around each value."""
    reach = max(1, len(values) // 40)
    windows = [values[max(0, index - reach) : index + reach + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def draw_confusion(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Return a confusion matrix. Rows are labels; a cell's opacity is its share of the row."""
    from matplotlib.colors import to_rgb

    count = len(names)
    shares = [[number / max(1, sum(row)) for number in row] for row in matrix]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        axes.imshow([[(*to_rgb(BLUE), share) for share in row] for row in shares])
        axes.set(xlabel="prediction", ylabel="label")
        if count > MAX_NAMED_CLASSES:
            return
        ticks = [_tick_label(name) for name in names]
        if max(map(len, ticks)) <= 2:
            axes.set_xticks(range(count), ticks)
        else:
            axes.set_xticks(range(count), ticks, rotation=60, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(count), ticks)
        for row, numbers in enumerate(matrix):
            for column, number in enumerate(numbers):
                if number:
                    color = "white" if shares[row][column] > 0.5 else INK
                    axes.text(column, row, str(number), ha="center", va="center", fontsize=7, color=color)

    side = min(9.0, 2.2 + 0.36 * min(count, MAX_NAMED_CLASSES))
    return _render(side, side, draw)


def _tick_label(name: str) -> str:
    """Return a class name that fits beside an axis. matplotlib reads dollar signs as mathematics, so escape them."""
    name = printable(name)
    short = name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 1]}…"
    return short.replace("$", r"\$")


def draw_reliability(bins: Sequence[Mapping[str, float]]) -> str:
    """Return a plot of the accuracy at each confidence, with the number of images below."""
    width = 1 / len(bins)
    centers = [width * (index + 0.5) for index in range(len(bins))]

    def draw(figure: "Figure") -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        accuracies = [row["accuracy"] if row["images"] else 0 for row in bins]
        above.bar(centers, accuracies, width * 0.9, color=BLUE, alpha=0.75)
        above.plot([0, 1], [0, 1], color=GRAY, linewidth=1, linestyle="--")
        above.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
        below.bar(centers, [row["images"] for row in bins], width * 0.9, color=GRAY)
        below.set(xlabel="confidence", ylabel="images")

    return _render(4.3, 3.6, draw)


def _render(width: float, height: float, draw: "Callable[[Figure], None]") -> str:
    """Return what `draw` puts on a figure of this size in inches, as SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    stream = io.StringIO()
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of letters that the font for measuring text lacks
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        figure.savefig(stream, format="svg", transparent=True)
    svg = re.sub(r".*?(<svg.*?)<metadata>.*?</metadata>", r"\1", stream.getvalue(), count=1, flags=re.DOTALL)
    return re.sub("|".join(CSS_COLORS), lambda match: CSS_COLORS[match[0]], svg)
