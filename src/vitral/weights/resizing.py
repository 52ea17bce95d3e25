"""Resize tensors while loading: positions to another grid, the patch kernel to another size or number of channels."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import WeightsError
from vitral.model.bit_config import BiTConfig
from vitral.model.config import Resample, ViTConfig
from vitral.model.positions import Grid, resample_rows

Config = ViTConfig | BiTConfig
_FIRST_CONVOLUTIONS = ("patches.stem.root.weight", "patches.stem.0.0.weight", "root.weight")


def resize(
    name: str, tensor: Tensor, before: Config, after: Config, shape: tuple[int, ...]
) -> tuple[Tensor, str | None]:
    """Return the tensor that the network with config ``after`` needs, and how it was resized, if it was."""
    kind = name.rpartition(".")[2]
    notes: list[str] = []
    if name in _FIRST_CONVOLUTIONS and before.channels != after.channels:
        tensor, notes = change_channels(tensor, after.channels), [_channels_note(before, after)]
    elif isinstance(before, BiTConfig) or isinstance(after, BiTConfig):
        pass  # no other tensor of a BiT depends on the image size
    elif name == "patches.project.weight":
        tensor, notes = resize_patches(tensor, before, after)
    elif kind in ("table", "row_table", "column_table"):
        if before.table_grid != after.table_grid:
            tensor = resize_table(kind, tensor, before, after)
            old, new = before.table_grid, after.table_grid
            notes.append(f"grid {old[0]} x {old[1]} to {new[0]} x {new[1]}, {after.position_resample}")
        if kind == "table" and before.has_class_token and not after.has_class_token:
            tensor = tensor[1:]
            notes.append("row of the class token removed")
    if tuple(tensor.shape) != shape:
        raise WeightsError(
            f"{name} has shape {tuple(tensor.shape)} in the file, but the requested network needs {shape}.",
            hint="Remove the config field that changes it.",
        )
    return tensor, "; ".join(notes) or None


def resize_table(kind: str, table: Tensor, before: ViTConfig, after: ViTConfig) -> Tensor:
    """Return a position table for the new grid."""
    (old_rows, old_columns), (rows, columns) = before.table_grid, after.table_grid
    method: Resample = after.position_resample
    if kind == "row_table":
        return resample_rows(table, (old_rows, 1), (rows, 1), method)
    if kind == "column_table":
        return resample_rows(table, (1, old_columns), (1, columns), method)
    token_rows = int(before.has_class_token)  # stay as they are
    patch_rows = resample_rows(table[token_rows:], before.table_grid, after.table_grid, method)
    return torch.cat([table[:token_rows], patch_rows])


def resize_patches(weight: Tensor, before: ViTConfig, after: ViTConfig) -> tuple[Tensor, list[str]]:
    """Return the patch embedding for another patch size or number of channels, and notes about it."""
    notes = []
    kernel = weight.unflatten(1, (before.patch_channels, *before.patch_hw))
    if before.patch_channels != after.patch_channels and before.stem is None:
        kernel = change_channels(kernel, after.channels)
        notes.append(_channels_note(before, after))
    if before.patch_hw != after.patch_hw:
        kernel = resample_kernel(kernel, after.patch_hw)
        old, new = before.patch_hw, after.patch_hw
        notes.append(f"patch {old[0]} x {old[1]} to {new[0]} x {new[1]} by the pseudo-inverse of resizing (FlexiViT)")
    return kernel.flatten(1), notes


def change_channels(kernel: Tensor, channels: int) -> Tensor:
    """Return a kernel that gives the same output for an image whose channels are all equal."""
    return kernel.sum(1, keepdim=True).expand(-1, channels, -1, -1) / channels


def _channels_note(before: Config, after: Config) -> str:
    return f"{before.channels} channels to {after.channels}: the sum of the kernels divided by {after.channels}"


def resample_kernel(kernel: Tensor, to: Grid) -> Tensor:
    """Return FlexiViT's kernel, whose products with resized patches are those of the old kernel with the originals.

    They are exact when enlarging, and a least-squares fit when shrinking.
    """
    old = cast(Grid, tuple(kernel.shape[-2:]))
    down, across = (_pseudo_inverse(size, new) for size, new in zip(old, to, strict=True))
    return torch.einsum("ij,kl,dcjl->dcik", down, across, kernel.double()).to(kernel.dtype)


def _pseudo_inverse(size: int, to: int) -> Tensor:
    units = torch.eye(size, dtype=torch.float64)[None]
    resized = F.interpolate(units, size=to, mode="linear", align_corners=False)[0]  # (size, to): each unit, resized
    return torch.linalg.pinv(resized)
