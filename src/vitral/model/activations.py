"""The activations that training keeps per image, for every kind of attention and precision, from the config alone.

The formulas count what autograd saves, as tests/model/test_activations.py measures it, and torch is not imported.
Dropout, which adds masks, is not counted.
"""

from dataclasses import dataclass
from typing import Literal

from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.model.cost import FLOAT_BYTES, count_cost, relative_rows

Precision = Literal["float32", "bfloat16"]
"""bfloat16: matrix products in 16 bits; weights, norms and sums in float32, as torch.autocast runs them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes per image."""

    stored: int
    """Everything that the backward pass needs."""
    checkpointed: int
    """The same with gradient checkpointing: the inputs of all blocks, and one block that is computed again."""
    workspace: int
    """Gradients of activations that exist at the same time, at their peak."""


def count_activations(
    config: ViTConfig | BiTConfig,
    *,
    precision: Precision = "float32",
    recorded: bool = False,
    image_size: tuple[int, int] | None = None,
) -> Activations:
    """Return the activations per image. `recorded`: attention weights are kept, without the fused kernel."""
    image_size = image_size or config.image_hw
    cost = count_cost(config, image_size)
    half = FLOAT_BYTES if precision == "float32" else FLOAT_BYTES // 2
    if isinstance(config, BiTConfig):
        stored = cost.activation_bytes * half // FLOAT_BYTES
        return Activations(stored=stored, checkpointed=stored, workspace=stored // config.blocks)
    width, tokens = config.width, cost.tokens
    block = _block_bytes(config, image_size, half=half, recorded=recorded)
    rest = cost.activation_bytes - config.blocks * _block_bytes(config, image_size)
    rest = max(0, rest * half // FLOAT_BYTES)
    inputs = config.blocks * tokens * width * FLOAT_BYTES
    return Activations(
        stored=config.blocks * block + rest,
        checkpointed=inputs + block + rest,
        workspace=tokens * (config.mlp_width * half + 2 * width * FLOAT_BYTES),
    )


def _block_bytes(
    config: ViTConfig, image_size: tuple[int, int], *, half: int = FLOAT_BYTES, recorded: bool | None = None
) -> int:
    """Return the bytes that one block keeps per image; without `recorded`, those that `count_cost` counts."""
    rows, columns = config.grid(*image_size)
    patches, extras, width = rows * columns, config.extra_tokens, config.width
    tokens, heads = extras + patches, config.heads
    # Two sums in float32; two norms, q, k, v and the mixed values; hidden before and after the activation.
    floats, halves = tokens * (2 * width + 4), tokens * (6 * width + 2 * config.mlp_width)
    if config.layer_scale is not None:
        halves += tokens * 2 * width
    if recorded is None:
        return (floats + halves + tokens * heads) * FLOAT_BYTES
    scores = heads * tokens**2
    if recorded:
        # On a GPU, softmax runs in float32: its output, and a copy in 16 bits for the product with the values.
        return (
            floats * FLOAT_BYTES
            + halves * half
            + scores * (4 if half == FLOAT_BYTES else 6)
            + _relative(config, (rows, columns), half)
        )
    floats += tokens * heads  # the normalizer of each row of scores
    if config.attention == "axial":
        lines = (rows + columns) // 2  # the mean of row and column blocks
        halves += width * (4 * patches + 2 * lines * extras) if extras else 3 * width * patches // 2
    elif config.position == "relative":  # a bias with a gradient keeps torch from the fused kernel
        halves += scores
    return floats * FLOAT_BYTES + halves * half + _relative(config, (rows, columns), half)


def _relative(config: ViTConfig, grid: tuple[int, int], half: int) -> int:
    """Return the bytes of the products of queries and offsets, if positions are relative."""
    if config.position != "relative":
        return 0
    tokens = config.extra_tokens + grid[0] * grid[1]
    return tokens * (config.heads * relative_rows(config, grid) + 3 * config.width) * half
