"""Choose how to train on a number of devices: which parallelism, and whether to compute activations again."""

from dataclasses import dataclass, replace
from typing import Literal

from vitral.model.activations import Precision
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.scaling.communication import Traffic, bytes_per_step
from vitral.scaling.hardware import Assumptions, Device
from vitral.scaling.memory import RESERVE, Memory, OptimizerName, Parallel, Setup, estimate_memory, largest_batch
from vitral.scaling.simulation import Prediction, predict

ParallelChoice = Literal["auto", "none", "ddp", "fsdp"]
Attention = Literal["fused", "recorded", "axial"]
"""recorded: attention weights are kept; axial: rows, then columns, in twice as many blocks, as the config says."""
TIE = 0.9
"""A simpler way is chosen if it reaches this fraction of the predicted speed of the fastest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One way to train, with its memory, traffic and speed for the requested batch."""

    parallel: Parallel
    checkpointing: bool
    memory: Memory
    traffic: Traffic
    largest_batch: int
    """Images per device that fit into its memory."""
    fits: bool
    prediction: Prediction


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """The chosen way to train, the reason, and all ways that were compared."""

    device: str
    devices: int
    capacity: int
    """Memory of one device in bytes."""
    precision: Precision
    batch: int
    """Images per device and step."""
    parallel: Parallel | None
    """None if nothing fits."""
    checkpointing: bool
    reason: str
    options: tuple[Option, ...]
    growth: tuple[Prediction, ...]
    """Predictions of the chosen way for other numbers of devices, with the same batch per device (weak scaling)."""

    @property
    def chosen(self) -> Option | None:
        same = (o for o in self.options if (o.parallel, o.checkpointing) == (self.parallel, self.checkpointing))
        return next(same, None)

    def seconds(self, images: float) -> float | None:
        """Return the predicted time for so many images in the chosen way, or None if nothing fits."""
        return None if self.chosen is None else images / self.chosen.prediction.images_per_second


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The network, devices and settings that a strategy is chosen for."""

    config: ViTConfig | BiTConfig
    device: Device
    name: str
    """The name of the device."""
    devices: int
    capacity: int
    batch: int
    precision: Precision = "bfloat16"
    parallel: ParallelChoice = "auto"
    optimizer: OptimizerName = "adamw"
    attention: Attention = "fused"
    images_per_second: float | None = None
    """The speed of one device, if it is known."""


def choose_strategy(request: Request, assumptions: Assumptions | None = None) -> Strategy:
    """Return the way to train that fits into the memory, and why: the fastest, or a simpler one that is nearly so."""
    options = tuple(_describe(request, setup, assumptions) for setup in _setups(request))
    fitting = [option for option in options if option.fits]
    fastest = max((option.prediction.images_per_second for option in fitting), default=0.0)
    best = next((o for o in fitting if o.prediction.images_per_second >= TIE * fastest), None)
    growth = () if best is None else tuple(_grow(request, best, assumptions))
    return Strategy(
        device=request.name,
        devices=request.devices,
        capacity=request.capacity,
        precision=request.precision,
        batch=request.batch,
        parallel=None if best is None else best.parallel,
        checkpointing=best is not None and best.checkpointing,
        reason=_explain(options, best, request),
        options=options,
        growth=growth,
    )


def _setups(request: Request) -> list[Setup]:
    """Return the ways to compare, the simplest first."""
    if request.devices == 1:
        kinds: list[Parallel] = ["none"]
    else:
        kinds = ["ddp", "fsdp"] if request.parallel in ("auto", "none") else [request.parallel]
    can_checkpoint = isinstance(request.config, ViTConfig) and request.attention != "recorded"
    return [
        Setup(
            parallel=kind,
            devices=request.devices,
            precision=request.precision,
            checkpointing=checkpointing,
            recorded=request.attention == "recorded",
            optimizer=request.optimizer,
        )
        for kind in kinds
        for checkpointing in ((False, True) if can_checkpoint else (False,))
    ]


def _describe(request: Request, setup: Setup, assumptions: Assumptions | None) -> Option:
    memory = estimate_memory(request.config, setup, request.batch)
    return Option(
        parallel=setup.parallel,
        checkpointing=setup.checkpointing,
        memory=memory,
        traffic=bytes_per_step(request.config, setup),
        largest_batch=largest_batch(request.config, setup, request.capacity),
        fits=memory.peak <= request.capacity * (1 - RESERVE),
        prediction=_predict(request, setup, assumptions),
    )


def _predict(request: Request, setup: Setup, assumptions: Assumptions | None) -> Prediction:
    known = request.images_per_second
    speed = known if known is None or not setup.checkpointing else known * 3 / 4  # the forward pass runs twice
    return predict(request.config, setup, request.device, request.batch, assumptions, images_per_second=speed)


def _grow(request: Request, option: Option, assumptions: Assumptions | None) -> list[Prediction]:
    """Predict powers of two up to 1,024 devices, and the requested number."""
    counts = sorted({2**power for power in range(11)} | {request.devices})
    setups = [next(s for s in _setups(request) if _is_same(s, option))] * len(counts)
    return [_predict(request, replace(s, devices=count), assumptions) for s, count in zip(setups, counts, strict=True)]


def _is_same(setup: Setup, option: Option) -> bool:
    return (setup.parallel, setup.checkpointing) == (option.parallel, option.checkpointing)


def _explain(options: tuple[Option, ...], best: Option | None, request: Request) -> str:
    if best is None:
        least = min(options, key=lambda option: option.memory.peak)
        if max(option.largest_batch for option in options):
            largest = max(option.largest_batch for option in options)
            return f"a batch of {request.batch} per device does not fit; use at most {largest} (--batch-size)"
        needed = least.memory.peak / (1 - RESERVE) / 2**30
        return f"not even one image per device fits: {needed:,.0f} GiB are needed. Use more or larger devices"
    others = [option for option in options if option.fits and option is not best]
    if best.parallel == "none":
        reason = "there is one device"
    elif best.parallel == "ddp":
        reason = "the whole model fits on each device, and DDP is the simplest"
        reason += " of those within 10% of the fastest" if others else ""
    elif any(option.parallel == "ddp" for option in others):
        reason = f"FSDP is predicted to be over {1 / TIE - 1:.0%} faster than DDP, because it hides its traffic"
    else:
        reason = "the whole model does not fit on one device with this batch, so it is sharded"
    if best.checkpointing:
        plain = max(
            (o.largest_batch for o in options if o.parallel == best.parallel and not o.checkpointing), default=0
        )
        reason += "; activations fit only if they are computed again"
        reason += f" (up to {plain:,} images fit without that, which is faster)" if plain else ""
    return reason
