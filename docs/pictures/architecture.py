"""Draw docs/pictures/architecture.png: an image on its way through a Vision Transformer.

The shapes in it are those of a real model, and the input image is a small window of colored glass made of numbers.
"""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from vitral.model.config import ViTConfig

INK, SOFT, GLASS = "#22223b", "#6b6f8a", "#f4f1de"
CONFIG = ViTConfig(width=96, depth=4, heads=3, mlp_width=384, patch_size=24, image_size=96, num_classes=10)


def stained_glass(size: int) -> np.ndarray:
    """A window: cells around random points, each in one color, lead between them."""
    numbers = np.random.default_rng(7)
    centres = numbers.uniform(0, size, (46, 2))
    y, x = np.mgrid[:size, :size]
    distance = np.hypot(y[..., None] - centres[:, 0], x[..., None] - centres[:, 1])
    nearest = np.sort(distance, axis=-1)
    hue = (np.hypot(centres[:, 0] - size / 2, centres[:, 1] - size / 2) / size + numbers.uniform(0, 0.12, 46)) % 1
    colors = plt.get_cmap("Spectral")(hue)[:, :3]
    window = colors[distance.argmin(-1)] * (0.85 + 0.15 * np.cos(nearest[..., :1] / 20))
    window[nearest[..., 1] - nearest[..., 0] < 6] = 0.12
    return window


def main() -> None:
    rows, columns = CONFIG.grid(*CONFIG.image_hw)
    patch = CONFIG.patch_hw[0] * 4  # drawn finer than the model sees it
    window = stained_glass(CONFIG.image_hw[0] * 4)
    figure, axes = plt.subplots(figsize=(12, 4.1), facecolor="white")
    axes.set(xlim=(0, 120), ylim=(0, 41))
    axes.set_aspect("equal")
    axes.axis("off")

    axes.imshow(window, extent=(2, 24, 10, 32), interpolation="nearest")
    label(axes, 13, "an image", "x")
    arrow(axes, 25, 28)
    for row in range(rows):
        for column in range(columns):
            piece = window[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
            left, bottom = 29 + column * 6, 27.2 - row * 6
            axes.imshow(piece, extent=(left, left + 5, bottom - 0.2, bottom + 4.8), interpolation="nearest")
    label(axes, 40.5, f"{rows * columns} patches", r"$x_p^1,\ \dots,\ x_p^N$")
    arrow(axes, 53, 56)
    tokens(axes, window, rows, columns, patch)
    label(axes, 61, f"{rows * columns + 1} tokens", r"$[x_{class};\, x_p E] + E_{pos}$")
    arrow(axes, 66, 69)
    encoder(axes)
    label(axes, 82, f"encoder of {CONFIG.depth} blocks", r"$z_{l-1} \rightarrow z_l$")
    arrow(axes, 95, 98)
    head(axes)
    label(axes, 108, "logits", r"$\mathrm{head}(\mathrm{LN}(z_L^0))$")
    axes.set(xlim=(0, 120), ylim=(0, 41))
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=130, bbox_inches="tight", pad_inches=0.1)


def label(axes: plt.Axes, x: float, words: str, formula: str) -> None:
    axes.text(x, 37, words, ha="center", va="center", fontsize=11, color=INK, weight="bold")
    axes.text(x, 4, formula, ha="center", va="center", fontsize=10, color=SOFT)


def arrow(axes: plt.Axes, start: float, end: float) -> None:
    axes.add_patch(
        FancyArrowPatch((start, 21), (end, 21), arrowstyle="-|>", mutation_scale=14, color=INK, linewidth=1.4)
    )


def tokens(axes: plt.Axes, window: np.ndarray, rows: int, columns: int, patch: int) -> None:
    """A column of tokens in the mean colors of their patches, the class token on top."""
    height = 26 / (rows * columns + 1)
    axes.add_patch(Rectangle((58, 34 - height), 6, height * 0.86, facecolor="white", edgecolor=INK, linewidth=1.3))
    axes.text(61, 34 - height / 2 - 0.1, "class", ha="center", va="center", fontsize=7, color=INK)
    for number in range(rows * columns):
        row, column = divmod(number, columns)
        piece = window[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
        bottom = 34 - (number + 2) * height
        axes.add_patch(Rectangle((58, bottom), 6, height * 0.86, facecolor=piece.mean((0, 1)), edgecolor="none"))


def encoder(axes: plt.Axes) -> None:
    for depth in range(CONFIG.depth):
        left = 70 + depth * 6.1
        axes.add_patch(
            FancyBboxPatch(
                (left, 9), 4.9, 24, boxstyle="round,pad=0.1,rounding_size=0.8", facecolor=GLASS, edgecolor=INK
            )
        )
        for bottom, words, color in ((21.6, "attention", "#81b29a"), (10.4, "MLP", "#f2cc8f")):
            axes.add_patch(
                FancyBboxPatch(
                    (left + 0.7, bottom),
                    3.5,
                    10,
                    boxstyle="round,pad=0,rounding_size=0.5",
                    facecolor=color,
                    edgecolor="none",
                )
            )
            axes.text(left + 2.45, bottom + 5, words, rotation=90, ha="center", va="center", fontsize=9, color=INK)


def head(axes: plt.Axes) -> None:
    logits = np.random.default_rng(3).normal(0, 1.1, CONFIG.num_classes)
    chance = np.exp(logits) / np.exp(logits).sum()
    for number, value in enumerate(chance):
        color = "#3d405b" if value == chance.max() else "#b8bccf"
        axes.add_patch(
            Rectangle((100, 31.4 - 2.4 * number), max(0.4, 40 * value), 1.6, facecolor=color, edgecolor="none")
        )


if __name__ == "__main__":
    main()
