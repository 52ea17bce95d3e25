"""Predict the speed of a run on many devices: computation, communication, stragglers, failures and checkpoints.

This is a prediction from a data sheet and from Assumptions, not a measurement. The page "Scale" of the documentation
compares it with published runs.

    step  =  slowest of all devices (computation)  +  communication that the computation does not hide
    speed =  images per step / step  x  the part of the time that failures, restarts and checkpoints leave
"""

import random
from dataclasses import dataclass
from math import log2, sqrt
from statistics import NormalDist

from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.model.cost import FLOAT_BYTES, count_cost
from vitral.scaling.communication import bytes_per_step
from vitral.scaling.hardware import Assumptions, Device
from vitral.scaling.memory import MOMENTS, Setup

FORWARD_PASSES = 3
"""Forward passes that one training step costs: the backward pass counts as two."""
HOUR = 3600.0
OVERLAP = {"none": 0.0, "ddp": 0.0, "fsdp": 0.8}
"""Fraction of the computation that hides communication, as vitral trains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The predicted speed of a run on a number of devices."""

    devices: int
    batch: int
    """Images per device and step."""
    compute_seconds: float
    """Computation of one step on one device."""
    communication_seconds: float
    """Traffic of one step, whether hidden or not."""
    straggler_seconds: float
    """Time that the devices wait for the slowest one."""
    step_seconds: float
    hours_between_failures: float
    save_interval: float
    """Seconds between two checkpoints."""
    available: float
    """Fraction of the time that trains: not saving, not restarting, not repeating lost steps."""
    images_per_second: float
    """Speed of all devices together, with everything above."""
    efficiency: float
    """Speed per device, as a fraction of that of one device alone."""


def predict(
    config: ViTConfig | BiTConfig,
    setup: Setup,
    device: Device,
    batch: int,
    assumptions: Assumptions | None = None,
    *,
    images_per_second: float | None = None,
) -> Prediction:
    """Predict the speed with `batch` images per device. `images_per_second` replaces the data sheet's speed of one."""
    assumed = assumptions or Assumptions()
    alone = images_per_second or device.flops * assumed.utilization / step_flops(config, setup)
    compute = batch / alone
    traffic = communication_seconds(config, setup, device, assumed)
    straggler = compute * assumed.jitter * expected_maximum(setup.devices)
    overlap = OVERLAP[setup.parallel] if assumed.overlap is None else assumed.overlap
    hidden = min(traffic, overlap * compute)
    step = compute + straggler + traffic - hidden
    between = assumed.device_hours_between_failures * HOUR / setup.devices
    save = save_cost(config, setup, device, assumed)
    interval = assumed.save_seconds or best_interval(save, between)
    available = availability(interval, save, between, assumed.restart_seconds)
    speed = setup.devices * batch / step * available
    return Prediction(
        devices=setup.devices,
        batch=batch,
        compute_seconds=compute,
        communication_seconds=traffic,
        straggler_seconds=straggler,
        step_seconds=step,
        hours_between_failures=between / HOUR,
        save_interval=interval,
        available=available,
        images_per_second=speed,
        efficiency=speed / (setup.devices * alone),
    )


def step_flops(config: ViTConfig | BiTConfig, setup: Setup) -> float:
    """Return the operations of a training step per image. Checkpointing repeats the forward pass."""
    return (FORWARD_PASSES + setup.checkpointing) * count_cost(config).forward_flops


def communication_seconds(
    config: ViTConfig | BiTConfig, setup: Setup, device: Device, assumptions: Assumptions
) -> float:
    """Return the time of one step's traffic: bytes by bandwidth, and latency.

    Collectives of several machines run in both networks; the slower one counts. Inside a machine the bytes are those
    of its ring, and every machine sends each byte to the others once per device and link.
    """
    if setup.devices == 1:
        return 0.0
    traffic = bytes_per_step(config, setup)
    nodes = -(-setup.devices // device.per_node)
    bandwidth = device.inside if nodes == 1 else min(device.inside, device.outside * _rails(device))
    hops = log2(setup.devices) if nodes == 1 else log2(device.per_node) + log2(nodes)
    return traffic.sent / (bandwidth * assumptions.link_efficiency) + traffic.messages * hops * assumptions.latency


def _rails(device: Device) -> int:
    """Return by how much the traffic between machines shrinks, because the devices of one add up theirs first."""
    return device.per_node if device.outside < device.inside else 1


def expected_maximum(count: int) -> float:
    """Return the expected maximum of `count` standard normal numbers (Blom's approximation)."""
    return 0.0 if count == 1 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def save_cost(config: ViTConfig | BiTConfig, setup: Setup, device: Device, assumptions: Assumptions) -> float:
    """Return the seconds that training waits for a checkpoint: weights and moments, written by every machine."""
    copies = 1 + MOMENTS[setup.optimizer] + setup.ema
    writers = max(1, setup.devices // device.per_node) if setup.parallel == "fsdp" else 1
    seconds = copies * count_cost(config).parameters * FLOAT_BYTES / (writers * assumptions.disk)
    return seconds * assumptions.save_wait


def best_interval(save: float, between: float) -> float:
    """Return the seconds between two checkpoints that lose least time (Young 1974), at least a minute."""
    return max(60.0, sqrt(2 * save * between))


def availability(interval: float, save: float, between: float, restart: float) -> float:
    """Return the fraction of the time that trains, on average: a failure loses half an interval and a restart."""
    lost_per_failure = interval / 2 + restart
    return max(0.0, (1 - lost_per_failure / between) * interval / (interval + save))


def simulate_run(
    seconds: float, *, interval: float, save: float, between: float, restart: float, seed: int = 0
) -> float:
    """Play a run of so many seconds of training with random failures, and return how long it takes in all."""
    chance, clock, done = random.Random(seed), 0.0, 0.0
    failure = chance.expovariate(1 / between)
    while done < seconds:
        step = min(interval, seconds - done)
        end = clock + step + save
        if failure < end:  # everything since the last checkpoint is lost
            clock = failure + restart
            failure = clock + chance.expovariate(1 / between)
            continue
        clock, done = end, done + step
    return clock
