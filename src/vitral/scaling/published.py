"""Published figures of large runs, and what our prediction gives for the same setting.

The speed of one device is taken from the publication, or from a smaller run in it; only what many devices add to it
is predicted. Bandwidths are those of the publication.
"""

from collections.abc import Callable
from dataclasses import dataclass

from vitral.model.config import ViTConfig
from vitral.model.cost import count_cost
from vitral.model.sizes import named_config
from vitral.scaling.hardware import DEVICES, Assumptions, Device
from vitral.scaling.memory import Setup
from vitral.scaling.simulation import FORWARD_PASSES, availability, predict

P100 = Device(flops=21.2e12, gibibytes=16, per_node=8, inside=20e9, outside=6.25e9 / 8)
"""Big Basin of Goyal et al.: eight GPUs with NVLink per server, and 50 Gbit/s Ethernet between servers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """A published figure and how to predict it."""

    name: str
    figure: str
    published: float
    predict: Callable[[], float]
    tolerance: float
    """Accepted absolute difference, in the unit of the figure."""
    source: str

    @property
    def predicted(self) -> float:
        return self.predict()


def _imagenet_in_an_hour() -> float:
    """Return the efficiency of 256 GPUs relative to 8, as the paper reports it."""
    config = named_config("bit-r50x1", num_classes=1000)  # the same convolutions as ResNet-50, within 2%
    assumed = Assumptions(overlap=0.6, jitter=0.02, device_hours_between_failures=1e12, save_wait=0)
    # 29 hours for 90 epochs on 8 GPUs: 1.28 M * 90 / (29 * 3600 * 8) images per second and GPU, with communication.
    speed = 1.281167e6 * 90 / (29 * 3600 * 8)
    runs = (predict(config, Setup(parallel="ddp", devices=n, optimizer="sgd"), P100, 32, assumed,
                    images_per_second=speed) for n in (8, 256))  # fmt: skip
    eight, many = runs
    return many.efficiency / eight.efficiency


def _llama_availability() -> float:
    """Return the part of the time that trains, with 419 failures in 54 days.

    Ten minutes between checkpoints and ten for a restart are our assumptions; the publication has no figures for them.
    """
    between = 54 * 24 * 3600 / 419
    return availability(600.0, 5.0, between, 600.0)


def _vit_22b_tokens() -> float:
    """Return the tokens per second and TPUv4 chip at the utilization that the paper reports."""
    config = ViTConfig(width=6144, depth=48, heads=48, mlp_width=24_576, patch_size=14, num_classes=0)
    cost = count_cost(config)
    return DEVICES["tpuv4"].flops * 0.549 / (FORWARD_PASSES * cost.forward_flops) * cost.tokens


PUBLISHED = (
    PublishedRun(
        name="ResNet-50 on 256 P100",
        figure="speed per GPU relative to 8 GPUs",
        published=0.90,
        predict=_imagenet_in_an_hour,
        tolerance=0.08,
        source="Goyal et al. 2017, Accurate, Large Minibatch SGD, arXiv:1706.02677 (abstract: about 90%)",
    ),
    PublishedRun(
        name="Llama 3 on 16,384 H100",
        figure="part of the time that trains",
        published=0.90,
        predict=_llama_availability,
        tolerance=0.06,
        source="Llama Team 2024, The Llama 3 Herd of Models, arXiv:2407.21783 (section 3.3.4: over 90%)",
    ),
    PublishedRun(
        name="ViT-22B on 1,024 TPUv4",
        figure="tokens per second and chip",
        published=1150,
        predict=_vit_22b_tokens,
        tolerance=60,
        source="Dehghani et al. 2023, Scaling ViT to 22 Billion Parameters, arXiv:2302.05442 (at its 54.9% MFU)",
    ),
)
