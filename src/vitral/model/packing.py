"""Packing: images of different sizes as one long sequence of tokens, without padding.

Images of one size form a group, and groups lie behind each other on the token axis. Everything that treats tokens
one by one (norms, linear layers) runs on the whole sequence; attention and pooling visit the groups. An ordinary
batch is the case of one group, and keeps its shape (B, N, D): nothing is copied or split for it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitral.errors import DataError
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig


class Group(NamedTuple):
    """Images of one size."""

    images: int
    grid: tuple[int, int]
    """(rows, columns) of patches."""
    extras: int
    """Tokens ahead of the patches of each image: class token and registers."""

    @property
    def tokens(self) -> int:
        return self.extras + self.grid[0] * self.grid[1]


class Packing(NamedTuple):
    """Which images lie where."""

    groups: tuple[Group, ...]
    order: tuple[int, ...] | None
    """For a list of images: the index in that list of each packed image; None for a batch."""

    @property
    def grids(self) -> list[tuple[int, int]]:
        """The grid of each image of a list, in the given order."""
        assert self.order is not None, "a batch has one grid"
        packed = [group.grid for group in self.groups for _ in range(group.images)]
        return [grid for _, grid in sorted(zip(self.order, packed, strict=True))]

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """(B, N, D) -> itself, or packed (1, T, D) -> one (images, tokens, D) for each group."""
        if len(self.groups) == 1:
            return (x,)
        parts = x.split([group.images * group.tokens for group in self.groups], dim=1)
        return [part.squeeze(0).unflatten(0, (g.images, g.tokens)) for part, g in zip(parts, self.groups, strict=True)]

    def in_order(self, parts: Sequence[Tensor]) -> Tensor:
        """One tensor a group, a row an image -> one tensor, rows in the order in which the images were given."""
        if self.order is None:
            return parts[0]
        rows = torch.cat(list(parts))
        if len(parts) == 1:
            return rows
        places = {image: place for place, image in enumerate(self.order)}
        return rows[[places[image] for image in range(len(places))]]

    def per_image(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """One tensor a group -> one tensor an image, each with a batch axis of one, in the given order."""
        assert self.order is not None, "a batch is not taken apart"
        rows = [row for part in parts for row in part.split(1)]
        return [row for _, row in sorted(zip(self.order, rows, strict=True), key=lambda pair: pair[0])]

    def per_token(self, x: Tensor) -> Tensor | list[Tensor]:
        """Something for every token: a batch as it is, a list as one (tokens, D) for each image."""
        return x if self.order is None else [image[0] for image in self.per_image(self.split(x))]


def join(parts: Sequence[Tensor]) -> Tensor:
    """One (images, tokens, D) for each group -> (B, N, D) for one group, else packed (1, T, D)."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.flatten(0, 1) for part in parts])[None]


def arrange(images: Tensor | Sequence[Tensor], config: ViTConfig, weight: Tensor) -> tuple[list[Tensor], Packing]:
    """A batch, or a list of images of any sizes -> stacks of one size, and where each image went.

    ``weight`` is a parameter that meets the images: they must be where it is, and as precise."""
    if isinstance(images, Tensor):
        check_images(images, config.channels, weight, axes=4)
        stacks, order = [images], None
    else:
        stacks, order = stack_by_size(images, config, weight)
    groups = [
        Group(stack.shape[0], config.grid(stack.shape[2], stack.shape[3]), config.extra_tokens) for stack in stacks
    ]
    return stacks, Packing(tuple(groups), order)


def stack_by_size(
    images: Sequence[Tensor], config: ViTConfig | BiTConfig, weight: Tensor
) -> tuple[list[Tensor], tuple[int, ...]]:
    """Images of one size together, and which of the list they are."""
    check_list(images, config.channels, weight)
    by_size: dict[tuple[int, ...], list[int]] = {}
    for index, image in enumerate(images):
        try:
            config.grid(image.shape[1], image.shape[2])
        except DataError as error:
            raise DataError(f"Number {index} of the list: {error}") from None
        by_size.setdefault(tuple(image.shape), []).append(index)
    stacks = [torch.stack([images[index] for index in group]) for group in by_size.values()]
    return stacks, tuple(index for group in by_size.values() for index in group)


def check_list(images: Sequence[Tensor], channels: int, weight: Tensor) -> None:
    if not isinstance(images, list | tuple) or not images:
        seen = "an empty list" if isinstance(images, list | tuple) else f"of type {type(images).__name__}"
        raise DataError(f"The model takes a tensor of images or a list of tensors, and this is {seen}.")
    for index, image in enumerate(images):
        if not isinstance(image, Tensor):
            raise DataError(f"Number {index} of the list is of type {type(image).__name__} instead of a tensor.")
        try:
            check_images(image, channels, weight, axes=3)
        except DataError as error:
            raise DataError(f"Number {index} of the list: {error}") from None


def check_images(images: Tensor, channels: int, weight: Tensor, *, axes: int) -> None:
    """Axes, channels, dtype and device, of a batch or of one image of a list."""
    shape, wanted = tuple(images.shape), "(batch, channels, height, width)"
    if axes == 3:
        wanted = "(channels, height, width) in a list"
    if images.ndim != axes:
        hint = "Add the batch axis to a single image with image[None]." if (axes, images.ndim) == (4, 3) else None
        raise DataError(f"The model takes images of shape {wanted}, and this is {shape}.", hint=hint)
    if shape[-3] != channels:
        hint = f"Convert the images, or build the model with channels={shape[-3]}."
        if shape[-1] == channels:
            hint = f"Channels seem to come last: use images.movedim(-1, {axes - 3})."
        raise DataError(
            f"The model was built for channels={channels}, and images of shape {shape}, read as {wanted}, have "
            f"{shape[-3]}.",
            hint=hint,
        )
    if not images.is_floating_point():
        raise DataError(
            f"The model takes normalised floating-point images, and these are {images.dtype}.",
            hint="Scale them first, such as images.float() / 127.5 - 1.",
        )
    if images.device != weight.device:
        raise DataError(
            f"The images are on {images.device} and the model is on {weight.device}.",
            hint=f"Move one of them, such as images.to({str(weight.device)!r}).",
        )
    if images.dtype != weight.dtype and not torch.is_autocast_enabled(images.device.type):
        raise DataError(
            f"The images are {images.dtype} and the model is {weight.dtype}.",
            hint=f"Convert one of them, such as images.to({weight.dtype}), or use torch.autocast.",
        )
