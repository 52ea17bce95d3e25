"""Estimate the cost of a training run before it starts: operations, memory, time and price.

Operations are counted as in the paper (table 6): convolutions, matrix products and attention products, two operations
per multiply-add, and three forward passes per training step. torch is only needed to time this machine.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, get_args

from vitral.errors import ConfigError, check_int, check_number, did_you_mean
from vitral.model.activations import Precision
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.model.cost import Cost, count_cost
from vitral.model.sizes import canonical_name, named_config
from vitral.scaling.hardware import DEVICES, Assumptions
from vitral.scaling.memory import OptimizerName
from vitral.scaling.simulation import FORWARD_PASSES
from vitral.scaling.strategy import Attention, ParallelChoice, Request, Strategy, choose_strategy

HOUR, DAY = 3600, 86_400
JFT, I21K = 303_000_000, 14_000_000
MIN_NUMBER, MAX_NUMBER = 1e-9, 1e15
"""Bounds of every argument, so that time and cost stay finite."""


UTILIZATION = Assumptions().utilization
"""Fraction of the data sheet's speed that training reaches: 0.43 for the paper's L/16 on TPUv3, 0.32 for its H/14."""
CHOICES = {
    "precision": get_args(Precision),
    "parallel": get_args(ParallelChoice),
    "optimizer": get_args(OptimizerName),
    "attention": get_args(Attention),
}
DEFAULT_DEVICE = "a100"
"""The device that a strategy is chosen for if none is named."""
LARGE: dict[str, dict[str, Any]] = {
    "vit-e14": dict(width=1792, depth=56, heads=16, mlp_width=15_360, patch_size=14),  # Chen et al. 2022 (PaLI)
    "vit-22b14": dict(width=6144, depth=48, heads=48, mlp_width=24_576, patch_size=14),  # Dehghani et al. 2023
}
"""Sizes that can be planned, but have no name elsewhere: their blocks differ from those of the paper in details."""

# (model, epochs on JFT): exaFLOPs in table 6.
TABLE_6: dict[tuple[str, float], int] = {
    ("vit-b32", 7): 55, ("vit-b16", 7): 224, ("vit-l32", 7): 196, ("vit-l16", 7): 783, ("vit-l16", 14): 1567,
    ("vit-h14", 14): 4262, ("bit-r50x1", 7): 50, ("bit-r50x2", 7): 199, ("bit-r101x1", 7): 96, ("bit-r152x1", 7): 141,
    ("bit-r152x2", 7): 563, ("bit-r152x2", 14): 1126, ("bit-r200x3", 14): 3306, ("r50-vit-b32", 7): 106,
    ("r50-vit-b16", 7): 274, ("r50-vit-l32", 7): 246, ("r50-vit-l16", 7): 859, ("r50-vit-l16", 14): 1668,
}  # fmt: skip
# (model, images, epochs): TPUv3-core-days in table 2.
TABLE_2: dict[tuple[str, int, float], int] = {
    ("vit-h14", JFT, 14): 2500, ("vit-l16", JFT, 14): 680, ("vit-l16", I21K, 90): 230,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The cost of a run on one kind of device."""

    device: str
    devices: int
    images_per_second: float
    """Speed of all devices together."""
    seconds: float
    largest_batch: int | None
    """Images that fit on one device, in float32 with Adam; 0 if none does, None if its memory is unknown."""
    price: float | None
    """Price of one device per hour, if given."""
    cost: float | None
    """Price of all devices for the whole run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The cost of a training run."""

    model: str
    image_size: tuple[int, int]
    images: int
    epochs: float
    batch_size: int
    parameters: int
    forward_flops: int
    """Operations of a forward pass per image."""
    training_exaflops: float
    memory_bytes: int
    """Weights, gradients, Adam's moments and activations in float32, for ``batch_size`` images on one device."""
    tpuv3_core_days: float
    """Time on one TPUv3 core, at ``utilization`` of its data sheet."""
    utilization: float
    estimates: tuple[Estimate, ...]
    paper_exaflops: float | None
    """The number in table 6, if it lists this run."""
    paper_core_days: float | None
    """The number in table 2, if it lists this run."""
    strategy: Strategy
    """How to train on these devices: memory, traffic and predicted speed of each way, the chosen one and the reason."""
    predicted_seconds: float | None
    """Time of the run in the chosen way, with communication, stragglers and failures; None if nothing fits."""
    predicted_cost: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan(
    model: str,
    *,
    images: int,
    epochs: float = 1.0,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    batch_size: int = 32,
    device: str | None = None,
    devices: int = 1,
    images_per_second: float | None = None,
    price: float | None = None,
    memory: int | None = None,
    precision: Precision = "bfloat16",
    parallel: ParallelChoice = "auto",
    optimizer: OptimizerName = "adamw",
    attention: Attention = "fused",
) -> Plan:
    """Estimate the cost of training ``model`` on a number of images, and choose how to train on these devices.

    ``device`` is a name in DEVICES, "here" to time this machine, or None for all of DEVICES. ``images_per_second``
    replaces the speed in the data sheet of one device; ``price`` is that of one device per hour. ``memory`` replaces
    the bytes of one device. ``batch_size`` is that of one device. ``precision`` to ``attention`` set the strategy.
    """
    counts = {"images": images, "batch_size": batch_size, "devices": devices, "memory": memory}
    _check_numbers(counts, {"epochs": epochs, "images_per_second": images_per_second, "price": price})
    _check_choices(precision=precision, parallel=parallel, optimizer=optimizer, attention=attention)
    device = _check_device(device, images_per_second, price)
    name, config = _find_config(model, attention, {"image_size": image_size, "num_classes": num_classes})
    cost, seen = count_cost(config), images * epochs
    flops = FORWARD_PASSES * cost.forward_flops * seen
    if device == "here":
        images_per_second = images_per_second or time_this_machine(config, batch_size=min(batch_size, 8))
    run = (devices, seen, images_per_second, price, memory)
    estimates = [estimate(cost, kind, *run) for kind in ([device] if device else DEVICES)]
    sheet = DEVICES.get(device or "", DEVICES[DEFAULT_DEVICE])
    request = Request(config=config, device=sheet, name=device or DEFAULT_DEVICE, devices=devices, batch=batch_size,
                      capacity=memory or sheet.gibibytes * 2**30, precision=precision, parallel=parallel,
                      optimizer=optimizer, attention=attention, images_per_second=images_per_second)  # fmt: skip
    predicted = (strategy := choose_strategy(request)).seconds(seen)
    has_paper_size = config.image_hw == (224, 224) and attention != "axial"
    return Plan(
        model=name,
        image_size=config.image_hw,
        images=images,
        epochs=epochs,
        batch_size=batch_size,
        parameters=cost.parameters,
        forward_flops=cost.forward_flops,
        training_exaflops=flops / 1e18,
        memory_bytes=cost.training_bytes(batch_size),
        tpuv3_core_days=flops / (DEVICES["tpuv3-core"].flops * UTILIZATION) / DAY,
        utilization=UTILIZATION,
        estimates=tuple(estimates),
        paper_exaflops=TABLE_6.get((name, epochs)) if has_paper_size and images == JFT else None,
        paper_core_days=TABLE_2.get((name, images, epochs)) if has_paper_size else None,
        strategy=strategy,
        predicted_seconds=predicted,
        predicted_cost=None if predicted is None or price is None else price * devices * predicted / HOUR,
    )


def _check_choices(**values: str) -> None:
    for field, value in values.items():
        if value not in CHOICES[field]:
            raise ConfigError(f"{field} must be one of {', '.join(CHOICES[field])} (got {value!r}).")


def _check_numbers(counts: Mapping[str, int | None], numbers: Mapping[str, float | None]) -> None:
    for field, count in counts.items():
        if count is not None:
            check_int(field, count, minimum=1, maximum=int(MAX_NUMBER))
    for field, number in numbers.items():
        if number is not None:
            check_number(field, number, minimum=MIN_NUMBER, maximum=MAX_NUMBER)


def _find_config(model: str, attention: Attention, fields: Mapping[str, Any]) -> tuple[str, ViTConfig | BiTConfig]:
    """Return the name and the config of a model, which may be one of LARGE, with those fields that are not None."""
    changes = {field: value for field, value in fields.items() if value is not None}
    changes |= {"attention": "axial"} if attention == "axial" else {}
    plain = re.sub("[^a-z0-9]", "", str(model).lower())
    for name, size in LARGE.items():
        if plain in (name.replace("-", ""), name.replace("-", "").removesuffix("14")):
            return name, ViTConfig(**size | changes)
    name = canonical_name(model)
    return name, named_config(name, **changes)


def _check_device(device: str | None, images_per_second: float | None, price: float | None) -> str | None:
    if device not in (None, "here", *DEVICES):
        hint = did_you_mean(str(device), DEVICES) or "For another device, pass images_per_second."
        raise ConfigError(f"device must be one of {', '.join((*DEVICES, 'here'))} (got {device!r}).", hint=hint)
    if device is None and images_per_second is not None:
        return "given"
    if device is None and price is not None:
        raise ConfigError("price applies to one kind of device, but none is named.", hint="Pass --device.")
    return device


def estimate(
    cost: Cost,
    kind: str,
    count: int,
    images: float,
    images_per_second: float | None,
    price: float | None,
    memory: int | None = None,
) -> Estimate:
    """Estimate a run over ``images`` images on ``count`` devices of one kind."""
    sheet = DEVICES.get(kind)
    if images_per_second is None:
        assert sheet is not None
        images_per_second = sheet.flops * UTILIZATION / (FORWARD_PASSES * cost.forward_flops)
    capacity = memory if memory is not None or sheet is None else sheet.gibibytes * 2**30
    free = None if capacity is None else capacity - cost.training_bytes(0)
    seconds = images / (images_per_second * count)
    return Estimate(
        device=kind,
        devices=count,
        images_per_second=images_per_second * count,
        seconds=seconds,
        largest_batch=None if free is None else max(0, free // cost.activation_bytes),
        price=price,
        cost=None if price is None else price * count * seconds / HOUR,
    )


def time_this_machine(config: ViTConfig | BiTConfig, *, batch_size: int) -> float:
    """Return the images per second of a training step here: the fastest of three, after a warm-up."""
    import torch

    from vitral.devices import choose_device, choose_precision
    from vitral.model.network import build

    device = torch.device(choose_device().value)
    precision = "float32" if device.type == "cpu" else choose_precision(device.type).value  # as in a run
    network = build(config).to(device).train()
    images = torch.randn(batch_size, config.channels, *config.image_hw, device=device)
    seconds = []
    for _ in range(4):
        start = perf_counter()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            logits = network(images)
        logits.float().square().mean().backward()
        first = next(network.parameters()).grad
        assert first is not None
        first.sum().item()  # wait for the device
        seconds.append(perf_counter() - start)
        network.zero_grad()
    return batch_size / min(seconds[1:])


def parse_bytes(text: str, name: str) -> int:
    """Return the bytes that a text such as "80GB", "40 GiB" or "512MB" stands for. GB are 10^9 bytes, GiB 2^30."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*([kmgt])(i?)b", text.strip(), re.IGNORECASE)
    power = "kmgt".index(match[2].lower()) + 1 if match else 0
    number = float(match[1]) * (1024 if match[3] else 1000) ** power if match else 0.0
    if not 1 <= number <= MAX_NUMBER:
        raise ConfigError(f"{name} must be a number of bytes (got {text!r}).", hint="Use 80GB or 40GiB, for example.")
    return round(number)


def parse_count(text: str, name: str) -> int:
    """Return the integer that a text such as "303M", "1.28M", "50k", "1e6" or "4,000" stands for."""
    digits = r"[0-9]{1,3}(?:[,_][0-9]{3}){1,5}|[0-9]{1,15}"  # a comma only separates thousands
    match = re.fullmatch(rf"((?:{digits})(?:\.[0-9]{{1,15}})?(?:[eE][0-9]{{1,2}})?)\s*([kKmMgGbB]?)", text.strip())
    scale = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}[match[2].lower()] if match else 0
    number = float(re.sub("[,_]", "", match[1])) * scale if match else 0.0
    if not 1 <= number <= MAX_NUMBER or not round(number, 3).is_integer():
        hint = "Use 50000, 50,000, 50k or 1.28M, for example."
        raise ConfigError(f"{name} must be an integer from 1 to {MAX_NUMBER:.0e} (got {text!r}).", hint=hint)
    return round(number)
