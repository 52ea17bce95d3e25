"""The cost of a network: parameters, floating-point operations and memory, computed from its config alone.

No network is built and torch is not imported, so `vitral models` runs instantly. Operations are counted as in the
paper: convolutions, matrix products and attention products, two per multiply-add; norms, activations and additions
are omitted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from vitral.model.bit_config import BiTConfig
from vitral.model.config import ResNetStem, ViTConfig

FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The cost of a forward pass per image, and the memory for training. Memory is in bytes, in float32."""

    parameters: int
    tokens: int
    forward_flops: int
    inference_bytes: int
    """Parameters, and the peak of activations for one image."""
    activation_bytes: int
    """Activations that the backward pass needs per image, without dropout and gradient checkpointing. Relative
    positions and axial attention need up to half as much again, ReLU a quarter less. Merging tokens needs less."""

    def training_bytes(self, batch_size: int) -> int:
        """Return the memory of a training step: parameters, gradients, the two moments of Adam, and activations."""
        return 4 * self.parameters * FLOAT_BYTES + batch_size * self.activation_bytes


def count_cost(config: ViTConfig | BiTConfig, image_size: tuple[int, int] | None = None) -> Cost:
    """Return the cost at the config's image size, or at another (height, width)."""
    image_size = image_size or config.image_hw
    if isinstance(config, BiTConfig):
        return _count_bit_cost(config, image_size)
    grid = config.grid(*image_size)
    patches, width = grid[0] * grid[1], config.width
    tokens = config.extra_tokens + patches
    stem, matrices = list(_stem_layers(config, image_size)), list(_matrices(config, patches))
    parameters = _count_parameters(config, stem, matrices)
    flops = sum(layer.flops for layer in (*stem, *matrices)) + _attention_flops(config, grid)
    flops += _merging_flops(config, tokens)
    if config.pool == "map":
        flops += 4 * patches * width
    mlp_activations = tokens * (2 * width + 2 * config.mlp_width)  # the sum, its norm, hidden before and after
    alive = max([mlp_activations, *(layer.kept for layer in stem)])
    # Two sums, two norms with statistics, q, k, v, the mixed values with their normalizer, hidden before and after.
    block = 8 * width + 2 * config.mlp_width + 4 + config.heads + (0 if config.layer_scale is None else 2 * width)
    kept = tokens * (config.blocks * block + width) + patches * matrices[0].inputs + sum(layer.kept for layer in stem)
    if isinstance(config.stem, ResNetStem):  # max-pooling pads a copy and keeps the index of each maximum
        kept += 3 * stem[0].kept // 4
    return Cost(
        parameters=parameters,
        tokens=tokens,
        forward_flops=flops,
        inference_bytes=(parameters + alive) * FLOAT_BYTES,
        activation_bytes=kept * FLOAT_BYTES,
    )


def _count_bit_cost(config: BiTConfig, image_size: tuple[int, int]) -> Cost:
    """Return the cost of a BiT, whose norms come before the convolutions and whose root has none."""
    root, *units = layers = list(_resnet_layers(config, config.channels, image_size))
    height, width = image_size
    rows, columns = config.grid(height, width)
    # The backward pass needs each normalized map twice: before the norm and after the ReLU.
    pooled = root._replace(positions=_cells(image_size, 2))
    normalized = [pooled, *(layer for layer in units if not layer.is_shortcut)]
    padded = root.outputs * (-(-height // 2) + 2) * (-(-width // 2) + 2)
    maxima = root.kept // 4  # the index of each
    kept = config.channels * height * width + padded + maxima + sum(layer.kept for layer in normalized)
    parameters = sum(layer.weights for layer in layers) + 2 * sum(layer.outputs for layer in normalized)
    parameters += (config.width + 1) * config.num_classes
    return Cost(
        parameters=parameters,
        tokens=rows * columns,
        forward_flops=sum(layer.flops for layer in layers) + 2 * config.width * config.num_classes,
        inference_bytes=(parameters + max(layer.kept for layer in layers)) * FLOAT_BYTES,
        activation_bytes=kept * FLOAT_BYTES,
    )


class _Layer(NamedTuple):
    """A linear layer, or a convolution without bias that a norm follows; `copies` of it."""

    inputs: int
    outputs: int
    positions: int
    """Rows that a linear layer processes per image, or pixels of a convolution's output."""
    kernel: int = 1
    copies: int = 1
    is_shortcut: bool = False

    @property
    def weights(self) -> int:
        return self.copies * self.inputs * self.outputs * self.kernel**2

    @property
    def flops(self) -> int:
        return 2 * self.weights * self.positions

    @property
    def kept(self) -> int:
        """Return a convolution's activations for the backward pass: its output for the norm, and that of the ReLU."""
        return 2 * self.outputs * self.positions


def _matrices(config: ViTConfig, patches: int) -> Iterator[_Layer]:
    width, mlp_width, tokens = config.width, config.mlp_width, config.extra_tokens + patches
    patch_h, patch_w = config.patch_hw
    yield _Layer(config.patch_channels * patch_h * patch_w, width, patches)
    for entering, leaving in pairwise(_tokens_by_block(config, tokens)):  # merging is between attention and MLP
        yield _Layer(width, 3 * width, entering)
        yield _Layer(width, width, entering)
        yield _Layer(width, mlp_width, leaving)
        yield _Layer(mlp_width, width, leaving)
    if config.pool == "map":
        yield _Layer(width, width, 1, copies=2)
        yield _Layer(width, 2 * width, patches)
        yield _Layer(width, mlp_width, 1)
        yield _Layer(mlp_width, width, 1)
    pooled = tokens if config.pool == "none" else 1
    if config.representation is not None:
        yield _Layer(config.pooled_width, config.representation, pooled)
    if config.num_classes:
        yield _Layer(config.representation or config.pooled_width, config.num_classes, pooled)


def _tokens_by_block(config: ViTConfig, tokens: int) -> list[int]:
    """Return the tokens that enter each block, and those that leave the last one."""
    counts = [tokens]
    for _ in range(config.blocks):
        counts.append(counts[-1] - min(config.merge, (counts[-1] - config.extra_tokens) // 2))
    return counts


def _attention_flops(config: ViTConfig, grid: tuple[int, int]) -> int:
    """Return the operations of all blocks: queries by keys, weights by values."""
    (rows, columns), extras = grid, config.extra_tokens
    tokens = extras + rows * columns
    pairs = sum(count**2 for count in _tokens_by_block(config, tokens)[:-1])
    if config.attention == "axial":  # half of the blocks attend along rows, half along columns
        pairs = config.depth * (2 * extras * tokens + rows * columns * (2 * extras + rows + columns))
    relative = 2 * tokens * relative_rows(config, grid) if config.position == "relative" else 0
    return config.width * (4 * pairs + config.blocks * relative)


def _merging_flops(config: ViTConfig, tokens: int) -> int:
    """Return the operations of all blocks to compare the keys of both sets, and to add tokens and their sizes."""
    flops = 0
    for entering, leaving in pairwise(_tokens_by_block(config, tokens)):
        patches, merged = entering - config.extra_tokens, entering - leaving
        first = (patches + 1 - config.extra_tokens % 2) // 2
        if merged:
            flops += 2 * (patches - first) * (first * config.head_dim + merged * (config.width + 1))
    return flops


def relative_rows(config: ViTConfig, grid: tuple[int, int]) -> int:
    """Return the rows of a relative table: one-dimensional offsets on the trained grid, two-dimensional elsewhere."""
    rows, columns = grid
    offsets = 2 * rows * columns - 1 if grid == config.table_grid else (2 * rows - 1) * (2 * columns - 1)
    return offsets + 2 * config.extra_tokens


def _count_parameters(config: ViTConfig, stem: list[_Layer], matrices: list[_Layer]) -> int:
    width, (rows, columns) = config.width, config.table_grid
    count = sum(layer.weights + layer.copies * layer.outputs for layer in matrices)  # with a bias
    count += sum(layer.weights + 2 * layer.outputs for layer in stem)  # with a norm
    table = {"learned": rows * columns * width, "learned-2d": (rows + columns) * width // 2}.get(config.position)
    if table is not None:
        count += config.position_tables * (table + config.has_class_token * width)
    per_block = 4  # two norms
    if config.layer_scale is not None:
        per_block += 2
    if config.position == "relative":
        per_block += relative_rows(config, config.table_grid)
    pool = 3 if config.pool == "map" else 0  # probe and norm
    return count + width * (config.extra_tokens + config.blocks * per_block + 2 + pool)  # 2: the final norm


def _stem_layers(config: ViTConfig, image_size: tuple[int, int]) -> Iterator[_Layer]:
    if isinstance(config.stem, ResNetStem):
        yield from _resnet_layers(config.stem, config.channels, image_size)
    elif config.stem is not None:
        widths = (config.channels, *config.stem.widths)
        for halvings, (inputs, outputs) in enumerate(pairwise(widths), start=1):
            yield _Layer(inputs, outputs, _cells(image_size, halvings), kernel=3)


def _resnet_layers(stem: ResNetStem | BiTConfig, channels: int, image_size: tuple[int, int]) -> Iterator[_Layer]:
    inputs = stem.root_width
    yield _Layer(channels, inputs, _cells(image_size, 1), kernel=7)
    cells = _cells(image_size, 2)  # after the pooling
    for stage, units in enumerate(stem.stages):
        middle = stem.root_width * 2**stage
        for unit in range(units):
            yield _Layer(inputs, middle, cells)
            cells = _cells(image_size, 2 + stage)  # the first 3x3 convolution and the shortcut halve the size
            yield _Layer(middle, middle, cells, kernel=3)
            yield _Layer(middle, 4 * middle, cells)
            if unit == 0:
                yield _Layer(inputs, 4 * middle, cells, is_shortcut=True)
            inputs = 4 * middle


def _cells(image_size: tuple[int, int], halvings: int) -> int:
    """Return the pixels of a feature map after some halvings, each of which rounds up."""
    height, width = image_size
    return -(-height // 2**halvings) * -(-width // 2**halvings)
