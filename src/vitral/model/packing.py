"""Packing: images of different sizes as one long sequence of tokens, without padding.

Images of the same size form a group, and the groups are concatenated on the token axis. Norms and linear layers, which
treat each token separately, run on the whole sequence; attention and pooling run per group. An ordinary batch is one
group and keeps its shape (B, N, D): it is never copied or split.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from vitral.errors import DataError
from vitral.model.config import ViTConfig


class Merged(NamedTuple):
    """The assignment of patches to merged tokens (merging.py)."""

    sizes: Tensor
    """(images, merged tokens): the number of patches in each token."""
    tokens: Tensor
    """(images, patches): the number of the token that contains each patch."""


class Group(NamedTuple):
    """Images of the same size."""

    images: int
    grid: tuple[int, int]
    """(rows, columns) of patches."""
    extras: int
    """Tokens before the patches of each image: class token and registers."""
    merged: Merged | None = None
    """None: one token per patch."""

    @property
    def tokens(self) -> int:
        """Return the number of tokens per image."""
        return self.extras + (self.grid[0] * self.grid[1] if self.merged is None else self.merged.sizes.shape[1])


class Packing(NamedTuple):
    """The layout of a sequence: which images lie where."""

    groups: tuple[Group, ...]
    order: tuple[int, ...] | None
    """For a list of images: the list index of each packed image. None for a batch."""

    @property
    def grids(self) -> list[tuple[int, int]]:
        """Return the grid of each image of a list, in list order."""
        assert self.order is not None, "a batch has one grid"
        packed = [group.grid for group in self.groups for _ in range(group.images)]
        return [grid for _, grid in sorted(zip(self.order, packed, strict=True))]

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Return one (images, tokens, D) per group: (B, N, D) itself, or the parts of a packed (1, T, D)."""
        if len(self.groups) == 1:
            return (x,)
        tensors = x.split_with_sizes([group.images * group.tokens for group in self.groups], dim=1)
        shapes = [(group.images, group.tokens) for group in self.groups]
        return [torch.unflatten(tensor.squeeze(0), 0, shape) for tensor, shape in zip(tensors, shapes, strict=True)]

    def in_order(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate one tensor per group, with one row per image, and return the rows in list order."""
        if self.order is None:
            return tensors[0]
        rows = torch.cat(list(tensors))
        if len(tensors) == 1:
            return rows
        return rows[sorted(range(len(self.order)), key=self.order.__getitem__)]

    def per_image(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Split one tensor per group into one tensor per image, each with a batch axis of one, in list order."""
        assert self.order is not None, "a batch is not split"
        rows = [row for tensor in tensors for row in torch.split(tensor, 1)]
        return [row for _, row in sorted(zip(self.order, rows, strict=True), key=lambda numbered: numbered[0])]

    def per_token(self, x: Tensor) -> Tensor | list[Tensor]:
        """Return one row per token: (B, N, D) of a batch as it is, a list as one (tokens, D) per image."""
        return x if self.order is None else [image[0] for image in self.per_image(self.split(x))]


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Join one (images, tokens, D) per group: (B, N, D) for one group, else packed (1, T, D)."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([tensor.flatten(0, 1) for tensor in tensors])[None]


def arrange(images: Tensor | Sequence[Tensor], config: ViTConfig, weight: Tensor) -> tuple[list[Tensor], Packing]:
    """Stack images by size. Return the stacks, and where each image lies.

    `weight` is the parameter that the images meet first: its device and dtype must match theirs."""
    if isinstance(images, Tensor):
        check_images(images, config.channels, weight, axes=4)
        stacks, order = [images], None
    else:
        stacks, order = stack_by_size(images, config.channels, config.grid, weight)
    extras = config.extra_tokens  # shape[0], because len() would fix the batch size of an exported model
    groups = tuple(Group(stack.shape[0], config.grid(*stack.shape[2:]), extras) for stack in stacks)
    return stacks, Packing(groups, order)


def stack_by_size(
    images: Sequence[Tensor], channels: int, grid: Callable[[int, int], object], weight: Tensor
) -> tuple[list[Tensor], tuple[int, ...]]:
    """Stack the images of a list by size. Return the stacks, and the list index of each stacked image.

    `grid` raises DataError for a (height, width) that the network cannot use."""
    if not isinstance(images, list | tuple):
        raise DataError(f"The model takes a tensor or a list of tensors (got {type(images).__name__}).")
    if not images:
        raise DataError("The list of images is empty.")
    by_size: dict[tuple[int, ...], list[int]] = {}
    for index, image in enumerate(images):
        if not isinstance(cast("object", image), Tensor):
            raise DataError(f"images[{index}] must be a tensor (got {type(image).__name__}).")
        try:
            check_images(image, channels, weight, axes=3)
            grid(image.shape[1], image.shape[2])
        except DataError as error:
            raise DataError(f"images[{index}]: {error}") from None
        by_size.setdefault(tuple(image.shape), []).append(index)
    stacks = [torch.stack([images[index] for index in group]) for group in by_size.values()]
    return stacks, tuple(index for group in by_size.values() for index in group)


def check_images(images: Tensor, channels: int, weight: Tensor, *, axes: int) -> None:
    """Raise DataError unless axes, channels, dtype and device fit: of a batch (4 axes), or of one image (3)."""
    shape = tuple(images.shape)
    expected = "(batch, channels, height, width)" if axes == 4 else "(channels, height, width) in a list"
    if images.ndim != axes:
        hint = "Add a batch axis to a single image with image[None]." if (axes, images.ndim) == (4, 3) else None
        raise DataError(f"The model takes images of shape {expected} (got {shape}).", hint=hint)
    if shape[-3] != channels:
        hint = f"Convert the images, or build the model with channels={shape[-3]}."
        if shape[-1] == channels:
            hint = f"Channels seem to come last: use images.movedim(-1, {axes - 3})."
        problem = f"images of shape {shape}, read as {expected}, have {shape[-3]}"
        raise DataError(f"The model has channels={channels}, but {problem}.", hint=hint)
    if not images.is_floating_point():
        hint = "Normalize them, for example with images.float() / 127.5 - 1."
        raise DataError(f"The model takes normalized floating-point images (got {images.dtype}).", hint=hint)
    if images.device != weight.device:
        hint = f"Move them with images.to({str(weight.device)!r})."
        raise DataError(f"The images are on {images.device}, but the model is on {weight.device}.", hint=hint)
    if images.dtype != weight.dtype and not torch.is_autocast_enabled(images.device.type):
        hint = f"Convert them with images.to({weight.dtype}), or use torch.autocast."
        raise DataError(f"The images are {images.dtype}, but the model is {weight.dtype}.", hint=hint)
