"""Choose a value for every setting that is "auto", each with a reason a person can check.

Without a time budget every choice is a function of dataset, settings and machine, never of measured speed.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median
from typing import Any

from vitral.data.dataset import DatasetIndex, Item, class_counts, natural_channels
from vitral.data.decode import Header
from vitral.devices import choose_device, choose_precision, find_memory, find_world
from vitral.errors import ConfigError
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.model.cost import FLOAT_BYTES, count_cost
from vitral.model.sizes import named_config
from vitral.training.config import ResolvedConfig, TrainConfig, Tune, as_resolved
from vitral.training.events import Chosen
from vitral.weights.dialects.plan import ModelSpec

HEADERS_SAMPLED = 50
"""Images whose headers are read to learn their size and channels."""
MAX_SMALL_SIDE = 80
"""Images up to this side in pixels are small."""
MAX_DEFAULT_SIDE = 224
"""A checkpoint that was trained with larger images is used at about this side in pixels."""
FEW_IMAGES = 5000
TOKEN_BATCH = 32
"""Images per step when the last blocks are trained on tokens."""
MANY_PER_CLASS = 1000
MAX_EPOCHS = 200
MIN_BFLOAT16_WIDTH = 128
"""Narrower networks train faster in float32 on a CPU (docs/decisions/speed.md)."""
MAX_IMBALANCE = 3
_STEPS_FROM_SCRATCH, _STEPS_FROM_CHECKPOINT = 4000, 600
_FEWEST_STEPS, _EPOCHS_OF_LAST_BLOCKS = 100, 6
_LEARNING_RATES = {  # optimizer: from scratch, all weights of a checkpoint, its head or LoRA, its last blocks
    "sgd": (0.03, 0.01, 0.03, 0.01),
    "adamw": (1e-3, 3e-4, 1e-3, 1.2e-4),
    "muon": (2e-3, 1e-4, 1e-3, 1e-4),
}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts that the choices depend on, besides the settings."""

    dataset: DatasetIndex
    train: Sequence[Item]
    headers: Sequence[Header]
    """Headers of some of the training images."""
    pretrained: ModelSpec | None
    """The checkpoint to start from, or the network that the caller built."""
    has_validation: bool = True
    """Whether there are validation images other than the training images."""
    is_validation_carved: bool = False
    """Whether they were taken from the training images."""


def resolve(config: TrainConfig, facts: Facts) -> tuple[ResolvedConfig, tuple[Chosen, ...]]:
    """Return the settings with every "auto" replaced, and the choices with their reasons."""
    typical_side(facts.headers)  # raises if no image can be read
    choices: list[Chosen] = []
    for name, choose in _CHOICES.items():
        choice = choose(config, facts) if attrgetter(name)(config) == "auto" else None
        if choice is None:
            continue
        value, reason = choice
        section, _, field = name.rpartition(".")
        change = {section: replace(getattr(config, section), **{field: value})} if section else {field: value}
        config = replace(config, **change)
        if reason:
            choices.append(Chosen(name=name, value=value, reason=reason))
    if config.tune.what == "probe" and not config.starts_with_probe:
        raise ConfigError(
            "tune.what=probe needs labels and a checkpoint, and tune.probe=true.", hint="Pass --from MODEL."
        )
    if config.tune.what == "probe" and (config.steps is not None or config.epochs):
        raise ConfigError(
            "tune.what=probe fits a linear probe and takes no training steps.", hint="Drop --steps and --epochs."
        )
    if config.tune.views and not _trains_on_tokens(config, facts):
        raise ConfigError(
            f"tune.views={config.tune.views} needs a ViT of which --tune last-blocks trains a part after a probe, "
            "a validation split, one image size and no mixing.",
            hint="Drop --tune.views.",
        )
    if config.refit and config.starts_with_probe and not facts.is_validation_carved:
        raise ConfigError("refit needs validation images taken from the training images.", hint="Drop --refit.")
    if config.tune.dropped != Tune().dropped and not config.tune.views:
        raise ConfigError(
            f"tune.dropped={config.tune.dropped:g} leaves patches out of cached tokens, but this run caches none.",
            hint="Drop --tune.dropped.",
        )
    if config.loss.kind == "softmax" and facts.dataset.multi_label:
        raise ConfigError(
            "loss.kind=softmax needs one label per image, but this dataset has several.", hint="Use loss.kind=sigmoid."
        )
    return as_resolved(config), tuple(choices)


Choice = tuple[Any, str]
"""A value and the reason for it. A choice with an empty reason goes without saying."""


def _device(config: TrainConfig, facts: Facts) -> Choice:
    device = choose_device(config.device)
    return device.value, device.reason


def _precision(config: TrainConfig, facts: Facts) -> Choice:
    return training_precision(config.device, _network(config, facts))


def training_precision(device: str, network: ViTConfig | BiTConfig | None) -> Choice:
    """Return bfloat16 where the hardware multiplies it natively, except for networks too narrow to gain on a CPU."""
    precision = choose_precision(device)
    width = network.width if isinstance(network, ViTConfig) else MIN_BFLOAT16_WIDTH
    if device == "cpu" and precision.value == "bfloat16" and width < MIN_BFLOAT16_WIDTH:
        return "float32", f"a network {width} wide gains nothing from bfloat16 on a CPU"
    return precision.value, precision.reason


def _workers(config: TrainConfig, facts: Facts) -> Choice:
    if config.device == "cpu":
        return 0, "on a CPU, threads load the next batch while the network computes"
    cores = count_cores()
    return min(8, max(0, cores - 1)), f"{cores} cores load images for {config.device}"


def _channels(config: TrainConfig, facts: Facts) -> Choice:
    """Gray and RGB convert into each other; other channels are used as they are."""
    natural = natural_channels(facts.headers)
    if facts.pretrained is not None:
        channels = facts.pretrained.config.channels
        if channels == natural or {channels, natural} <= {1, 3}:
            return channels, "those of the checkpoint" if config.from_weights else "those of your network"
    kind = {1: "are gray", 3: "have colors"}.get(natural, f"have {natural} channels")
    return natural, f"the images {kind}"


def _parallel(config: TrainConfig, facts: Facts) -> Choice:
    """FSDP talks more than DDP, so that it is the choice for models that DDP cannot hold."""
    world = find_world()
    if world.size == 1:
        return "ddp", ""
    memory, needed = find_memory(config.device, world), _training_bytes(config, facts)
    if memory is None or needed is None:
        return "ddp", f"{world.size} processes; the memory of {config.device} is unknown"
    shown = f"weights, gradients and moments take {needed / 2**30:.1f} of {memory / 2**30:.1f} GiB per process"
    return ("fsdp" if needed > memory else "ddp"), shown


def _training_bytes(config: TrainConfig, facts: Facts) -> int | None:
    """Return the memory of weights, gradients, moments and averages in one process; None if the network is unknown."""
    network = _network(config, facts)
    if network is None:
        return None
    parameters, fraction = count_cost(network).parameters, 1.0
    if config.tune.what != "all":
        blocks = config.tune.blocks if config.tune.what == "last-blocks" else 0
        fraction = blocks / network.blocks if isinstance(blocks, int) else 1.0
    moments = {"sgd": 1}.get(config.optim.name, 2)
    return int(FLOAT_BYTES * parameters * (1 + bool(config.ema) + fraction * (1 + moments)))


def _network(config: TrainConfig, facts: Facts) -> ViTConfig | BiTConfig | None:
    """Return the network that will be trained; None if the settings do not fit, which is reported where it is built."""
    if facts.pretrained is not None:
        return facts.pretrained.config
    try:
        network = named_config(config.model, image_size=config.image_size, num_classes=len(facts.dataset.classes))
        return replace(network, **{name: value for name, value in config.network.items() if name != "stem"})
    except (ConfigError, TypeError):  # TypeError: an unknown setting
        return None


def _image_size(config: TrainConfig, facts: Facts) -> Choice:
    if facts.pretrained is not None:
        return _pretrained_size(facts.pretrained.config, by_default=bool(config.from_weights))
    side = typical_side(facts.headers)
    reason = f"images have about {side} pixels per side"
    size = 224
    if side <= MAX_SMALL_SIDE:
        size = min((28, 32, 64), key=lambda size: abs(size - side))
    elif config.device == "cpu":
        size, reason = 128, f"{reason}; a CPU can afford 128"
    fitting = _fit_patches(size, config)
    return (size, reason) if fitting == size else (fitting, f"{reason}; {config.model} needs a multiple of its patches")


def _fit_patches(side: int, config: TrainConfig) -> int | tuple[int, int]:
    """Return the size nearest to a side that the patches of the requested model divide."""
    patch = config.network.get("patch_size")
    if config.model == "auto" or "stem" in config.network or not isinstance(patch, int | None) or patch == 0:
        return side
    steps = named_config(config.model).step_hw if patch is None else (patch, patch)
    height, width = (step * max(1, round(side / step)) for step in steps)
    return height if height == width else (height, width)


def _pretrained_size(config: ViTConfig | BiTConfig, *, by_default: bool) -> Choice:
    """Networks trained at large sizes are used at about 224 pixels, where a step costs a fraction."""
    if by_default and isinstance(config, ViTConfig) and min(config.image_hw) > MAX_DEFAULT_SIDE:
        height, width = (MAX_DEFAULT_SIDE // step * step for step in config.step_hw)
        if height and width:
            cost = (config.image_hw[0] * config.image_hw[1]) / (height * width)
            trained = f"{config.image_hw[0]} x {config.image_hw[1]} pixels"
            reason = f"{trained}, as the checkpoint was trained, would cost {cost:.1f} times as much"
            return height if height == width else (height, width), reason
    return config.image_size, "the size of the checkpoint" if by_default else "the size of your network"


def _resize(config: TrainConfig, facts: Facts) -> Choice:
    if facts.pretrained is not None:
        return facts.pretrained.preprocess.resize, "as in the preprocessing of the checkpoint"
    if typical_side(facts.headers) <= MAX_SMALL_SIDE:
        return "squash", "small images keep all their pixels"
    return "crop", "the center of a photo, at its own aspect"


def _model(config: TrainConfig, facts: Facts) -> Choice | None:
    if config.from_weights:
        return None
    size, images = config.image_size, len(facts.train)
    assert size != "auto"
    side = min(size) if isinstance(size, tuple) else size
    if side <= MAX_SMALL_SIDE:
        patch = 7 if side % 7 == 0 else 8 if side % 8 == 0 and side >= 56 else 4
        return f"vit-pico{patch}", f"a small network for {images:,} images of {side} pixels"
    advice = f"; with only {images:,} images, --from a checkpoint gives far better results"
    advice = advice if images < FEW_IMAGES else ""
    if config.device == "cpu":
        return "vit-ti16", f"the smallest network of the paper's family, for a CPU{advice}"
    return "vit-s16", f"trains from scratch in hours{advice}"


def _tune_what(config: TrainConfig, facts: Facts) -> Choice:
    images = len(facts.train) / max(1, len(facts.dataset.classes))  # per class
    if not config.from_weights:
        return "all", "trained from scratch"
    if config.objective != "classify":
        return "all", "without labels, all features are trained"
    if not facts.has_validation:
        return "probe", "there are too few images to judge whether more training helps"
    if facts.pretrained is not None and isinstance(facts.pretrained.config, BiTConfig):
        return "all", "a BiT is fine-tuned as a whole, as in its paper"
    if images < MANY_PER_CLASS or config.device == "cpu":
        return "last-blocks", f"{images:.0f} images per class: the lower blocks stay as they are"
    return "all", f"{images:.0f} images per class are enough to train all weights"


def _tune_blocks(config: TrainConfig, facts: Facts) -> Choice:
    if facts.pretrained is None or config.tune.what != "last-blocks":
        return 1, ""
    blocks = facts.pretrained.config.blocks
    return max(1, round(blocks / 3)), f"a third of {blocks}"


def _tune_views(config: TrainConfig, facts: Facts) -> Choice:
    if not _trains_on_tokens(config, facts):
        return 0, ""
    return (2, "plain and mirrored") if config.augment.flip else (1, "the dataset is not mirrored")


def _trains_on_tokens(config: TrainConfig, facts: Facts) -> bool:
    """Return whether the lower blocks are frozen and see the same images at every step."""
    pretrained = None if facts.pretrained is None else facts.pretrained.config
    is_partial = isinstance(pretrained, ViTConfig) and config.tune.blocks != pretrained.blocks and not pretrained.merge
    is_mixed = config.resize == "native" or config.mix.mixup or config.mix.cutmix
    has_probe = config.starts_with_probe and facts.has_validation
    return config.tune.what == "last-blocks" and is_partial and has_probe and not is_mixed


def _refit(config: TrainConfig, facts: Facts) -> Choice:
    if not config.starts_with_probe or not facts.is_validation_carved:
        return False, ""
    images = len(facts.train)
    return images < FEW_IMAGES, f"{images:,} training images" if images < FEW_IMAGES else ""


def _batch_size(config: TrainConfig, facts: Facts) -> Choice:
    if config.tune.views not in (0, "auto"):
        size = max(config.accumulate, TOKEN_BATCH // config.accumulate * config.accumulate)
        return size, "usual for the last blocks"
    images, largest, size = len(facts.train), 128 if config.device == "cpu" else 512, 16
    while size * 2 <= largest and size * 40 <= images:
        size *= 2
    size = max(config.accumulate, size // config.accumulate * config.accumulate)
    enough = f"at least 20 steps per epoch with {images:,} images"
    return size, enough if size > 16 else f"small, because there are only {images:,} images"


def _epochs(config: TrainConfig, facts: Facts) -> Choice | None:
    per_epoch = _steps_per_epoch(config, facts)
    if config.tune.what == "probe":
        return 0, ""
    if config.steps is not None:
        return config.steps / per_epoch, f"{config.steps} steps, {per_epoch} per epoch"
    if config.minutes is not None:
        return None  # planned when the speed is known
    steps = _STEPS_FROM_CHECKPOINT if config.from_weights else _STEPS_FROM_SCRATCH
    if config.tune.what == "last-blocks":
        steps = min(steps, max(_FEWEST_STEPS, _EPOCHS_OF_LAST_BLOCKS * per_epoch))
    epochs = min(MAX_EPOCHS, max(3, round(steps / per_epoch)))
    return epochs, f"about {epochs * per_epoch} steps, {per_epoch} per epoch"


def _warmup_steps(config: TrainConfig, facts: Facts) -> Choice | None:
    if config.epochs == "auto":
        return None
    steps = float(config.epochs) * _steps_per_epoch(config, facts)
    return min(max(1, round(0.05 * steps)), max(0, round(steps) - 1)), "5% of all steps" if steps else ""


def _steps_per_epoch(config: TrainConfig, facts: Facts) -> int:
    assert config.batch_size != "auto"
    return max(1, len(facts.train) // config.batch_size)


def _layer_decay(config: TrainConfig, facts: Facts) -> Choice:
    is_vit = facts.pretrained is not None and isinstance(facts.pretrained.config, ViTConfig)
    if config.from_weights and is_vit and config.tune.what == "all":  # BiT's paper has one learning rate for all layers
        return 0.75, "lower layers of a trained network should hardly change"
    return 1.0, ""


def _lr(config: TrainConfig, facts: Facts) -> Choice:
    optimizer = config.optim.name
    scratch, everything, few, blocks = _LEARNING_RATES[optimizer]
    if not config.from_weights:
        return scratch, f"usual for {optimizer} from scratch"
    if config.tune.what == "all":
        return everything, f"usual for {optimizer} on trained weights"
    if config.tune.what == "last-blocks":
        return blocks, f"usual for {optimizer} on trained blocks"
    return few, "" if config.tune.what == "probe" else f"few weights are trained ({config.tune.what})"


def _loss_kind(config: TrainConfig, facts: Facts) -> Choice:
    return ("sigmoid", "images may have several labels") if facts.dataset.multi_label else ("softmax", "")


def _class_weights(config: TrainConfig, facts: Facts) -> Choice:
    if config.objective != "classify":
        return "none", ""
    if facts.dataset.multi_label:
        return "none", "images may have several labels"
    counts = [count for count in class_counts(facts.train, len(facts.dataset.classes)) if count]
    ratio = max(counts, default=1) / min(counts, default=1)
    if ratio > MAX_IMBALANCE:
        return "balanced", f"the largest class has {ratio:.0f} times the images of the smallest"
    return "none", "the classes have about the same number of images"


_CHOICES: dict[str, Callable[[TrainConfig, Facts], Choice | None]] = {  # in this order: each sees those before it
    "device": _device,
    "workers": _workers,
    "compile": lambda config, facts: (False, ""),  # measured before the first step
    "channels": _channels,
    "image_size": _image_size,
    "resize": _resize,
    "model": _model,
    "precision": _precision,
    "tune.what": _tune_what,
    "tune.blocks": _tune_blocks,
    "tune.views": _tune_views,
    "parallel": _parallel,
    "refit": _refit,
    "near_duplicates": lambda config, facts: ("ignore", ""),  # searched before the dataset is split
    "batch_size": _batch_size,
    "epochs": _epochs,
    "optim.warmup_steps": _warmup_steps,
    "optim.layer_decay": _layer_decay,
    "optim.lr": _lr,
    "loss.kind": _loss_kind,
    "loss.class_weights": _class_weights,
}


def typical_side(headers: Sequence[Header]) -> int:
    """Return the median short side of some images, in pixels."""
    sides = [min(header.height, header.width) for header in headers]
    if not sides:
        raise ConfigError("None of the sampled images can be read.", hint="Run `vitral data` to see why.")
    return int(median(sides))


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
