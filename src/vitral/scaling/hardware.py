"""Devices and links, as their data sheets describe them, and the assumptions that data sheets do not cover."""

from dataclasses import dataclass

GIGA = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator, with the machine and the network that it comes in."""

    flops: float
    """Dense 16-bit operations per second, accumulated in 32 bits."""
    gibibytes: int
    per_node: int = 8
    """Devices in one machine."""
    inside: float = 32 * GIGA
    """Bytes per second that a device sends to others in its machine. Default: PCIe 4.0 x16."""
    outside: float = 3.1 * GIGA
    """Bytes per second that a device sends to other machines. Default: a share of 200 Gbit/s Ethernet."""


DEVICES = {
    "tpuv3-core": Device(flops=61.5e12, gibibytes=16, per_node=8, inside=70 * GIGA, outside=70 * GIGA),
    "tpuv4": Device(flops=275e12, gibibytes=32, per_node=4, inside=150 * GIGA, outside=150 * GIGA),
    "v100": Device(flops=125e12, gibibytes=32, inside=150 * GIGA, outside=6.25 * GIGA),
    "a100": Device(flops=312e12, gibibytes=80, inside=300 * GIGA, outside=25 * GIGA),
    "h100": Device(flops=989e12, gibibytes=80, inside=450 * GIGA, outside=50 * GIGA),
    "rtx3090": Device(flops=71e12, gibibytes=24),
    "rtx4090": Device(flops=165e12, gibibytes=24),
}
"""By name. NVLink and one network card per GPU for v100 (100 Gbit/s per two), a100 (200 Gbit/s) and h100 (400 Gbit/s);
the links of its torus for a TPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """The assumptions of a prediction, beside the data sheet. None of them is a measurement."""

    utilization: float = 0.4
    """Fraction of the peak that one device reaches: 0.43 for the paper's L/16 on TPUv3, 0.32 for its H/14."""
    link_efficiency: float = 0.7
    """Fraction of a link's bandwidth that collectives reach."""
    latency: float = 10e-6
    """Seconds of one hop between machines."""
    overlap: float | None = None
    """Fraction of the computation that can hide communication. None: as vitral trains, 0 under DDP, whose gradients are
    added up after the backward pass, and 0.8 under FSDP, which gathers the next block during the current one."""
    jitter: float = 0.02
    """Standard deviation of the step time of one device, as a fraction. All devices wait for the slowest."""
    device_hours_between_failures: float = 50_000.0
    """Mean hours until one device interrupts a run: 419 interruptions of 16,384 GPUs in 54 days (Llama 3)."""
    restart_seconds: float = 300.0
    """From a failure until the run trains again."""
    disk: float = 2 * GIGA
    """Bytes per second at which a machine writes a checkpoint."""
    save_wait: float = 0.1
    """Fraction of a save for which training waits; the rest is written in the background."""
    save_seconds: float | None = None
    """Seconds between two checkpoints; None for the interval that loses least."""
