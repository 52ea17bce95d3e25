"""A model over a split: logits and labels of every picture, the last partial batch included."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from vitral.data.loader import Batch, Loader
from vitral.data.pixels import normalise
from vitral.model.vit import ViT
from vitral.preprocess import Preprocess


def run_model(
    model: ViT,
    loader: Loader,
    preprocess: Preprocess,
    device: torch.device,
    precision: Callable[[], AbstractContextManager[object]],
) -> Iterator[tuple[Batch, Tensor]]:
    """Each batch with its logits in float32."""
    was_training = model.training
    model.eval()
    try:
        for batch in loader.epoch():
            if len(batch.items):
                with torch.inference_mode(), precision():
                    logits = model(to_device(batch.images, preprocess, device))
                yield batch, logits.float().cpu()
    finally:
        model.train(was_training)


def to_device(images: Tensor | list[Tensor], preprocess: Preprocess, device: torch.device) -> Tensor | list[Tensor]:
    """Normalised, where the model is."""
    if isinstance(images, Tensor):
        return normalise(images.to(device), preprocess)
    return [normalise(image.to(device), preprocess) for image in images]
