"""Where a patch sits: the position embeddings of the paper's appendix D.4, and how they reach another grid.

A table learnt on one grid of patches serves any other: it is interpolated whenever the image has another size,
exactly as if the checkpoint had been loaded at that size. What is cached is the interpolation, never the table, so
training and weight loading need no care.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from vitral.model.config import Resample, ViTConfig
from vitral.model.initialize import initialize, normal_
from vitral.model.packing import Group, Packing

Grid = tuple[int, int]
Sizes = ParamSpec("Sizes")
Constant = TypeVar("Constant")


def _cached(entries: int) -> Callable[[Callable[Sizes, Constant]], Callable[Sizes, Constant]]:
    """Caches constants that depend on sizes alone.

    A compiler, exporter or memory estimator that is watching gets a copy of its own: what it would put into the cache
    is no real tensor."""

    def wrap(build: Callable[Sizes, Constant]) -> Callable[Sizes, Constant]:
        stored = lru_cache(maxsize=entries)(build)

        def fetch(*sizes: Sizes.args, **named: Sizes.kwargs) -> Constant:
            if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
                return build(*sizes, **named)
            with torch.inference_mode(False):  # else a constant made while predicting could not be used in training
                return stored(*sizes, **named)  # type: ignore[arg-type]

        return fetch

    return wrap


class Positions(nn.Module):
    """Absolute positions, to be added to the tokens: learned, learned-2d or sincos-2d."""

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
        """A row for each token: of one image for a batch, of the whole sequence when packed. Dtype and device are
        those of ``like``."""
        rows = [self.rows(group.grid, like) for group in packing.groups]
        if len(rows) == 1:
            return rows[0]
        return torch.cat([part.repeat(group.images, 1) for part, group in zip(rows, packing.groups, strict=True)])

    def rows(self, grid: Grid, like: Tensor) -> Float[Tensor, "N D"]:
        """A row for each token of one image: class token, registers, patches."""
        if self.kind == "learned" and grid == self.grid and not self.registers:
            return self.table
        patches = self.patch_rows(like)
        if grid != self.grid:
            patches = resample_rows(patches, self.grid, grid, self.resample)
        registers = like.new_zeros(self.registers, self.width)  # registers are nowhere
        return torch.cat([self.class_rows(like), registers, patches])

    def patch_rows(self, like: Tensor) -> Float[Tensor, "patches D"]:
        """The rows of the patches on the grid that they were learnt on."""
        if self.kind == "learned":
            return self.table[int(self.has_class_token) :]
        rows, columns = self.grid
        if self.kind == "sincos-2d":
            return sincos_rows(rows, columns, self.width, like.device).to(like.dtype)
        x = self.column_table.expand(rows, -1, -1)  # X in the first half, Y in the second
        y = self.row_table[:, None].expand(-1, columns, -1)
        return torch.cat([x, y], dim=-1).flatten(0, 1)

    def class_rows(self, like: Tensor) -> Float[Tensor, "class D"]:
        if self.kind == "learned":
            return self.table[: int(self.has_class_token)]
        if self.kind == "learned-2d" and self.has_class_token:
            return self.class_row
        return like.new_zeros(int(self.has_class_token), self.width)


@_cached(entries=64)
def sincos_rows(rows: int, columns: int, width: int, device: torch.device) -> Float[Tensor, "patches D"]:
    """The fixed waves of big_vision: a quarter of the width each for sin x, cos x, sin y, cos y."""
    quarter = torch.arange(width // 4, dtype=torch.float32, device="cpu")
    omega = 10_000 ** (-quarter / max(1, width // 4 - 1))
    y, x = torch.meshgrid(torch.arange(rows, device="cpu"), torch.arange(columns, device="cpu"), indexing="ij")
    x, y = x.flatten()[:, None] * omega, y.flatten()[:, None] * omega
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).to(device)


def resample_rows(
    table: Float[Tensor, "patches D"], grid: Grid, to: Grid, method: Resample
) -> Float[Tensor, "other_patches D"]:
    """A table of one row a patch, from one grid to another; in float32, whatever precision surrounds it."""
    down = _interpolation(grid[0], to[0], method, table.device)
    across = _interpolation(grid[1], to[1], method, table.device)
    # The meta device, which only counts, knows no autocast.
    with nullcontext() if table.is_meta else torch.autocast(table.device.type, enabled=False):
        moved = torch.einsum("ij,kl,jld->ikd", down, across, table.float().unflatten(0, grid))
    return moved.flatten(0, 1).to(table.dtype)


@_cached(entries=64)
def _interpolation(size: int, to: int, method: Resample, device: torch.device) -> Float[Tensor, "to size"]:
    """The matrix that interpolates along one side: what F.interpolate makes of each unit vector.

    Every method here treats rows and columns one after the other, so two such matrices are the whole resampling.
    They are made on the CPU because not every device has every method.
    """
    # A channel for each unit vector, as a map two columns wide: on maps of one column torch's antialiasing goes wrong.
    units = torch.eye(size, dtype=torch.float32, device="cpu")[None, :, :, None].repeat(1, 1, 1, 2)
    corners = method.endswith("corners")
    moved = F.interpolate(
        units,
        size=(to, 2),
        mode="bilinear" if method.startswith("bilinear") else "bicubic",
        align_corners=corners,
        antialias=method == "bicubic-antialias",
    )
    return moved[0, :, :, 0].T.contiguous().to(device)


class RelativePositions(nn.Module):
    """Relative attention of D.4: every offset between two patches has an embedding, which serves as one more key.

    The content query meets it in a dot product, and the result is added to the attention logits. Offsets are those of
    the paper, one-dimensional: along the patches in reading order. Class token and registers stand at no offset and
    have two rows each: one as a key, one for the patches that they look at. On another grid than the trained one,
    distances are scaled to it and looked up between the nearest whole offsets.
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
        keys = rows.unflatten(-1, (self.heads, -1)).transpose(0, 1)  # (heads, rows, head_dim)
        logits = (query * query.shape[-1] ** -0.5) @ keys.transpose(-2, -1)  # (B, heads, N, rows)
        which = _row_of_each_pair(group.grid, group.extras, group.grid == self.grid, query.device)
        return logits.gather(-1, which.expand(*logits.shape[:2], -1, -1))


@_cached(entries=2)  # it grows with the square of the patches
def _row_of_each_pair(grid: Grid, extras: int, one_dimensional: bool, device: torch.device) -> Tensor:
    """(N, N): the row of the relative table for each query and key, extras ahead of the patches."""
    rows, columns = grid
    place = torch.arange(rows * columns, device="cpu")
    if one_dimensional:
        pairs, offsets = place[:, None] - place + rows * columns - 1, 2 * rows * columns - 1
    else:
        y, x = place // columns, place % columns
        pairs = (y[:, None] - y + rows - 1) * (2 * columns - 1) + x[:, None] - x + columns - 1
        offsets = (2 * rows - 1) * (2 * columns - 1)
    table = torch.empty(extras + len(place), extras + len(place), dtype=torch.long, device="cpu")
    table[extras:, extras:] = pairs
    table[:, :extras] = offsets + torch.arange(extras, device="cpu")
    table[:extras, extras:] = offsets + extras + torch.arange(extras, device="cpu")[:, None]
    return table.to(device)


@_cached(entries=64)
def _offset_corners(trained: Grid, grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each two-dimensional offset of a grid: its four nearest offsets of the trained grid, and their weights."""
    low, high, part = [], [], []
    for old, new in zip(trained, grid, strict=True):
        scale = (old - 1) / (new - 1) if new > 1 else 0.0
        offset = torch.arange(1 - new, new, dtype=torch.float64, device="cpu") * scale
        whole = offset.floor().long().clamp(min=1 - old)  # rounding may go below the first
        low.append(whole)
        high.append((whole + 1).clamp(max=old - 1))
        part.append(offset - whole)
    centre, columns = trained[0] * trained[1] - 1, trained[1]
    corners, weights = [], []
    for dy, wy in ((low[0], 1 - part[0]), (high[0], part[0])):
        for dx, wx in ((low[1], 1 - part[1]), (high[1], part[1])):
            corners.append((dy[:, None] * columns + dx + centre).flatten())
            weights.append((wy[:, None] * wx).flatten())
    return torch.stack(corners).to(device), torch.stack(weights).float().to(device)
