"""Position embeddings of the paper's appendix D.4, and their resampling to other grids.

A table learned on one grid of patches works on any other: it is interpolated whenever the image has another size,
exactly as if the checkpoint had been loaded at that size. The cache holds interpolation matrices, never the table, so
training and loading weights cannot make it stale.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import product
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from vitral.errors import ConfigError
from vitral.model.config import Resample, ViTConfig
from vitral.model.layers import initialize, normal_
from vitral.model.packing import Group, Packing

Grid = tuple[int, int]
Sizes = ParamSpec("Sizes")
Constant = TypeVar("Constant")


def _cached(build: Callable[Sizes, Constant], entries: int = 64) -> Callable[Sizes, Constant]:
    """Cache constants, except under a compiler, an exporter or a memory estimator, whose tensors are not real."""
    cached = lru_cache(maxsize=entries)(build)

    def fetch(*sizes: Sizes.args, **named: Sizes.kwargs) -> Constant:
        if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
            return build(*sizes, **named)
        with torch.inference_mode(False):  # training cannot use a tensor that was created in inference mode
            return cached(*sizes, **named)  # type: ignore[arg-type]

    return fetch


class Positions(nn.Module):
    """Absolute positions, added to the tokens: learned, learned-2d or sincos-2d."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.kind = config.position
        self.grid = config.table_grid
        self.width = config.width
        self.resample: Resample = config.position_resample
        self.has_class_token, self.registers = config.has_class_token, config.registers
        rows, columns = self.grid
        if self.kind == "learned":  # the class token's row first, then the patches, row by row
            self.table = nn.Parameter(torch.empty(self.has_class_token + rows * columns, self.width))
        elif self.kind == "learned-2d":
            self.row_table = nn.Parameter(torch.empty(rows, self.width // 2))
            self.column_table = nn.Parameter(torch.empty(columns, self.width // 2))
            if self.has_class_token:
                self.class_row = nn.Parameter(torch.empty(1, self.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in self.parameters(recurse=False):
            initialize(table, normal_(std=0.02))

    def extra_repr(self) -> str:
        return f"{self.kind}, grid={self.grid}, resample={self.resample}"

    def forward(self, packing: Packing, like: Tensor) -> Float[Tensor, "N D"]:
        """Return one row per token of an image, or of the packed sequence, with the dtype and device of `like`."""
        rows = [self.rows(group.grid, like) for group in packing.groups]
        if len(rows) == 1:
            return rows[0]
        return torch.cat([table.repeat(group.images, 1) for table, group in zip(rows, packing.groups, strict=True)])

    def rows(self, grid: Grid, like: Tensor) -> Float[Tensor, "N D"]:
        """Return one row per token of one image: class token, registers, patches."""
        if self.kind == "learned" and grid == self.grid and not self.registers:
            return self.table
        patches = self.patch_rows(like)
        if grid != self.grid:
            patches = resample_rows(patches, self.grid, grid, self.resample)
        registers = like.new_zeros(self.registers, self.width)  # registers have no position
        return torch.cat([self.class_rows(like), registers, patches])

    def patch_rows(self, like: Tensor) -> Float[Tensor, "patches D"]:
        """Return one row per patch, on the grid of the table."""
        if self.kind == "learned":
            return self.table[int(self.has_class_token) :]
        rows, columns = self.grid
        if self.kind == "sincos-2d":
            return sincos_rows(rows, columns, self.width, like.device).to(like.dtype)
        x = self.column_table.expand(rows, -1, -1)  # X in the first half, Y in the second
        y = self.row_table[:, None].expand(-1, columns, -1)
        return torch.cat([x, y], dim=-1).flatten(0, 1)

    def class_rows(self, like: Tensor) -> Float[Tensor, "class D"]:
        """Return the row of the class token, or no row without one."""
        if self.kind == "learned":
            return self.table[: int(self.has_class_token)]
        if self.kind == "learned-2d" and self.has_class_token:
            return self.class_row
        return like.new_zeros(int(self.has_class_token), self.width)


def position_rows(modules: nn.Module, x: Tensor, packing: Packing, block: int) -> Tensor:
    """Return the rows that the module of a block (or the only one, which is shared) adds to the tokens."""
    if not isinstance(modules, nn.ModuleList):
        raise ConfigError(
            f"model.positions must be an nn.ModuleList (got {type(modules).__name__}).",
            hint="Set model.positions = nn.ModuleList([positions]).",
        )
    module = modules[0 if len(modules) == 1 else block]
    rows = module(packing, like=x)
    return rows if isinstance(module, Positions) else _check_rows(rows, x, packing, type(module).__name__)


def _check_rows(rows: object, x: Tensor, packing: Packing, name: str) -> Tensor:
    """Return the rows of a module that is not ours. Raise ConfigError if they do not match the tokens."""
    if isinstance(rows, Tensor) and all(
        row in (1, side) for row, side in zip(reversed(rows.shape), reversed(x.shape), strict=False)
    ):
        return rows
    shape = f"rows of shape {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
    grids = " and ".join(f"{group.grid[0]} x {group.grid[1]}" for group in packing.groups)
    extras = packing.groups[0].extras
    raise ConfigError(
        f"{name} returned {shape}; expected {tuple(x.shape[-2:])}: per image {extras} for class token and registers, "
        f"then one per patch ({grids}).",
        hint="Build the rows from packing.groups, which has the grid and the number of images of each size.",
    )


@_cached
def sincos_rows(rows: int, columns: int, width: int, device: torch.device) -> Float[Tensor, "patches D"]:
    """Return big_vision's fixed table: a quarter of the width each for sin x, cos x, sin y, cos y."""
    quarter = torch.arange(width // 4, dtype=torch.float32, device="cpu")
    omega = 10_000 ** (-quarter / max(1, width // 4 - 1))
    y, x = torch.meshgrid(torch.arange(rows, device="cpu"), torch.arange(columns, device="cpu"), indexing="ij")
    x, y = x.flatten()[:, None] * omega, y.flatten()[:, None] * omega
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).to(device)


def resample_rows(
    table: Float[Tensor, "patches D"], grid: Grid, to: Grid, method: Resample
) -> Float[Tensor, "other_patches D"]:
    """Resample a table with one row per patch from one grid to another, in float32 even under autocast."""
    down = interpolation_matrix(grid[0], to[0], method, table.device)
    across = interpolation_matrix(grid[1], to[1], method, table.device)
    # The meta device does not support autocast.
    with nullcontext() if table.is_meta else torch.autocast(table.device.type, enabled=False):
        resampled = torch.einsum("ij,kl,jld->ikd", down, across, table.float().unflatten(0, grid))
    return resampled.flatten(0, 1).to(table.dtype)


@_cached
def interpolation_matrix(size: int, to: int, method: Resample, device: torch.device) -> Float[Tensor, "to size"]:
    """Return the matrix that interpolates along one axis: F.interpolate of each unit vector. All methods are separable.

    It is built on the CPU because not every device supports every method."""
    # One channel per unit vector, as a map two columns wide: torch's antialiasing fails on maps of one column.
    units = torch.eye(size, dtype=torch.float32, device="cpu")[None, :, :, None].repeat(1, 1, 1, 2)
    mode, corners = "bilinear" if method.startswith("bilinear") else "bicubic", method.endswith("corners")
    antialias = method == "bicubic-antialias"
    rows = F.interpolate(units, size=(to, 2), mode=mode, align_corners=corners, antialias=antialias)
    return rows[0, :, :, 0].T.contiguous().to(device)


class RelativePositions(nn.Module):
    """Relative attention of D.4: every offset between two patches has an embedding, which acts as an extra key.

    Its dot product with the content query is added to the attention logits. Offsets are one-dimensional as in the
    paper: along the patches, row by row. Class token and registers have no offset but two rows each: one as a key, one
    as a query of the patches. On another grid, distances are scaled to the trained grid and interpolated between the
    nearest offsets.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.grid, self.heads, self.extras = config.table_grid, config.heads, config.extra_tokens
        offsets = 2 * self.grid[0] * self.grid[1] - 1
        self.offset_rows = nn.Parameter(torch.empty(offsets, config.width))
        self.extra_rows = nn.Parameter(torch.empty(2 * self.extras, config.width)) if self.extras else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for rows in self.parameters(recurse=False):
            initialize(rows, normal_(std=0.02))

    def forward(self, query: Float[Tensor, "B H N E"], group: Group) -> Float[Tensor, "B H N N"]:
        rows = self.offset_rows
        if group.grid != self.grid:
            corners, weights = _offset_corners(self.grid, group.grid, query.device)
            rows = (rows[corners] * weights[..., None].to(rows.dtype)).sum(0)
        if self.extra_rows is not None:
            rows = torch.cat([rows, self.extra_rows])
        keys = torch.unflatten(rows, -1, (self.heads, -1)).transpose(0, 1)  # (heads, rows, head_dim)
        logits = (query * query.shape[-1] ** -0.5) @ keys.transpose(-2, -1)  # (B, heads, N, rows)
        row_numbers = _relative_rows(group.grid, group.extras, group.grid == self.grid, query.device)
        return logits.gather(-1, row_numbers.expand(*logits.shape[:2], -1, -1))


@partial(_cached, entries=2)  # large: grows with the square of the number of patches
def _relative_rows(grid: Grid, extras: int, one_dimensional: bool, device: torch.device) -> Tensor:
    """Return (N, N): the row of the relative table for each query and key."""
    rows, columns = grid
    patch = torch.arange(rows * columns, device="cpu")
    if one_dimensional:
        pairs, offsets = patch[:, None] - patch + rows * columns - 1, 2 * rows * columns - 1
    else:
        y, x = patch // columns, patch % columns
        pairs = (y[:, None] - y + rows - 1) * (2 * columns - 1) + x[:, None] - x + columns - 1
        offsets = (2 * rows - 1) * (2 * columns - 1)
    table = torch.empty(extras + len(patch), extras + len(patch), dtype=torch.long, device="cpu")
    table[extras:, extras:] = pairs
    table[:, :extras] = offsets + torch.arange(extras, device="cpu")
    table[:extras, extras:] = offsets + extras + torch.arange(extras, device="cpu")[:, None]
    return table.to(device)


@_cached
def _offset_corners(trained: Grid, grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, for each two-dimensional offset of a grid, its four nearest offsets of the trained grid and weights."""
    neighbors: list[tuple[tuple[Tensor, Tensor], ...]] = []  # per axis: the offsets below and above, with weights
    for old, new in zip(trained, grid, strict=True):
        scale = (old - 1) / (new - 1) if new > 1 else 0.0
        offset = torch.arange(1 - new, new, dtype=torch.float64, device="cpu") * scale
        low = offset.floor().long().clamp(min=1 - old)  # rounding may go below the first offset
        neighbors.append(((low, 1 - (offset - low)), ((low + 1).clamp(max=old - 1), offset - low)))
    center, columns = trained[0] * trained[1] - 1, trained[1]
    corners: list[Tensor] = []
    weights: list[Tensor] = []
    for (dy, wy), (dx, wx) in product(*neighbors):
        corners.append((dy[:, None] * columns + dx + center).flatten())
        weights.append((wy[:, None] * wx).flatten())
    return torch.stack(corners).to(device), torch.stack(weights).float().to(device)
