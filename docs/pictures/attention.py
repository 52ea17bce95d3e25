"""Draw docs/pictures/attention.png: where the layers of the shipped model look in two of the built-in digits.

python docs/pictures/attention.py
"""

from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image
from torch import Tensor

import vitral
from vitral.data.sources import open_dataset
from vitral.data.transforms import normalize

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TARGET = Path(__file__).with_name("attention.png")
SIDE = 192
"""The model was trained at 32 pixels; at 192 it has 24 x 24 tokens instead of 4 x 4."""
DIGITS = ("3", "8")


def load_digits() -> Tensor:
    """Return the fifth test image of each digit as uint8 (2, 3, SIDE, SIDE)."""
    data = open_dataset("builtin:digits")
    arrays = []
    for digit in DIGITS:
        item = [item for item in data.splits["test"] if item.label == data.classes.index(digit)][4]
        pixels = np.asarray(item.source.read())[..., 0]
        image = Image.fromarray(pixels).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        arrays.append(np.asarray(image).transpose(2, 0, 1))
    return torch.from_numpy(np.stack(arrays))


@torch.inference_mode()
def main() -> None:
    checkpoint, images = vitral.load("vit-cifar10"), load_digits()
    model = checkpoint.model.float()
    with vitral.record_attention(model) as maps:
        features = model.features(normalize(images, checkpoint.preprocess))
    figure, axes = plt.subplots(len(images), 1 + len(maps), figsize=(1.5 * (1 + len(maps)), 3.3))
    for row, image in zip(axes, range(len(images)), strict=True):
        row[0].imshow(images[image].permute(1, 2, 0))
        for layer in maps:
            received = maps[layer][image].mean(dim=(0, 1))  # by each token, mean of heads and queries
            row[1 + layer].imshow(received.unflatten(0, features.grid).sqrt(), cmap="magma", interpolation="bilinear")
    for axis, title in zip(axes[0], ["image", *(f"layer {layer + 1}" for layer in maps)], strict=True):
        axis.set_title(title, fontsize=10)
    for axis in axes.flat:
        axis.set_axis_off()
    figure.tight_layout(pad=0.3)
    figure.savefig(TARGET, dpi=130, facecolor="white")


if __name__ == "__main__":
    main()
