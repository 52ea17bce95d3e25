"""Measure how fast this machine runs a network."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from vitral.collectives import from_first
from vitral.data.batches import ImageDataset
from vitral.data.dataset import Item
from vitral.inference.loaded_model import LoadedModel

TIMED_IMAGES, MIN_TRIES, MAX_TRIES, MAX_SECONDS = 4, 2, 5, 2.0
"""Images of a batch, and batches: fewer if they take so many seconds, because large networks are slow to time."""


def time_image(model: LoadedModel, items: Sequence[Item]) -> float:
    """Return the seconds per image of reading it and of a forward pass in a batch, the fastest of a few."""
    images = ImageDataset(items, model.preprocess, patch=model.model.config.step_hw)
    numbers = range(min(TIMED_IMAGES, len(items)))
    loaded: list[torch.Tensor] = []
    reading: list[float] = []
    for number in numbers:
        start = time.perf_counter()
        _, image = images[0, number]
        reading.append(time.perf_counter() - start)
        if isinstance(image, torch.Tensor):
            loaded.append(image)
    size = model.model.config.image_hw
    batch = torch.stack(loaded) if len({image.shape for image in loaded}) == 1 else None
    if batch is None:  # unreadable, or of several sizes
        batch = torch.zeros(TIMED_IMAGES, model.preprocess.channels, *size, dtype=torch.uint8)
    times: list[float] = []
    while len(times) < MIN_TRIES or (len(times) < MAX_TRIES and sum(times) * len(batch) < MAX_SECONDS):
        start = time.perf_counter()
        model.features(batch)
        times.append((time.perf_counter() - start) / len(batch))
    return from_first(min(reading) + min(times))


def time_test_image(model: LoadedModel, items: Sequence[Item], image_seconds: float) -> float:
    """Return the seconds per image of the test split, which is measured in float32, unlike an image of the run."""
    return image_seconds if model.precision == "float32" else time_image(replace(model, precision="float32"), items)
