"""Let an exported file take images of many sizes, with the positions that the model has at each of them.

Interpolation is separable: one matrix per axis resamples a position table. The graph of a file cannot compute these
matrices by every method, so it stores one for each number of patches, and the size of the image chooses two of them.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitral.errors import ConfigError
from vitral.inference.image_sizes import SizeRange, as_text
from vitral.model.bit_config import BiTConfig
from vitral.model.network import Config, Network
from vitral.model.packing import Packing
from vitral.model.positions import Grid, Positions, interpolation_matrix, sincos_rows
from vitral.model.vit import ViT
from vitral.preprocess import MAX_SIDE, Preprocess
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.load import load

CPU = torch.device("cpu")
MIN_PATCHES = 64
"""Patches per side that every file takes. Files for large images take twice their own number."""
BIT_CELL = (32, 32)
"""A BiT halves these pixels five times, to one cell of its last feature map."""


# ---- which sizes ----


def choose_sizes(checkpoint: Checkpoint, precision: str, *, from_bytes: bool) -> SizeRange:
    """Return the sizes that the file takes. Raise ConfigError with the reason if it can only take one."""
    config, preprocess = checkpoint.model.config, checkpoint.preprocess
    if from_bytes:
        hint = "Drop --from-bytes or --dynamic-size."
        raise ConfigError("dynamic_size has no effect with from_bytes, which resizes images to one size.", hint=hint)
    if precision == "int8":
        problem = "int8 is calibrated for one size, so it does not fit dynamic_size."
        raise ConfigError(problem, hint="Drop --dynamic-size, or use another --precision.")
    is_bit = isinstance(config, BiTConfig)
    cell = BIT_CELL if is_bit else (config.patch_hw[0] * config.shrink, config.patch_hw[1] * config.shrink)
    step = (1, 1) if is_bit else cell  # convolutions take any size
    height, width = (
        min(max(MIN_PATCHES * patch, 2 * side), MAX_SIDE) // patch * patch
        for side, patch in zip(preprocess.size, cell, strict=True)
    )
    sizes = SizeRange(multiple_of=step, maximum=(height, width))
    if preprocess.size not in sizes:
        problem = f"dynamic_size needs an image size that is a multiple of {as_text(step)}"
        hint = f"Pass --image-size {'x'.join(map(str, sizes.nearest(preprocess.size)))}."
        raise ConfigError(f"{problem} (got {as_text(preprocess.size)}).", hint=hint)
    if reason := _find_obstacle(checkpoint.model, preprocess, step):
        raise ConfigError(f"dynamic_size does not fit {reason}.", hint="Drop --dynamic-size to export one size.")
    return sizes


def _find_obstacle(model: Network, preprocess: Preprocess, step: Grid) -> str | None:
    """Return the part of a model that one graph cannot compute at several sizes, with the reason, or None."""
    config = model.config
    if not isinstance(model, ViT) or isinstance(config, BiTConfig):
        return None
    if config.position == "relative":
        return "position='relative', whose offsets need other indices at each size"
    if config.attention == "axial":
        return "attention='axial', which repeats the class token for each row and column of patches"
    if config.merge:
        return f"merge={config.merge}, because the size limits how many tokens a block can merge"
    if preprocess.resize == "native" and config.step_hw != step:
        return "resize='native' with a stem, which takes any height and width"
    custom = next((module for module in model.positions if not isinstance(module, Positions)), None)
    return None if custom is None else f"{type(custom).__name__}, a position module from outside the package"


# ---- positions in the graph ----


def make_dynamic(model: Network, preprocess: Preprocess, sizes: SizeRange) -> None:
    """Replace the positions of a network by modules that can be traced for all the sizes."""
    if not isinstance(model, ViT) or not model.positions:
        return
    limit = model.config.grid(*sizes.maximum)
    first = model.positions[0]
    assert isinstance(first, Positions)
    down, across = (MatrixBank(side, most, first) for side, most in zip(first.grid, limit, strict=True))
    if first.grid[0] == first.grid[1] and limit[0] == limit[1]:
        across = down
    computes = computes_waves(model.config, preprocess)
    for number, positions in enumerate(model.positions):
        assert isinstance(positions, Positions)
        patches = Waves(limit, positions.width) if computes else Resampled(positions, down, across)
        model.positions[number] = DynamicPositions(positions, patches)


def computes_waves(config: Config, preprocess: Preprocess) -> bool:
    """Return whether `vitral.load` computes the positions of another size: sin-cos without a grid of its own.

    Images that keep their size are resampled by the network itself, which never computes other positions.
    """
    is_fixed = not isinstance(config, BiTConfig) and config.position == "sincos-2d" and config.position_grid is None
    return is_fixed and preprocess.resize != "native"


class DynamicPositions(nn.Module):
    """Positions of a batch of images of one size: class token and registers, then the patches."""

    extras: Tensor

    def __init__(self, positions: Positions, patches: nn.Module):
        super().__init__()
        like = torch.zeros(0)
        registers = torch.zeros(positions.registers, positions.width)
        self.register_buffer("extras", torch.cat([positions.class_rows(like).detach(), registers]))
        self.patches = patches

    def forward(self, packing: Packing, like: Tensor) -> Float[Tensor, "N D"]:
        (group,) = packing.groups
        return torch.cat([self.extras, self.patches(group.grid)])


class Resampled(nn.Module):
    """A position table, resampled to the grid of the image."""

    table: Tensor

    def __init__(self, positions: Positions, down: "MatrixBank", across: "MatrixBank"):
        super().__init__()
        table = torch.unflatten(positions.patch_rows(torch.zeros(0)).detach(), 0, positions.grid)
        self.register_buffer("table", table.clone())
        self.down, self.across = down, across

    def forward(self, grid: Grid) -> Float[Tensor, "patches D"]:
        columns = self.down(grid[0]) @ self.table.flatten(1)  # (rows, table's columns * D)
        rows = torch.unflatten(columns, 1, self.table.shape[1:])
        return (self.across(grid[1]) @ rows).flatten(0, 1)  # (rows, columns, D) -> (N, D)


class MatrixBank(nn.Module):
    """The interpolation matrices of one axis, from the side of a table to every side up to a limit."""

    matrices: Tensor

    def __init__(self, side: int, limit: int, positions: Positions):
        super().__init__()
        matrices = torch.zeros(limit, limit, side)
        for to in range(1, limit + 1):
            matrices[to - 1, :to] = interpolation_matrix(side, to, positions.resample, CPU)
        self.register_buffer("matrices", matrices)

    def forward(self, to: int) -> Float[Tensor, "to side"]:
        return self.matrices[to - 1, :to]


class Waves(nn.Module):
    """The sines and cosines of the grid of the image, cut out of those of the largest grid."""

    across: Tensor
    down: Tensor

    def __init__(self, limit: Grid, width: int):
        super().__init__()
        table = torch.unflatten(sincos_rows(*limit, width, CPU), 0, limit)
        self.register_buffer("across", table[0, :, : width // 2].clone())  # the first half depends on the column alone
        self.register_buffer("down", table[:, 0, width // 2 :].clone())

    def forward(self, grid: Grid) -> Float[Tensor, "patches D"]:
        rows, columns = grid
        x = self.across[:columns].expand(rows, -1, -1)
        y = self.down[:rows, None].expand(-1, columns, -1)
        return torch.cat([x, y], dim=-1).flatten(0, 1)


# ---- comparison ----


def example_size(preprocess: Preprocess, sizes: SizeRange) -> Grid:
    """Return the size of images to trace with, whose sides differ in patches."""
    rows = max(4, preprocess.size[0] // sizes.multiple_of[0])
    return rows * sizes.multiple_of[0], (rows + 1) * sizes.multiple_of[1]


def other_sizes(preprocess: Preprocess, sizes: SizeRange) -> list[Grid]:
    """Return a smaller, a larger and a non-square size to compare at, besides that of the preprocessing."""
    rows, columns = (side // step for side, step in zip(preprocess.size, sizes.multiple_of, strict=True))
    small, large = (max(2, rows // 2), max(2, columns // 2)), (rows + rows // 2 + 1, columns + columns // 2 + 1)
    step = sizes.multiple_of
    chosen = [(count[0] * step[0], count[1] * step[1]) for count in (small, large, (small[0], large[1]))]
    return [size for size in chosen if size in sizes and size != preprocess.size]


def at_size(model: Network, preprocess: Preprocess, size: Grid) -> Network:
    """Return the model as `vitral.load` loads it for a size. Its other weights are the same memory."""
    config = model.config
    if config.image_hw == size or preprocess.resize == "native" or isinstance(config, BiTConfig):
        return model
    return load(model.state_dict(), config=config, image_size=size).model
