"""Reduce attention to tables that a page can carry: fewer layers, coarser grids, 8 bits."""

import zlib
from collections.abc import Sequence
from math import ceil

import numpy as np
import torch
from torch import Tensor

from vitral.inspection.results import AttentionTable
from vitral.inspection.traversal import evaluating
from vitral.model.config import ViTConfig
from vitral.model.recording import observe_attention
from vitral.model.vit import ViT

BUDGETS = (40_000_000, 15_000_000)
"""Bytes of all tables together. The first budget counts on compression, the second fits without."""
MAX_COMPRESSED = 17_000_000
"""Base64 adds a third."""
STEP = 4
"""Values are multiples of it, which compresses better than all 256 and looks the same."""
MAX_CELLS, MIN_LAYERS = (576, 256, 144, 64), 6
Grid = tuple[int, int]


def choose_reduction(config: ViTConfig, grids: Sequence[Grid], total: int) -> tuple[list[int], int]:
    """Return the layers and the largest number of grid cells whose tables take at most `total` bytes.

    A finer grid is preferred as long as at least six layers fit. The first and the last layer are always among them."""
    budget, depth = total / len(grids), config.blocks
    layers, cells = 1, MAX_CELLS[-1]
    for cells in MAX_CELLS:
        sizes = [coarse_grid(grid, cells) for grid in grids]
        largest = max((config.extra_tokens + rows * columns) * rows * columns for rows, columns in sizes)
        layers = min(depth, int(budget / (config.heads * largest)))
        if layers >= min(depth, MIN_LAYERS):
            break
    layers = max(1, layers)
    chosen = {round(index * (depth - 1) / max(1, layers - 1)) for index in range(layers)} if layers > 1 else {depth - 1}
    return sorted(chosen), cells


def coarse_grid(grid: Grid, cells: int) -> Grid:
    """Return a grid of at most so many cells, each of whole patches."""
    factor = 1
    while ceil(grid[0] / factor) * ceil(grid[1] / factor) > cells:
        factor += 1
    return ceil(grid[0] / factor), ceil(grid[1] / factor)


@torch.no_grad()
def tabulate_attention(model: ViT, images: Sequence[Tensor]) -> list[AttentionTable]:
    """Return the attention of every image, for the layers and on the grid that a page has room for."""
    grids = [model.config.grid(image.shape[1], image.shape[2]) for image in images]
    tables: list[AttentionTable] = []
    for budget in BUDGETS:
        layers, cells = choose_reduction(model.config, grids, budget)
        with evaluating(model):
            tables = [
                _tabulate(model, image, layers, cell_matrix(grid, coarse_grid(grid, cells)), coarse_grid(grid, cells))
                for image, grid in zip(images, grids, strict=True)
            ]
        if sum(len(zlib.compress(table.values.tobytes(), 1)) for table in tables) <= MAX_COMPRESSED:
            break
    return tables


def _tabulate(model: ViT, image: Tensor, layers: list[int], matrix: Tensor, grid: Grid) -> AttentionTable:
    """Return the attention of one image; the matrix assigns its patches to the cells of a grid."""
    rows: list[tuple[np.ndarray, ...]] = []
    extras, matrix = model.config.extra_tokens, matrix.to(image.device)
    with observe_attention(model, lambda _, weights, __: rows.append(_reduce(weights[0][0], extras, matrix)), layers):
        model.encode(*model.embed(image[None]))
    values, maxima, on_patches = (np.stack(arrays) for arrays in zip(*rows, strict=True))
    registers = [f"register {number + 1}" for number in range(model.config.registers)]
    return AttentionTable(
        grid=grid,
        extras=(*["class token"] * model.config.has_class_token, *registers),
        layers=tuple(layers),
        values=values,
        maxima=maxima,
        on_patches=on_patches,
    )


def cell_matrix(grid: Grid, coarse: Grid) -> Tensor:
    """Return (cells, patches): 1 where a patch belongs to a cell of the coarser grid."""
    rows, columns = (
        torch.nn.functional.one_hot((torch.arange(size) + 0.5).mul(to / size).long(), to).T.float()
        for size, to in zip(grid, coarse, strict=True)
    )
    return torch.kron(rows, columns)


def _reduce(weights: Tensor, extras: int, matrix: Tensor) -> tuple[np.ndarray, ...]:
    """Return 8-bit values, row maxima and row sums of (heads, N, N) attention: mean of queries, sum of keys."""
    by_cell = weights[:, :, extras:].float() @ matrix.T
    queries = (matrix / matrix.sum(dim=1, keepdim=True)) @ by_cell[:, extras:]
    weights = torch.cat([by_cell[:, :extras], queries], dim=1)
    maxima, sums = weights.amax(dim=-1), weights.sum(dim=-1)
    scaled = (weights / maxima[..., None].clamp(min=1e-12)).sqrt() * 255
    values = (scaled / STEP).round().mul(STEP).clamp(max=255).byte()
    return values.cpu().numpy(), maxima.cpu().numpy(), sums.cpu().numpy()
