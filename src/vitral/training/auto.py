"""What a run decides by itself, each with a reason a person can check.

Without a time budget every decision is a function of data, settings and machine, never of measured speed.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from vitral.data.dataset import DatasetIndex, Item, counts, natural_channels, sample_headers
from vitral.devices import choose_device, choose_precision
from vitral.errors import ConfigError
from vitral.model.bit_config import BiTConfig
from vitral.training.config import TrainConfig
from vitral.training.events import Chosen

SMALL = 80
_LOOKED_AT = 50
_STEPS_FROM_SCRATCH, _STEPS_FROM_WEIGHTS = 4000, 600
_MOST_EPOCHS = 200
_FEW = 5000
_LR = {  # optimizer: from scratch, all weights of a checkpoint, a few weights
    "sgd": (0.03, 0.01, 0.03),
    "adam": (1e-3, 3e-4, 1e-3),
    "adamw": (1e-3, 3e-4, 1e-3),
    "muon": (2e-3, 1e-4, 1e-3),
}


class Decisions:
    """Settles every "auto" of a config, in an order in which each can see those before it."""

    def __init__(self, config: TrainConfig, data: DatasetIndex, train: Sequence[Item], held: Any | None):
        self.config, self.data, self.train, self.held = config, data, train, held
        self.made: list[Chosen] = []

    def run(self) -> tuple[TrainConfig, list[Chosen]]:
        for settle in (
            self.place,
            self.picture,
            self.network,
            self.tuning,
            self.batch,
            self.length,
            self.rates,
            self.weights,
        ):
            settle()
        return self.config, self.made

    def decide(self, name: str, value: Any, reason: str) -> None:
        section, dot, part = name.partition(".")
        changes = {section: replace(getattr(self.config, section), **{part: value}) if dot else value}
        self.config = replace(self.config, **changes)
        self.made.append(Chosen(name=name, value=value, reason=reason))

    def is_open(self, name: str) -> bool:
        section, dot, part = name.partition(".")
        value = getattr(self.config, section)
        return (getattr(value, part) if dot else value) == "auto"

    # ---- one after the other ----

    def place(self) -> None:
        device = choose_device(self.config.device)
        if self.config.device == "auto":
            self.decide("device", device.value, device.reason)
        if self.is_open("precision"):
            precision = choose_precision(device.value)
            small = self.held is None and device.value == "cpu"
            if small and precision.value == "bfloat16":
                self.decide("precision", "float32", "narrow networks gain nothing from bfloat16 on a CPU")
            else:
                self.decide("precision", precision.value, precision.reason)
        if self.is_open("workers"):
            cores = _cores()
            if self.config.device.startswith("cpu"):
                self.decide("workers", 0, "on a CPU the network itself needs all cores")
            else:
                self.decide("workers", min(8, max(0, cores - 1)), f"{cores} cores feed the {self.config.device}")

    def picture(self) -> None:
        if self.is_open("channels"):
            self.decide("channels", *self.bands())
        side = typical_side(self.train)
        if self.is_open("image_size"):
            if self.held is not None:
                size = self.held.model.config.image_size
                self.decide("image_size", size, "what the checkpoint was trained on")
            else:
                self.decide("image_size", *self.size_from_scratch(side))
        if self.is_open("resize"):
            if self.held is not None:
                self.decide("resize", self.held.preprocess.resize, "as the checkpoint's preprocessing")
            elif side <= SMALL:
                self.decide("resize", "squash", "small pictures lose nothing that way")
            else:
                self.decide("resize", "crop", "the centre of a photo, its aspect kept")

    def bands(self) -> tuple[int, str]:
        """Grey and colours can be made of each other; other bands are what the pictures have."""
        natural = natural_channels(sample_headers(self.train, _LOOKED_AT))
        if self.held is not None:
            own = self.held.model.config.channels
            if own == natural or {own, natural} <= {1, 3}:
                return own, "what the checkpoint was trained on"
        kind = {1: "are grey", 3: "are colour"}.get(natural, f"have {natural} bands")
        return natural, f"the pictures {kind}"

    def size_from_scratch(self, side: int) -> tuple[int, str]:
        if side <= SMALL:
            size = min((28, 32, 64), key=lambda candidate: abs(candidate - side))
            return size, f"pictures are about {side} pixels"
        if self.config.device == "cpu":
            return 128, f"pictures are about {side} pixels; a CPU can afford 128"
        return 224, f"pictures are about {side} pixels"

    def network(self) -> None:
        if self.config.from_weights or self.config.model != "auto":
            return
        size = self.config.image_size
        side = min(size) if isinstance(size, tuple) else int(size)
        if side <= SMALL:
            patch = 7 if side % 7 == 0 else 8 if side % 8 == 0 and side >= 56 else 4
            self.decide(
                "model", f"vit-pico{patch}", f"a small network for {len(self.train):,} pictures of {side} pixels"
            )
        else:
            few = f"; {len(self.train):,} pictures are few for it: --from a checkpoint learns far more from them"
            more = few if len(self.train) < _FEW else ""
            if self.config.device == "cpu":
                self.decide("model", "vit-ti16", f"the smallest of the paper's family, for a CPU{more}")
            else:
                self.decide("model", "vit-s16", f"a network that trains from scratch in hours{more}")

    def tuning(self) -> None:
        if not self.is_open("tune.what"):
            return
        if not self.config.from_weights:
            self.decide("tune.what", "all", "trained from scratch")
            return
        if self.config.objective != "classify":
            self.decide("tune.what", "all", "features are what is learnt without labels")
            return
        each = len(self.train) / max(1, len(self.data.classes))
        if each < 10:
            self.decide("tune.what", "head", f"{each:.0f} pictures a class are few: the rest stays as it is")
        elif self.held is not None and isinstance(self.held.model.config, BiTConfig):
            self.decide("tune.what", "all", "a BiT is fine-tuned as a whole, as its paper does")
        elif each < 1000 or self.config.device == "cpu":
            self.decide("tune.what", "lora", f"{each:.0f} pictures a class: small additions learn, the rest stays")
        else:
            self.decide("tune.what", "all", f"{each:.0f} pictures a class are enough to train everything")

    def batch(self) -> None:
        if self.is_open("batch_size"):
            most = 128 if self.config.device == "cpu" else 512
            size = 16
            while size * 2 <= most and size * 40 <= len(self.train):
                size *= 2
            size = max(self.config.accumulate, size // self.config.accumulate * self.config.accumulate)
            enough = f"at least 20 steps an epoch with {len(self.train):,} pictures"
            self.decide("batch_size", size, enough if size > 16 else f"small, as {len(self.train):,} pictures are few")

    def length(self) -> None:
        per_epoch = max(1, len(self.train) // int(self.config.batch_size))
        if self.config.steps is not None:
            self.decide("epochs", self.config.steps / per_epoch, f"{self.config.steps} steps, {per_epoch} an epoch")
        if self.is_open("epochs"):
            if self.config.minutes is not None:
                return  # planned by the loop, once it knows the speed
            steps = _STEPS_FROM_WEIGHTS if self.config.from_weights else _STEPS_FROM_SCRATCH
            epochs = min(_MOST_EPOCHS, max(3, round(steps / per_epoch)))
            self.decide("epochs", epochs, f"about {epochs * per_epoch} steps, {per_epoch} an epoch")
        if self.is_open("optim.warmup_steps") and self.config.epochs != "auto":
            steps = float(self.config.epochs) * per_epoch
            warmup = min(max(1, round(0.05 * steps)), max(0, round(steps) - 1))
            self.decide("optim.warmup_steps", warmup, "5 % of all steps")

    def rates(self) -> None:
        is_vit = self.held is not None and not isinstance(self.held.model.config, BiTConfig)
        if self.is_open("optim.layer_decay"):
            if is_vit and self.config.tune.what == "all":  # BiT's paper has one rate for all of it
                self.decide("optim.layer_decay", 0.75, "lower layers of a trained network should hardly move")
            else:
                self.config = replace(self.config, optim=replace(self.config.optim, layer_decay=1.0))
        if not self.is_open("optim.lr"):
            return
        scratch, everything, few = _LR[self.config.optim.name]
        if not self.config.from_weights:
            self.decide("optim.lr", scratch, f"usual for {self.config.optim.name} from scratch")
        elif self.config.tune.what == "all":
            self.decide("optim.lr", everything, f"usual for {self.config.optim.name} on trained weights")
        else:
            self.decide("optim.lr", few, f"few weights are trained ({self.config.tune.what})")

    def weights(self) -> None:
        if not self.is_open("loss.class_weights"):
            return
        found = [number for number in counts(self.train, len(self.data.classes)) if number]
        ratio = max(found, default=1) / min(found, default=1)
        if self.config.objective != "classify":
            self.config = replace(self.config, loss=replace(self.config.loss, class_weights="none"))
        elif self.data.multi_label:
            self.decide("loss.class_weights", "none", "a picture has several labels")
        elif ratio > 3:
            self.decide("loss.class_weights", "balanced", f"the commonest class has {ratio:.0f} times as many pictures")
        else:
            self.decide("loss.class_weights", "none", "the classes are about equally common")


def typical_side(items: Sequence[Item]) -> int:
    """The median short side of some of the pictures."""
    sides = [min(header.height, header.width) for header in sample_headers(items, _LOOKED_AT)]
    if not sides:
        raise ConfigError("None of the pictures that were tried can be read.", hint="`vitral data` says why.")
    return int(median(sides))


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
