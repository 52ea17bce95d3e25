"""Run images through a ViT a few at a time, so that the attention of one layer fits into memory."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from vitral.errors import ConfigError, DataError
from vitral.model.config import ViTConfig
from vitral.model.packing import Packing, check_images
from vitral.model.pool import MapPool
from vitral.model.vit import ViT

Images = Tensor | Sequence[Tensor]
"""Normalized (B, C, H, W), or a list of (C, H, W) of any sizes."""
Maps = Tensor | list[Tensor]
"""One map per image: a tensor for a batch, a list for a list of images."""
MAX_BYTES = 2**27
"""Memory for the attention weights of one layer; at least one image runs at a time."""


def check_vit(model: nn.Module) -> ViT:
    """Return the model. Raise ConfigError for one without attention, such as BiT."""
    if isinstance(model, ViT):
        return model
    name = type(model).__name__
    reason = "it is a ResNet, and convolutions have no attention weights" if name == "BiT" else "it is not a ViT"
    raise ConfigError(f"Cannot inspect a {name}: {reason}.", hint="Pass a ViT or a hybrid (r50-vit-b16).")


def check_unmerged(model: nn.Module) -> ViT:
    """Return the model. Raise ConfigError if it merges tokens, which takes the patches of its attention away."""
    vit = check_vit(model)
    if vit.config.merge:
        problem = f"Attention maps need every patch, but this model merges tokens (merge={vit.config.merge})."
        raise ConfigError(problem, hint="Load it without merging: vitral.load(..., merge=0).")
    return vit


def check_classifier(model: nn.Module, purpose: str) -> ViT:
    """Return the model. Raise ConfigError if it does not predict classes of images."""
    vit = check_vit(model)
    if not vit.config.num_classes or vit.config.pool == "none":
        raise ConfigError(f"{purpose} needs a model that predicts classes.", hint="Train a head: vitral train --from.")
    return vit


def run_images(model: ViT, images: Images, compute: Callable[[Images], list[Tensor]], *, layers: int = 1) -> Maps:
    """Return the results of `compute`, which returns one tensor per image, stacked for a batch of images.

    `layers` is the number of layers whose attention weights `compute` needs at the same time."""
    with evaluating(model):
        results = [result for batch in split_images(images, model, layers) for result in compute(batch)]
    return torch.stack(results) if isinstance(images, Tensor) else results


def split_images(images: Images, model: ViT, layers: int = 1) -> Iterator[Images]:
    """Yield the images in batches whose attention weights take at most `MAX_BYTES`."""
    config, weight = model.config, model.patches.project.weight
    if isinstance(images, Tensor):
        check_images(images, config.channels, weight, axes=4)
    elif not isinstance(cast("object", images), list | tuple) or not all(isinstance(image, Tensor) for image in images):
        raise DataError("Expected a tensor (B, C, H, W) or a list of tensors (C, H, W).")
    if not len(images):
        raise DataError("There are no images to inspect.", hint="Pass at least one.")
    start, used = 0, 0
    for index, image in enumerate(images):
        check_images(image, config.channels, weight, axes=3)
        size = layers * attention_bytes(config, config.grid(image.shape[1], image.shape[2]))
        if used and used + size > MAX_BYTES:
            yield images[start:index]
            start, used = index, 0
        used += size
    yield images[start:]


def attention_bytes(config: ViTConfig, grid: tuple[int, int]) -> int:
    """Return the bytes of the attention weights of one layer and one image, in float32."""
    return 4 * config.heads * (config.extra_tokens + grid[0] * grid[1]) ** 2


def relevance_bytes(config: ViTConfig, grid: tuple[int, int]) -> int:
    """Return about how much memory relevance needs per image. The process may grow by a fifth more.

    These are the attention weights of all layers, the activations that their gradients need, and those gradients of
    one layer with two intermediate results: the backward pass frees each layer before it computes the next."""
    attention = (config.blocks + 3) * attention_bytes(config, grid)
    tokens = config.extra_tokens + grid[0] * grid[1]
    activations = 4 * config.blocks * tokens * (6 * config.width + config.mlp_width)
    return attention + activations


@contextmanager
def frozen(model: nn.Module) -> Generator[None]:
    """Compute no gradients of the weights inside the context, which would keep more activations in memory."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        model.requires_grad_(False)
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Switch dropout off inside the context."""
    modules = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in modules:
            module.training = True


def per_image(tensors: Sequence[Tensor], packing: Packing) -> list[Tensor]:
    """Return the row of each image, in the order of the images, from one tensor per group of images."""
    if packing.order is None:
        return list(tensors[0])
    return [row[0] for row in packing.per_image(tensors)]


def patch_pixels(config: ViTConfig) -> tuple[int, int]:
    """Return the (height, width) of a patch in pixels of the image; the stem of a hybrid enlarges it."""
    return config.patch_hw[0] * config.shrink, config.patch_hw[1] * config.shrink


def pooled_rows(model: ViT, x: Tensor, packing: Packing) -> list[Tensor]:
    """Return the share of each token in the pooled vector, (images, N) per group; every row sums to 1.

    Attention pooling has its weights, averaged over heads. The class token has 1, the mean of the patches equal shares.
    """
    pool, rows = model.config.pool, list[Tensor]()
    for tokens, group in zip(packing.split(x), packing.groups, strict=True):
        row = tokens.new_zeros(tokens.shape[:2], dtype=torch.float32)
        if pool == "map":
            row[:, group.extras :] = (
                cast("MapPool", model.pool).attend_with_weights(tokens, group.extras)[1].mean((1, 2))
            )
        if pool in ("mean", "token+mean", "none"):
            row[:, group.extras :] = 1 / (group.tokens - group.extras)
        if pool in ("token", "token+mean"):
            row[:, 0] = 1.0
        rows.append(row / row.sum(dim=1, keepdim=True))
    return rows
