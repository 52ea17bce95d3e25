"""The memory of one device in a training step: parameters, gradients, optimizer, activations and buffers.

Checked against the peaks of real processes (`python -m benchmarks.memory`). torch is not imported.
"""

from dataclasses import dataclass
from typing import Literal

from vitral.model.activations import Precision, count_activations
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.model.cost import FLOAT_BYTES, count_cost

Parallel = Literal["none", "ddp", "fsdp"]
"""ddp: every device holds the whole model; fsdp: each holds a part and gathers the rest block by block."""
OptimizerName = Literal["adamw", "muon", "sgd"]
MOMENTS = {"adamw": 2, "muon": 1, "sgd": 1}
"""Tensors of the optimizer per parameter. Muon keeps two for what is not a matrix of a block, which is little."""
RESERVE = 0.08
"""Fraction of a device's memory that its driver, libraries and the gaps between tensors take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """How a model is trained on a number of devices."""

    parallel: Parallel = "none"
    devices: int = 1
    precision: Precision = "float32"
    checkpointing: bool = False
    """Keep only the input of each block, and compute the rest again in the backward pass."""
    recorded: bool = False
    """Keep attention weights, without the fused kernel."""
    optimizer: OptimizerName = "adamw"
    ema: bool = False
    """Keep a moving average of the weights."""

    @property
    def shards(self) -> int:
        return self.devices if self.parallel == "fsdp" else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one device."""

    parameters: int
    gradients: int
    optimizer: int
    """Moments, and the moving average if there is one."""
    activations: int
    """Tensors that the backward pass needs, and its workspace."""
    buffers: int
    """Copies: 16-bit weights, the sum of gradients, blocks gathered from all devices."""
    peak: int
    """The most that is needed at one time. Gradients grow while activations are freed, so this is less than the sum."""


def estimate_memory(config: ViTConfig | BiTConfig, setup: Setup, batch: int) -> Memory:
    """Return the memory of one device that trains on `batch` images per step."""
    whole = count_cost(config).parameters * FLOAT_BYTES
    share = -(-whole // setup.shards)
    optimizer = (MOMENTS[setup.optimizer] + setup.ema) * share
    counted = count_activations(config, precision=setup.precision, recorded=setup.recorded)
    kept = counted.checkpointed if setup.checkpointing else counted.stored
    one_block = counted.checkpointed - _input_bytes(config)
    cast, gathered = _copies(config, setup, whole)
    summed = whole if setup.parallel == "ddp" else 0
    forward = batch * (kept + counted.workspace + _image_bytes(config)) + cast
    last = share + batch * (one_block + counted.workspace + _image_bytes(config)) + cast
    after = share + summed
    return Memory(
        parameters=share,
        gradients=share,
        optimizer=optimizer,
        activations=batch * (kept + counted.workspace),
        buffers=cast + gathered + summed,
        peak=share + optimizer + gathered + max(forward, last, after),
    )


def largest_batch(config: ViTConfig | BiTConfig, setup: Setup, capacity: int) -> int:
    """Return the most images per device that fit into its memory, less a reserve; 0 if not even one does."""
    free = int(capacity * (1 - RESERVE))
    if estimate_memory(config, setup, 1).peak > free:
        return 0
    low, high = 1, 2
    while estimate_memory(config, setup, high).peak <= free:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if estimate_memory(config, setup, middle).peak <= free else (low, middle)
    return low


def block_parameters(config: ViTConfig | BiTConfig) -> int:
    """Return the parameters of one block, the unit that FSDP gathers."""
    if isinstance(config, BiTConfig):
        return count_cost(config).parameters // config.blocks
    width, mlp_width = config.width, config.mlp_width
    return 4 * width**2 + 2 * width * mlp_width + 9 * width + mlp_width


def _copies(config: ViTConfig | BiTConfig, setup: Setup, whole: int) -> tuple[int, int]:
    """Return the bytes of 16-bit weights, which the backward pass keeps, and of what FSDP gathers."""
    is_half = setup.precision == "bfloat16"
    if setup.parallel != "fsdp":
        return (whole // 2 if is_half else 0), 0
    size = FLOAT_BYTES // 2 if is_half else FLOAT_BYTES
    block = block_parameters(config)
    rest = whole // FLOAT_BYTES - config.blocks * block  # stem, positions and head stay gathered during a step
    return 0, (rest + 3 * block) * size  # a block, the next one, and the gradients of one


def _input_bytes(config: ViTConfig | BiTConfig) -> int:
    if isinstance(config, BiTConfig):
        return 0
    return config.blocks * count_cost(config).tokens * config.width * FLOAT_BYTES


def _image_bytes(config: ViTConfig | BiTConfig) -> int:
    height, width = config.image_hw
    return config.channels * height * width * FLOAT_BYTES
