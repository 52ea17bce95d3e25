"""Measure how fast this machine runs a network."""

import time
from collections.abc import Sequence

import torch

from vitral.data.batches import ImageDataset
from vitral.data.dataset import Item
from vitral.inference.loaded_model import LoadedModel

TIMED_IMAGES = 8


def time_image(model: LoadedModel, items: Sequence[Item]) -> float:
    """Return the seconds per image of reading it and of a forward pass in a batch, the fastest of three tries."""
    images = ImageDataset(items, model.preprocess, patch=model.model.config.step_hw)
    numbers = range(min(TIMED_IMAGES, len(items)))
    start = time.perf_counter()
    loaded = [image for _, image in (images[0, number] for number in numbers) if isinstance(image, torch.Tensor)]
    reading = (time.perf_counter() - start) / len(numbers)
    size = model.model.config.image_hw
    batch = torch.stack(loaded) if len({image.shape for image in loaded}) == 1 else None
    if batch is None:  # unreadable, or of several sizes
        batch = torch.zeros(TIMED_IMAGES, model.preprocess.channels, *size, dtype=torch.uint8)
    times: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        model.features(batch)
        times.append((time.perf_counter() - start) / len(batch))
    return reading + min(times)
