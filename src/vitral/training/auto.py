"""Choose a value for every setting that is "auto", each with a reason a person can check.

Without a time budget every choice is a function of dataset, settings and machine, never of measured speed.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from vitral.data.dataset import DatasetIndex, Item, class_counts, natural_channels
from vitral.data.decode import Header
from vitral.devices import choose_device, choose_precision
from vitral.errors import ConfigError
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.training.config import ResolvedConfig, TrainConfig, as_resolved
from vitral.training.events import Chosen
from vitral.weights.dialects.plan import ModelSpec

HEADERS_SAMPLED = 50
"""Images whose headers are read to learn their size and channels."""
MAX_SMALL_SIDE = 80
"""Images up to this side in pixels are small."""
FEW_IMAGES = 5000
MIN_PER_CLASS, MANY_PER_CLASS = 10, 1000
MAX_EPOCHS = 200
MAX_IMBALANCE = 3
_STEPS_FROM_SCRATCH, _STEPS_FROM_CHECKPOINT = 4000, 600
_LEARNING_RATES = {  # optimizer: from scratch, all weights of a checkpoint, a few weights of a checkpoint
    "sgd": (0.03, 0.01, 0.03),
    "adamw": (1e-3, 3e-4, 1e-3),
    "muon": (2e-3, 1e-4, 1e-3),
}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the choices depend on, besides the settings."""

    dataset: DatasetIndex
    train: Sequence[Item]
    headers: Sequence[Header]
    """Headers of some of the training images."""
    pretrained: ModelSpec | None
    """The checkpoint to start from, or the network that the caller built."""

    @property
    def images_per_class(self) -> float:
        return len(self.train) / max(1, len(self.dataset.classes))


def resolve(config: TrainConfig, facts: Facts) -> tuple[ResolvedConfig, tuple[Chosen, ...]]:
    """Return the settings with every "auto" replaced, and the choices with their reasons."""
    choices: list[Chosen] = []
    for choose in (  # each sees the choices before it
        choose_hardware,
        choose_input,
        choose_network,
        choose_tuning,
        choose_batch_size,
        choose_length,
        choose_rates,
        choose_loss,
    ):
        for name, (value, reason) in choose(config, facts).items():
            config = set_value(config, name, value)
            if reason:
                choices.append(Chosen(name=name, value=value, reason=reason))
    return as_resolved(config), tuple(choices)


def set_value(config: TrainConfig, name: str, value: object) -> TrainConfig:
    """Return a config with one dotted setting changed."""
    section, dot, rest = name.partition(".")
    return replace(config, **{section: replace(getattr(config, section), **{rest: value}) if dot else value})


Choices = Mapping[str, tuple[Any, str]]
"""A value and a reason by dotted name. A choice with an empty reason goes without saying."""


def choose_hardware(config: TrainConfig, facts: Facts) -> Choices:
    choices: dict[str, tuple[Any, str]] = {}
    device = choose_device(config.device)
    if config.device == "auto":
        choices["device"] = device.value, device.reason
    if config.precision == "auto":
        precision = choose_precision(device.value)
        choices["precision"] = precision.value, precision.reason
        if facts.pretrained is None and device.value == "cpu" and precision.value == "bfloat16":
            choices["precision"] = "float32", "narrow networks gain nothing from bfloat16 on a CPU"
    if config.workers == "auto":
        if device.value.startswith("cpu"):
            choices["workers"] = 0, "on a CPU the network needs all cores"
        else:
            cores = count_cores()
            choices["workers"] = min(8, max(0, cores - 1)), f"{cores} cores load images for {device.value}"
    return choices


def choose_input(config: TrainConfig, facts: Facts) -> Choices:
    choices: dict[str, tuple[Any, str]] = {}
    side = typical_side(facts.headers)
    if config.channels == "auto":
        choices["channels"] = _choose_channels(facts)
    if config.image_size == "auto":
        if facts.pretrained is not None:
            choices["image_size"] = facts.pretrained.config.image_size, "the checkpoint was trained at this size"
        else:
            choices["image_size"] = _choose_size(side, config.device)
    if config.resize == "auto":
        if facts.pretrained is not None:
            choices["resize"] = facts.pretrained.preprocess.resize, "as in the preprocessing of the checkpoint"
        elif side <= MAX_SMALL_SIDE:
            choices["resize"] = "squash", "small images keep all their pixels"
        else:
            choices["resize"] = "crop", "the center of a photo, at its own aspect"
    return choices


def _choose_channels(facts: Facts) -> tuple[int, str]:
    """Gray and RGB convert into each other; other channels are used as they are."""
    natural = natural_channels(facts.headers)
    if facts.pretrained is not None:
        channels = facts.pretrained.config.channels
        if channels == natural or {channels, natural} <= {1, 3}:
            return channels, "the checkpoint was trained with them"
    kind = {1: "are gray", 3: "have colors"}.get(natural, f"have {natural} channels")
    return natural, f"the images {kind}"


def _choose_size(side: int, device: str) -> tuple[int, str]:
    if side <= MAX_SMALL_SIDE:
        return min((28, 32, 64), key=lambda size: abs(size - side)), f"images have about {side} pixels per side"
    if device == "cpu":
        return 128, f"images have about {side} pixels per side; a CPU can afford 128"
    return 224, f"images have about {side} pixels per side"


def choose_network(config: TrainConfig, facts: Facts) -> Choices:
    if config.from_weights or config.model != "auto":
        return {}
    size, images = config.image_size, len(facts.train)
    assert size != "auto"
    side = min(size) if isinstance(size, tuple) else size
    if side <= MAX_SMALL_SIDE:
        patch = 7 if side % 7 == 0 else 8 if side % 8 == 0 and side >= 56 else 4
        return {"model": (f"vit-pico{patch}", f"a small network for {images:,} images of {side} pixels")}
    advice = f"; with only {images:,} images, --from a checkpoint gives far better results"
    advice = advice if images < FEW_IMAGES else ""
    if config.device == "cpu":
        return {"model": ("vit-ti16", f"the smallest network of the paper's family, for a CPU{advice}")}
    return {"model": ("vit-s16", f"trains from scratch in hours{advice}")}


def choose_tuning(config: TrainConfig, facts: Facts) -> Choices:
    if config.tune.what != "auto":
        return {}
    name, images = "tune.what", facts.images_per_class
    if not config.from_weights:
        return {name: ("all", "trained from scratch")}
    if config.objective != "classify":
        return {name: ("all", "without labels, all features are trained")}
    if images < MIN_PER_CLASS:
        return {name: ("head", f"only {images:.0f} images per class: train the head, freeze the rest")}
    if facts.pretrained is not None and isinstance(facts.pretrained.config, BiTConfig):
        return {name: ("all", "a BiT is fine-tuned as a whole, as in its paper")}
    if images < MANY_PER_CLASS or config.device == "cpu":
        return {name: ("lora", f"{images:.0f} images per class: train low-rank updates, freeze the rest")}
    return {name: ("all", f"{images:.0f} images per class are enough to train all weights")}


def choose_batch_size(config: TrainConfig, facts: Facts) -> Choices:
    if config.batch_size != "auto":
        return {}
    images, largest, size = len(facts.train), 128 if config.device == "cpu" else 512, 16
    while size * 2 <= largest and size * 40 <= images:
        size *= 2
    size = max(config.accumulate, size // config.accumulate * config.accumulate)
    enough = f"at least 20 steps per epoch with {images:,} images"
    return {"batch_size": (size, enough if size > 16 else f"small, because there are only {images:,} images")}


def choose_length(config: TrainConfig, facts: Facts) -> Choices:
    assert config.batch_size != "auto"
    choices: dict[str, tuple[Any, str]] = {}
    steps_per_epoch = max(1, len(facts.train) // config.batch_size)
    epochs = config.epochs
    if config.steps is not None:
        epochs = config.steps / steps_per_epoch
        choices["epochs"] = epochs, f"{config.steps} steps, {steps_per_epoch} per epoch"
    if epochs == "auto":
        if config.minutes is not None:
            return {}  # planned when the speed is known
        steps = _STEPS_FROM_CHECKPOINT if config.from_weights else _STEPS_FROM_SCRATCH
        epochs = min(MAX_EPOCHS, max(3, round(steps / steps_per_epoch)))
        choices["epochs"] = epochs, f"about {epochs * steps_per_epoch} steps, {steps_per_epoch} per epoch"
    if config.optim.warmup_steps == "auto":
        steps = float(epochs) * steps_per_epoch
        warmup = min(max(1, round(0.05 * steps)), max(0, round(steps) - 1))
        choices["optim.warmup_steps"] = warmup, "5% of all steps"
    return choices


def choose_rates(config: TrainConfig, facts: Facts) -> Choices:
    choices: dict[str, tuple[Any, str]] = {}
    optimizer, is_whole = config.optim.name, config.tune.what == "all"
    if config.optim.layer_decay == "auto":
        is_vit = facts.pretrained is not None and isinstance(facts.pretrained.config, ViTConfig)
        if config.from_weights and is_vit and is_whole:  # BiT's paper uses one learning rate for all layers
            choices["optim.layer_decay"] = 0.75, "lower layers of a trained network should hardly change"
        else:
            choices["optim.layer_decay"] = 1.0, ""
    if config.optim.lr == "auto":
        scratch, everything, few = _LEARNING_RATES[optimizer]
        if not config.from_weights:
            choices["optim.lr"] = scratch, f"usual for {optimizer} from scratch"
        elif is_whole:
            choices["optim.lr"] = everything, f"usual for {optimizer} on trained weights"
        else:
            choices["optim.lr"] = few, f"few weights are trained ({config.tune.what})"
    return choices


def choose_loss(config: TrainConfig, facts: Facts) -> Choices:
    choices: dict[str, tuple[Any, str]] = {}
    is_multi_label = facts.dataset.multi_label
    if config.loss.kind == "auto":
        choices["loss.kind"] = ("sigmoid", "images may have several labels") if is_multi_label else ("softmax", "")
    elif config.loss.kind == "softmax" and is_multi_label:
        raise ConfigError(
            "loss.kind=softmax needs one label per image, but this dataset has several.", hint="Use loss.kind=sigmoid."
        )
    if config.loss.class_weights == "auto":
        choices["loss.class_weights"] = _choose_class_weights(config, facts)
    return choices


def _choose_class_weights(config: TrainConfig, facts: Facts) -> tuple[str, str]:
    if config.objective != "classify":
        return "none", ""
    if facts.dataset.multi_label:
        return "none", "images may have several labels"
    counts = [count for count in class_counts(facts.train, len(facts.dataset.classes)) if count]
    ratio = max(counts, default=1) / min(counts, default=1)
    if ratio > MAX_IMBALANCE:
        return "balanced", f"the largest class has {ratio:.0f} times the images of the smallest"
    return "none", "the classes have about the same number of images"


def typical_side(headers: Sequence[Header]) -> int:
    """Return the median short side of some images, in pixels."""
    sides = [min(header.height, header.width) for header in headers]
    if not sides:
        raise ConfigError("None of the sampled images can be read.", hint="Run `vitral data` to see why.")
    return int(median(sides))


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
