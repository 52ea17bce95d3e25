"""Tensors that change their shape on the way: positions to another grid, the patch kernel to another size or another
number of channels."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import WeightsError
from vitral.model.bit_config import BiTConfig
from vitral.model.config import Resample, ViTConfig
from vitral.model.network import Config
from vitral.model.positions import Grid, resample_rows

_FIRST_CONVOLUTIONS = ("patches.stem.root.weight", "patches.stem.0.0.weight", "root.weight")


def adapt(name: str, tensor: Tensor, held: Config, wanted: Config, shape: tuple[int, ...]) -> tuple[Tensor, str | None]:
    """The tensor as the wanted network needs it, and what was done to it (None: nothing)."""
    part = name.rpartition(".")[2]
    notes = []
    if name in _FIRST_CONVOLUTIONS and held.channels != wanted.channels:
        tensor, notes = change_channels(tensor, wanted.channels), [_channels_note(held, wanted)]
    elif isinstance(held, BiTConfig) or isinstance(wanted, BiTConfig):
        pass  # nothing else of a BiT depends on the size of the pictures
    elif name == "patches.project.weight":
        tensor, notes = adapt_patches(tensor, held, wanted)
    elif part in ("table", "row_table", "column_table"):
        if held.table_grid != wanted.table_grid:
            tensor = adapt_table(part, tensor, held, wanted)
            old, new = held.table_grid, wanted.table_grid
            notes.append(f"grid {old[0]} x {old[1]} to {new[0]} x {new[1]}, {wanted.position_resample}")
        if part == "table" and held.has_class_token and not wanted.has_class_token:
            tensor = tensor[1:]
            notes.append("without the row of the class token")
    if tuple(tensor.shape) != shape:
        raise WeightsError(
            f"{name} has the shape {tuple(tensor.shape)} in the file, and the asked network needs {shape}.",
            hint="Leave out the fields of the config that change it.",
        )
    return tensor, "; ".join(notes) or None


def adapt_table(part: str, table: Tensor, held: ViTConfig, wanted: ViTConfig) -> Tensor:
    (old_rows, old_columns), (rows, columns) = held.table_grid, wanted.table_grid
    method: Resample = wanted.position_resample
    if part == "row_table":
        return resample_rows(table, (old_rows, 1), (rows, 1), method)
    if part == "column_table":
        return resample_rows(table, (1, old_columns), (1, columns), method)
    ahead = int(held.has_class_token)  # the class token's row stays
    return torch.cat([table[:ahead], resample_rows(table[ahead:], held.table_grid, wanted.table_grid, method)])


def adapt_patches(weight: Tensor, held: ViTConfig, wanted: ViTConfig) -> tuple[Tensor, list[str]]:
    notes = []
    kernel = weight.unflatten(1, (held.patch_channels, *held.patch_hw))
    if held.patch_channels != wanted.patch_channels and held.stem is None:
        kernel = change_channels(kernel, wanted.channels)
        notes.append(_channels_note(held, wanted))
    if held.patch_hw != wanted.patch_hw:
        kernel = resample_kernel(kernel, wanted.patch_hw)
        old, new = held.patch_hw, wanted.patch_hw
        notes.append(f"patch {old[0]} x {old[1]} to {new[0]} x {new[1]} by the pseudo-inverse of resizing (FlexiViT)")
    return kernel.flatten(1), notes


def change_channels(kernel: Tensor, channels: int) -> Tensor:
    """The same answer as before for a picture whose channels are all alike."""
    return kernel.sum(1, keepdim=True).expand(-1, channels, -1, -1) / channels


def _channels_note(held: Config, wanted: Config) -> str:
    return f"{held.channels} channels to {wanted.channels}, each with the sum of the old kernels by {wanted.channels}"


def resample_kernel(kernel: Tensor, to: Grid) -> Tensor:
    """FlexiViT's resize: the kernel whose products with enlarged patches are those of the old one with the originals
    (exact when enlarging, least squares when shrinking)."""
    old = cast(Grid, tuple(kernel.shape[-2:]))
    down, across = (_pseudo_inverse(size, new) for size, new in zip(old, to, strict=True))
    return torch.einsum("ij,kl,dcjl->dcik", down, across, kernel.double()).to(kernel.dtype)


def _pseudo_inverse(size: int, to: int) -> Tensor:
    units = torch.eye(size, dtype=torch.float64)[None]
    resized = F.interpolate(units, size=to, mode="linear", align_corners=False)[0]  # (size, to): each unit, resized
    return torch.linalg.pinv(resized)
