"""What a training run costs before it is begun: operations, memory, and time on machines that are not here.

Counted as the paper counts (by its table 6): convolutions, matrix products and attention products, two operations for
each multiply and add, and a training step as three forward passes. Without torch, unless this machine is measured.
"""

import re
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from vitral.errors import ConfigError, did_you_mean
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.model.cost import Cost, count_cost
from vitral.model.sizes import canonical_name, named_config

HOUR, DAY = 3600, 86_400
FORWARD_PASSES = 3
"""Of which two are the way back."""
JFT, I21K = 303_000_000, 14_000_000
LEAST, MOST = 1e-9, 1e15
"""Of any number that is given: nobody plans with others, and time and cost stay finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator, by its data sheet."""

    flops: float
    """Of 16-bit matrix products with sums in 32 bits, dense, in a second."""
    gibibytes: int


DEVICES = {
    "tpuv3-core": Device(flops=61.5e12, gibibytes=16),
    "v100": Device(flops=125e12, gibibytes=32),
    "a100": Device(flops=312e12, gibibytes=80),
    "h100": Device(flops=989e12, gibibytes=80),
    "rtx3090": Device(flops=71e12, gibibytes=24),
    "rtx4090": Device(flops=165e12, gibibytes=24),
}
UTILISATION = 0.4
"""Of the data sheet: the paper's L/16 reached 0.43 of it on TPUv3, its H/14 0.32."""

# (model, epochs on JFT): exaFLOPs of table 6.
TABLE_6: dict[tuple[str, float], int] = {
    ("vit-b32", 7): 55, ("vit-b16", 7): 224, ("vit-l32", 7): 196, ("vit-l16", 7): 783, ("vit-l16", 14): 1567,
    ("vit-h14", 14): 4262, ("bit-r50x1", 7): 50, ("bit-r50x2", 7): 199, ("bit-r101x1", 7): 96, ("bit-r152x1", 7): 141,
    ("bit-r152x2", 7): 563, ("bit-r152x2", 14): 1126, ("bit-r200x3", 14): 3306, ("r50-vit-b32", 7): 106,
    ("r50-vit-b16", 7): 274, ("r50-vit-l32", 7): 246, ("r50-vit-l16", 7): 859, ("r50-vit-l16", 14): 1668,
}  # fmt: skip
# (model, pictures, epochs): TPUv3-core-days of table 2.
TABLE_2: dict[tuple[str, int, float], int] = {
    ("vit-h14", JFT, 14): 2500, ("vit-l16", JFT, 14): 680, ("vit-l16", I21K, 90): 230,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A run on some devices of one kind."""

    device: str
    devices: int
    images_per_second: float
    """Of all of them together."""
    seconds: float
    largest_batch: int | None
    """That one device has memory for, in float32 with Adam; 0: not even one image fits. None: not known."""
    price: float | None
    """Of one device for an hour, where it was said."""
    cost: float | None
    """Of all of them for the whole run, by that price."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    model: str
    image_size: tuple[int, int]
    images: int
    epochs: float
    batch_size: int
    parameters: int
    forward_flops: int
    """Of one image."""
    training_exaflops: float
    memory_bytes: int
    """For a batch of ``batch_size`` on one device: weights, gradients, Adam's moments, activations, in float32."""
    tpuv3_core_days: float
    """At ``utilisation`` of the data sheet."""
    utilisation: float
    estimates: tuple[Estimate, ...]
    paper_exaflops: float | None
    """Of table 6, where it has this run."""
    paper_core_days: float | None
    """Of table 2."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(
    model: str,
    *,
    images: int,
    epochs: float,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    batch_size: int = 32,
    device: str | None = None,
    devices: int = 1,
    images_per_second: float | None = None,
    price: float | None = None,
) -> Plan:
    """The cost of training ``model`` on so many images. ``device`` is one of DEVICES, "here" (which is measured), or
    None for all of them; ``images_per_second`` of one device overrules its data sheet, ``price`` is that of one device
    for an hour."""
    name = canonical_name(model)
    _check_whole(images=images, batch_size=batch_size, devices=devices)
    _check_numbers(epochs=epochs, images_per_second=images_per_second, price=price)
    if device not in (None, "here", *DEVICES):
        known = ", ".join((*DEVICES, "here"))
        hint = did_you_mean(str(device), DEVICES) or "Or say images_per_second of your device."
        raise ConfigError(f"device={device!r} must be one of {known}.", hint=hint)
    if images_per_second is not None and device is None:
        device = "given"
    if price is not None and device is None:
        raise ConfigError("price is that of one kind of device, and none is named.", hint="Say which with --device.")
    fields = {"image_size": image_size, "num_classes": num_classes}
    config = named_config(name, **{key: value for key, value in fields.items() if value is not None})
    cost = count_cost(config)
    flops = FORWARD_PASSES * cost.forward_flops * images * epochs
    if device == "here" and images_per_second is None:
        images_per_second = measure_here(config, batch_size=min(batch_size, 8))
    estimates = [
        estimate(cost, kind, devices, images * epochs, images_per_second, price)
        for kind in ([device] if device else list(DEVICES))
    ]
    is_papers = config.image_hw == (224, 224)
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
        tpuv3_core_days=flops / (DEVICES["tpuv3-core"].flops * UTILISATION) / DAY,
        utilisation=UTILISATION,
        estimates=tuple(estimates),
        paper_exaflops=TABLE_6.get((name, epochs)) if is_papers and images == JFT else None,
        paper_core_days=TABLE_2.get((name, images, epochs)) if is_papers else None,
    )


def estimate(
    cost: Cost, kind: str, count: int, images: float, images_per_second: float | None, price: float | None
) -> Estimate:
    sheet = DEVICES.get(kind)
    if images_per_second is None:
        assert sheet is not None
        images_per_second = sheet.flops * UTILISATION / (FORWARD_PASSES * cost.forward_flops)
    largest = None
    if sheet is not None:
        largest = max(0, (sheet.gibibytes * 2**30 - cost.training_bytes(0)) // cost.activation_bytes)
    seconds = images / (images_per_second * count)
    return Estimate(
        device=kind,
        devices=count,
        images_per_second=images_per_second * count,
        seconds=seconds,
        largest_batch=largest,
        price=price,
        cost=None if price is None else price * count * seconds / HOUR,
    )


def measure_here(config: ViTConfig | BiTConfig, *, batch_size: int) -> float:
    """Images a second of a training step on this machine: the fastest of three, after one that does not count."""
    import torch

    from vitral.devices import choose_device, choose_precision
    from vitral.model.network import build

    device = torch.device(choose_device().value)
    precision = "float32" if device.type == "cpu" else choose_precision(device.type).value  # as a run decides
    network = build(config).to(device).train()
    images = torch.randn(batch_size, config.channels, *config.image_hw, device=device)
    seconds = []
    for _ in range(4):
        start = perf_counter()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            answers = network(images)
        answers.float().square().mean().backward()
        first = next(network.parameters()).grad
        assert first is not None
        first.sum().item()  # waits for the device
        seconds.append(perf_counter() - start)
        network.zero_grad()
    return batch_size / min(seconds[1:])


def count_from_word(word: str, what: str) -> int:
    """'303M', '1.28M', '50k', '1e6', '4,000' -> a whole number."""
    digits = r"[0-9]{1,3}(?:[,_][0-9]{3}){1,5}|[0-9]{1,15}"  # a comma that stands for a point must not be passed over
    match = re.fullmatch(rf"((?:{digits})(?:\.[0-9]{{1,15}})?(?:[eE][0-9]{{1,2}})?)\s*([kKmMgGbB]?)", word.strip())
    scale = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}[match[2].lower()] if match else 0
    number = float(re.sub("[,_]", "", match[1])) * scale if match else 0.0
    if not 1 <= number <= MOST or not round(number, 3).is_integer():
        raise ConfigError(
            f"{what} {word!r} must be a whole number from 1 to {MOST:.0e}.",
            hint="Such as 50000, 50,000, 50k or 1.28M.",
        )
    return round(number)


def _check_whole(**numbers: int) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
            raise ConfigError(f"{name}={value!r} must be a whole number from 1 to {MOST:.0e}.")


def _check_numbers(**numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST <= value <= MOST:
            raise ConfigError(f"{name}={value!r} must be a number from {LEAST:.0e} to {MOST:.0e}.")
