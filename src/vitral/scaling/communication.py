"""The bytes that a device exchanges with the others in one training step.

A ring moves a tensor of n bytes in (devices - 1) / devices * n bytes per device for an all-gather or a reduce-scatter,
and in twice as many for an all-reduce, which is one after the other.
"""

from dataclasses import dataclass
from typing import Literal

from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.model.cost import FLOAT_BYTES, count_cost
from vitral.scaling.memory import Setup, block_parameters

Backend = Literal["nccl", "gloo"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that each device sends in one step; it receives as many."""

    all_reduce: int = 0
    """Gradients under DDP."""
    all_gather: int = 0
    """Weights under FSDP, once for the forward pass and once for the backward pass."""
    reduce_scatter: int = 0
    """Gradients under FSDP."""
    messages: int = 0
    """Collective operations, each of which waits for the latency of the links."""

    @property
    def sent(self) -> int:
        return self.all_reduce + self.all_gather + self.reduce_scatter


def bytes_per_step(config: ViTConfig | BiTConfig, setup: Setup, backend: Backend = "nccl") -> Traffic:
    """Return the traffic of one device in one training step. gloo scatters by an all-reduce, with twice the bytes."""
    others, parameters = setup.devices - 1, count_cost(config).parameters
    if setup.parallel == "none" or not others:
        return Traffic()
    if setup.parallel == "ddp":
        return Traffic(all_reduce=2 * parameters * FLOAT_BYTES * others // setup.devices, messages=1)
    size = FLOAT_BYTES // 2 if setup.precision == "bfloat16" else FLOAT_BYTES
    blocks = config.blocks * block_parameters(config)
    # Blocks are gathered again for the backward pass; stem, positions and head stay. Gradients travel in float32.
    gathered = (parameters + blocks) * size
    reduced = parameters * FLOAT_BYTES * (2 if backend == "gloo" else 1)
    return Traffic(
        all_gather=gathered * others // setup.devices,
        reduce_scatter=reduced * others // setup.devices,
        messages=3 * config.blocks + 2,
    )
