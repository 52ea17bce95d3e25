"""Resize tensors while loading: positions to another grid, the patch kernel to another size or number of channels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import WeightsError
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.model.positions import Grid, resample_rows

_FIRST_CONVOLUTIONS = ("patches.stem.root.weight", "patches.stem.0.0.weight", "root.weight")


def resize(
    name: str, tensor: Tensor, before: ViTConfig | BiTConfig, after: ViTConfig | BiTConfig, shape: tuple[int, ...]
) -> tuple[Tensor, str | None]:
    """Return the tensor that the network with config ``after`` needs, and how it was resized, if it was."""
    notes: list[str] = []
    if name in _FIRST_CONVOLUTIONS and before.channels != after.channels:
        tensor = change_channels(tensor, after.channels)
        notes.append(_channels_note(before, after))
    elif isinstance(before, BiTConfig) or isinstance(after, BiTConfig):
        pass  # no other tensor of a BiT depends on the image size
    elif name == "patches.project.weight":
        tensor, notes = resize_patches(tensor, before, after)
    elif name.endswith("table"):
        tensor, notes = resize_table(name.rpartition(".")[2], tensor, before, after)
    if tuple(tensor.shape) != shape:
        problem = f"{name} has shape {tuple(tensor.shape)} in the file, but the requested network needs {shape}."
        raise WeightsError(problem, hint="Remove the config field that changes it.")
    return tensor, "; ".join(notes) or None


def resize_table(kind: str, table: Tensor, before: ViTConfig, after: ViTConfig) -> tuple[Tensor, list[str]]:
    """Return a position table for the new grid, and notes about it."""
    notes = []
    old, new, method = before.table_grid, after.table_grid, after.position_resample
    if old != new:
        notes.append(f"grid {old[0]} x {old[1]} to {new[0]} x {new[1]}, {method}")
        if kind == "row_table":
            table = resample_rows(table, (old[0], 1), (new[0], 1), method)
        elif kind == "column_table":
            table = resample_rows(table, (1, old[1]), (1, new[1]), method)
        else:
            token_rows = int(before.has_class_token)  # stay as they are
            table = torch.cat([table[:token_rows], resample_rows(table[token_rows:], old, new, method)])
    if kind == "table" and before.has_class_token and not after.has_class_token:
        table = table[1:]
        notes.append("row of the class token removed")
    return table, notes


def resize_patches(weight: Tensor, before: ViTConfig, after: ViTConfig) -> tuple[Tensor, list[str]]:
    """Return the patch embedding for another patch size or number of channels, and notes about it."""
    notes, old, new = [], before.patch_hw, after.patch_hw
    kernel = weight.unflatten(1, (before.patch_channels, *old))
    if before.patch_channels != after.patch_channels and before.stem is None:
        kernel = change_channels(kernel, after.channels)
        notes.append(_channels_note(before, after))
    if old != new:
        kernel = resample_kernel(kernel, new)
        notes.append(f"patch {old[0]} x {old[1]} to {new[0]} x {new[1]} by the pseudo-inverse of resizing (FlexiViT)")
    return kernel.flatten(1), notes


def change_channels(kernel: Tensor, channels: int) -> Tensor:
    """Return a kernel that gives the same output for an image whose channels are all equal."""
    return kernel.sum(1, keepdim=True).expand(-1, channels, -1, -1) / channels


def _channels_note(before: ViTConfig | BiTConfig, after: ViTConfig | BiTConfig) -> str:
    return f"{before.channels} channels to {after.channels}: the sum of the kernels divided by {after.channels}"


def resample_kernel(kernel: Tensor, to: Grid) -> Tensor:
    """Return FlexiViT's kernel, whose products with resized patches are those of the old kernel with the originals.

    They are exact when enlarging, and a least-squares fit when shrinking.
    """
    down, across = (_pseudo_inverse(size, new) for size, new in zip(kernel.shape[-2:], to, strict=True))
    return torch.einsum("ij,kl,dcjl->dcik", down, across, kernel.double()).to(kernel.dtype)


def _pseudo_inverse(size: int, to: int) -> Tensor:
    units = torch.eye(size, dtype=torch.float64)[None]
    resized = F.interpolate(units, size=to, mode="linear", align_corners=False)[0]  # (size, to): each unit, resized
    return torch.linalg.pinv(resized)
