"""The cost of a network: parameters, floating-point operations and memory, computed from its config alone.

No network is built and torch is not imported, so `vitral models` runs instantly. Operations are counted as in the
paper: convolutions, matrix products and attention products, two per multiply-add; norms, activations and additions
are omitted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from vitral.model.bit_config import BiTConfig
from vitral.model.config import ConvStem, ResNetStem, ViTConfig

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
    positions and axial attention need up to half as much again, ReLU a quarter less."""

    def training_bytes(self, batch_size: int) -> int:
        """Return the memory of a training step: parameters, gradients, the two moments of Adam, and activations."""
        return 4 * self.parameters * FLOAT_BYTES + batch_size * self.activation_bytes


def count_cost(config: ViTConfig | BiTConfig, image_size: tuple[int, int] | None = None) -> Cost:
    """Return the cost at the config's image size, or at another (height, width)."""
    image_size = image_size or config.image_hw
    if isinstance(config, BiTConfig):
        return _count_bit_cost(config, image_size)
    grid = config.grid(*image_size)
    tokens = config.extra_tokens + grid[0] * grid[1]
    parameters = _count_parameters(config)
    flops = sum(layer.flops for layer in _stem_layers(config, image_size))
    flops += sum(2 * matrix.rows * matrix.inputs * matrix.outputs for matrix in _matrices(config, grid))
    flops += config.blocks * _attention_flops(config, grid)
    if config.pool == "map":
        flops += 4 * grid[0] * grid[1] * config.width
    mlp_activations = tokens * (2 * config.width + 2 * config.mlp_width)  # the sum, its norm, hidden before and after
    alive = max([mlp_activations, *(layer.kept for layer in _stem_layers(config, image_size))])
    return Cost(
        parameters=parameters,
        tokens=tokens,
        forward_flops=flops,
        inference_bytes=(parameters + alive) * FLOAT_BYTES,
        activation_bytes=_kept_for_backward(config, grid, image_size) * FLOAT_BYTES,
    )


def _count_bit_cost(config: BiTConfig, image_size: tuple[int, int]) -> Cost:
    """Return the cost of a BiT, whose norms come before the convolutions and whose root has none."""
    layers = list(_resnet_layers(config, config.channels, image_size))
    root, rows, columns = layers[0], *config.grid(*image_size)
    # Normalized channels; the backward pass needs them before the norm and after the ReLU.
    norms = config.width
    kept = config.channels * image_size[0] * image_size[1] + 2 * config.width * rows * columns
    # Padded, and the index of each maximum.
    kept += root.outputs * (root.height + 2) * (root.width + 2) + root.kept // 4
    convolutions = iter(layers[1:])
    for units in config.stages:
        for unit in range(units):
            first, second, _ = (next(convolutions) for _ in range(3))
            if unit == 0:
                next(convolutions)  # the shortcut
            norms += first.inputs + first.outputs + second.outputs
            kept += 2 * first.inputs * first.height * first.width + first.kept + second.kept
    parameters = sum(layer.weights for layer in layers) + 2 * norms
    parameters += (config.width + 1) * config.num_classes if config.num_classes else 0
    return Cost(
        parameters=parameters,
        tokens=rows * columns,
        forward_flops=sum(layer.flops for layer in layers) + 2 * config.width * config.num_classes,
        inference_bytes=(parameters + max(layer.kept for layer in layers)) * FLOAT_BYTES,
        activation_bytes=kept * FLOAT_BYTES,
    )


class _Matrix(NamedTuple):
    """A linear layer with a bias, and the number of rows that it processes per image."""

    rows: int
    inputs: int
    outputs: int


def _matrices(config: ViTConfig, grid: tuple[int, int]) -> Iterator[_Matrix]:
    patches, width = grid[0] * grid[1], config.width
    tokens = config.extra_tokens + patches
    patch_h, patch_w = config.patch_hw
    yield _Matrix(patches, config.patch_channels * patch_h * patch_w, width)
    for _ in range(config.blocks):
        yield _Matrix(tokens, width, 3 * width)
        yield _Matrix(tokens, width, width)
        yield from _mlp(config, tokens)
    if config.pool == "map":
        yield _Matrix(1, width, width)
        yield _Matrix(patches, width, 2 * width)
        yield _Matrix(1, width, width)
        yield from _mlp(config, 1)
    pooled = tokens if config.pool == "none" else 1
    if config.representation is not None:
        yield _Matrix(pooled, width, config.representation)
    if config.num_classes:
        yield _Matrix(pooled, config.representation or width, config.num_classes)


def _mlp(config: ViTConfig, rows: int) -> Iterator[_Matrix]:
    yield _Matrix(rows, config.width, config.mlp_width)
    yield _Matrix(rows, config.mlp_width, config.width)


def _attention_flops(config: ViTConfig, grid: tuple[int, int]) -> int:
    """Return the operations of one block: queries by keys, weights by values; the mean of row and column blocks."""
    (rows, columns), extras = grid, config.extra_tokens
    patches = rows * columns
    if config.attention == "axial":
        pairs = (2 * extras * (extras + patches) + patches * (2 * extras + rows + columns)) // 2
    else:
        pairs = (extras + patches) ** 2
    flops = 4 * config.width * pairs
    if config.position == "relative":
        flops += 2 * config.width * (extras + patches) * (_offsets(config, grid) + 2 * extras)
    return flops


def _offsets(config: ViTConfig, grid: tuple[int, int]) -> int:
    """Return the rows of a relative table: one-dimensional offsets on the trained grid, two-dimensional elsewhere."""
    rows, columns = grid
    return 2 * rows * columns - 1 if grid == config.table_grid else (2 * rows - 1) * (2 * columns - 1)


def _count_parameters(config: ViTConfig) -> int:
    width = config.width
    count = sum(matrix.inputs * matrix.outputs + matrix.outputs for matrix in _matrices(config, config.table_grid))
    count += config.extra_tokens * width + config.position_tables * _position_parameters(config)
    per_block = 4 * width  # two norms
    if config.layer_scale is not None:
        per_block += 2 * width
    if config.position == "relative":
        per_block += (_offsets(config, config.table_grid) + 2 * config.extra_tokens) * width
    count += config.blocks * per_block + 2 * width  # the final norm
    if config.pool == "map":
        count += 3 * width  # probe and norm
    return count + sum(layer.parameters for layer in _stem_layers(config, config.image_hw))


def _position_parameters(config: ViTConfig) -> int:
    rows, columns = config.table_grid
    class_row = int(config.has_class_token) * config.width
    if config.position == "learned":
        return rows * columns * config.width + class_row
    return (rows + columns) * config.width // 2 + class_row if config.position == "learned-2d" else 0


class _Convolution(NamedTuple):
    """A convolution without bias, followed by a norm."""

    inputs: int
    outputs: int
    kernel: int
    height: int  # of the output, as the width
    width: int

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs * self.kernel**2

    @property
    def parameters(self) -> int:
        return self.weights + 2 * self.outputs

    @property
    def kept(self) -> int:
        """Return the activations kept for the backward pass: its output for the norm, and the output of the ReLU."""
        return 2 * self.outputs * self.height * self.width

    @property
    def flops(self) -> int:
        return 2 * self.weights * self.height * self.width


def _stem_layers(config: ViTConfig, image_size: tuple[int, int]) -> Iterator[_Convolution]:
    match config.stem:
        case ConvStem(widths=widths):
            height, width = image_size
            for inputs, outputs in zip((config.channels, *widths[:-1]), widths, strict=True):
                height, width = -(-height // 2), -(-width // 2)
                yield _Convolution(inputs, outputs, 3, height, width)
        case ResNetStem() as stem:
            yield from _resnet_layers(stem, config.channels, image_size)
        case None:
            return


def _resnet_layers(stem: ResNetStem | BiTConfig, channels: int, image_size: tuple[int, int]) -> Iterator[_Convolution]:
    height, width = (-(-side // 2) for side in image_size)
    inputs = stem.root_width
    yield _Convolution(channels, inputs, 7, height, width)
    height, width = -(-height // 2), -(-width // 2)
    for stage, units in enumerate(stem.stages):
        middle = stem.root_width * 2**stage
        for unit in range(units):
            yield _Convolution(inputs, middle, 1, height, width)
            if unit == 0 and stage > 0:  # the 3x3 convolution and the shortcut halve the size
                height, width = -(-height // 2), -(-width // 2)
            yield _Convolution(middle, middle, 3, height, width)
            yield _Convolution(middle, 4 * middle, 1, height, width)
            if unit == 0:
                yield _Convolution(inputs, 4 * middle, 1, height, width)
            inputs = 4 * middle


def _kept_for_backward(config: ViTConfig, grid: tuple[int, int], image_size: tuple[int, int]) -> int:
    """Return the number of activations that autograd keeps per image."""
    patches, width = grid[0] * grid[1], config.width
    tokens = config.extra_tokens + patches
    branches = 0 if config.layer_scale is None else 2 * width
    # Two sums, two norms with statistics, q, k, v, the mixed values with their normalizer, hidden before and after.
    block = 8 * width + 2 * config.mlp_width + branches + 4 + config.heads
    patch_h, patch_w = config.patch_hw
    cut = patches * config.patch_channels * patch_h * patch_w
    layers = list(_stem_layers(config, image_size))
    stem = sum(layer.kept for layer in layers)
    if isinstance(config.stem, ResNetStem):  # max-pooling pads a copy and keeps the index of each maximum
        stem += 3 * layers[0].kept // 4
    return tokens * (config.blocks * block + width) + cut + stem
