"""Draw the figures of an inspection as PNG files, for slides and papers."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitral.errors import VitralError
from vitral.files import atomic_path, printable
from vitral.inspection.overlays import covered_part, heat, spotlight, to_rgb

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitral.inspection.results import InspectedImage, Inspection

BLUE, ORANGE, GRAY, INK = "#2b6cb0", "#c05621", "#8d99ae", "#2d3748"
MAX_LAYER_ROWS = 12
FIGURES = tuple(
    f"{name}.png" for name in ("images", "attention", "distance", "tokens", "filters", "positions", "faithfulness")
)


def draw_figures(inspection: "Inspection", folder: Path) -> None:
    """Write images.png, attention.png, distance.png, tokens.png, filters.png, and positions.png if there are any.

    Remove the other figures of an earlier inspection."""
    first = inspection.images[0]
    figures: dict[str, tuple[float, float, Callable[[Figure], None]]] = {
        "images": (9.6, 2.5 * len(inspection.images) + 0.3, lambda figure: _draw_images(figure, inspection)),
        "attention": (*_attention_size(first), lambda figure: _draw_attention(figure, first)),
        "distance": (7.2, 4.0, lambda figure: _draw_distance(figure, inspection)),
        "tokens": (9.6, 4.4, lambda figure: _draw_tokens(figure, first)),
        "filters": (7.2, 4.4, lambda figure: _draw_filters(figure, inspection)),
    }
    if inspection.position_similarity is not None:
        figures["positions"] = (6.4, 6.4, lambda figure: _draw_positions(figure, inspection))
    if inspection.faithfulness:
        figures["faithfulness"] = (6.4, 4.0, lambda figure: _draw_faithfulness(figure, inspection.faithfulness))
    for file in FIGURES:
        if file.removesuffix(".png") not in figures:
            (folder / file).unlink(missing_ok=True)
    for name, (width, height, draw) in figures.items():
        _save(folder / f"{name}.png", width, height, draw)


# ---- figures ----


def _draw_images(figure: "Figure", inspection: "Inspection") -> None:
    rows, patch = figure.subplots(len(inspection.images), 4, squeeze=False), inspection.model["patch"]
    for axes, image in zip(rows, inspection.images, strict=True):
        best = image.relevance[0] if image.relevance else None
        covered = covered_part(image.size, image.grid, patch)
        axes[0].imshow(spotlight(image.pixels, np.ones(image.grid)))
        axes[1].imshow(spotlight(image.pixels, image.rollout, covered=covered))
        axes[3].imshow(image.features, aspect=patch[0] / patch[1])
        axes[3].set(
            ylim=(image.grid[0] * covered[0] - 0.5, -0.5),
            xlim=(-0.5, image.grid[1] * covered[1] - 0.5),
        )
        if best is not None:
            axes[2].imshow(heat(image.pixels, best.map, covered=covered))
            axes[2].set_title(f"{_short(best.label)} {best.probability:.0%}", fontsize=9, color=INK)
        for axis in axes:
            axis.set_axis_off()
    titles = ("image", "rollout", None, "features")
    for axis, title in zip(rows[0], titles, strict=True):
        if title:
            axis.set_title(title, fontsize=9, color=INK)


def _attention_size(image: "InspectedImage") -> tuple[float, float]:
    layers, heads = image.attention.values.shape[:2]
    return 0.9 * min(heads, 16) + 0.8, 0.9 * min(layers, MAX_LAYER_ROWS) + 0.6


def _draw_attention(figure: "Figure", image: "InspectedImage") -> None:
    """Draw every head of the layers on the page, for the class token or the patch in the middle."""
    table = image.attention
    query = 0 if table.extras else (table.grid[0] // 2) * table.grid[1] + table.grid[1] // 2
    step = -(-len(table.layers) // MAX_LAYER_ROWS)
    chosen = list(range(len(table.layers)))[::-1][::step][::-1]
    rows = figure.subplots(len(chosen), min(16, table.values.shape[1]), squeeze=False)
    for axes, layer in zip(rows, chosen, strict=True):
        for head, axis in enumerate(axes):
            axis.imshow(np.square(table.values[layer, head, query].reshape(table.grid) / 255.0), cmap="inferno")
            axis.set(xticks=[], yticks=[])
            if layer == chosen[0]:
                axis.set_title(f"head {head + 1}", fontsize=7, color=INK)
        axes[0].set_ylabel(f"layer {table.layers[layer] + 1}", fontsize=7, color=INK)
    what = table.extras[0] if table.extras else "patch in the middle"
    figure.supxlabel(f"attention of the {what}", fontsize=8, color=INK)


def _draw_distance(figure: "Figure", inspection: "Inspection") -> None:
    axes, distance = figure.subplots(), inspection.distance
    layers = np.arange(1, len(distance) + 1)
    axes.plot(layers, distance.mean(axis=1), color=BLUE, alpha=0.35)
    for head in range(distance.shape[1]):
        axes.scatter(layers, distance[:, head], s=28, color=BLUE, alpha=0.75, linewidths=0)
    top = 1.06 * max(float(distance.max()), 1e-6)
    axes.set(xlabel="layer", ylabel="mean attention distance (pixels)", ylim=(0, top))
    if len(layers) <= 16:
        axes.set_xticks(layers)
    _plain_axes(axes)


def _draw_tokens(figure: "Figure", image: "InspectedImage") -> None:
    above, below = np.ravel(np.asarray(figure.subfigures(2, 1, height_ratios=[1, 1.5])))
    step = -(-len(image.norms) // 12)
    chosen = range(0, len(image.norms), step)
    for axis, layer in zip(np.atleast_1d(above.subplots(1, len(chosen))), chosen, strict=True):
        axis.imshow(image.norms[layer] / np.median(image.norms[layer]), cmap="inferno", vmin=0, vmax=3)
        axis.set_title(f"layer {layer + 1}", fontsize=7, color=INK)
        axis.set_axis_off()
    left, right = below.subplots(1, 2)
    layers = np.arange(1, len(image.norms) + 1)
    left.plot(layers, image.norms.max(axis=(1, 2)), color=ORANGE, label="longest token")
    left.plot(layers, np.median(image.norms, axis=(1, 2)), color=BLUE, label="median")
    left.set(xlabel="layer", ylabel="length", ylim=(0, None))
    left.legend(frameon=False, fontsize=8)
    right.plot(layers, image.similarity, color=BLUE)
    right.set(xlabel="layer", ylabel="mean cosine similarity")
    for axes in (left, right):
        _plain_axes(axes)


def _draw_filters(figure: "Figure", inspection: "Inspection") -> None:
    for axis, component in zip(figure.subplots(4, 7).flat, inspection.filters[:28], strict=False):
        pixels = to_rgb(component.transpose(1, 2, 0))
        axis.imshow(0.5 + 0.5 * pixels / max(float(np.abs(pixels).max()), 1e-12))
    for axis in figure.axes:
        axis.set_axis_off()


def _draw_positions(figure: "Figure", inspection: "Inspection") -> None:
    similarity = inspection.position_similarity
    assert similarity is not None
    rows, columns = similarity.shape[:2]
    step = -(-max(rows, columns) // 14)
    shown, axes = similarity[::step, ::step], figure.subplots()
    low = float(shown.min())
    tiles = np.full((shown.shape[0] * (rows + 1) - 1, shown.shape[1] * (columns + 1) - 1), np.nan)
    for row in range(shown.shape[0]):
        for column in range(shown.shape[1]):
            top, left = row * (rows + 1), column * (columns + 1)
            tiles[top : top + rows, left : left + columns] = shown[row, column]
    picture = axes.imshow(tiles, cmap="viridis", vmin=low, vmax=1)
    figure.colorbar(picture, ax=axes, shrink=0.7, label="cosine similarity")
    axes.set_axis_off()


def _draw_faithfulness(figure: "Figure", results: Any) -> None:  # noqa: ANN401 (plain values by name)
    axes = figure.subplots()
    for color, (name, result) in zip((ORANGE, BLUE), results.items(), strict=False):
        axes.plot(result["fractions"], result["curve"], color=color, label=f"{name}: {result['score']:+.3f}")
    result = next(iter(results.values()))
    axes.plot(result["fractions"], result["random_curve"], color=GRAY, linestyle="--", label="random order")
    axes.set(xlabel="patches deleted", ylabel="probability of the predicted class", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
    _plain_axes(axes)


# ---- drawing ----


def _plain_axes(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _short(name: str, length: int = 28) -> str:
    """Return a name that fits above an image. matplotlib reads dollar signs as mathematics, so escape them."""
    name = printable(name)
    return (name if len(name) <= length else f"{name[: length - 1]}…").replace("$", r"\$")


def _save(path: Path, width: float, height: float, draw: "Callable[[Figure], None]") -> None:
    import warnings

    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {"font.size": 9, "text.color": INK, "axes.edgecolor": GRAY, "axes.labelcolor": INK}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of letters that the font lacks
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        with atomic_path(path, VitralError) as temporary:
            figure.savefig(temporary, format="png", dpi=110, facecolor="white")
