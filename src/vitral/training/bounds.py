"""Between which numbers a setting of a run makes sense; NaN and infinity never do."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

from vitral.errors import ConfigError

MANY = 2**31
"""More than anybody counts to: steps, seeds, pictures."""


class Bounds(NamedTuple):
    lowest: float
    highest: float
    takes_lowest: bool = True
    takes_highest: bool = True

    def hold(self, number: float) -> bool:
        above = number >= self.lowest if self.takes_lowest else number > self.lowest
        return above and (number <= self.highest if self.takes_highest else number < self.highest)

    def __str__(self) -> str:
        low = f"{'at least' if self.takes_lowest else 'above'} {self.lowest:.10g}"
        return f"{low} and {'at most' if self.takes_highest else 'below'} {self.highest:.10g}"


_COUNT, _AMOUNT = Bounds(1, MANY), Bounds(0, 1e6)
_PART = Bounds(0, 1, takes_highest=False)
_RATE = Bounds(0, 1e6, takes_lowest=False)

BOUNDS = {
    "val_fraction": Bounds(
        0, 0.5, takes_lowest=False, takes_highest=False
    ),  # what is trained on must be the larger part
    "image_size": Bounds(1, 16384),
    "channels": Bounds(1, 10_000),
    "epochs": _RATE,
    "steps": _COUNT,
    "minutes": Bounds(0.01, 1e7),
    "batch_size": _COUNT,
    "accumulate": _COUNT,
    "optim.lr": _RATE,
    "optim.weight_decay": _AMOUNT,
    "optim.momentum": _PART,
    "optim.betas": _PART,
    "optim.stairs": _PART,
    "optim.eps": _RATE,
    "optim.clip": _AMOUNT,
    "optim.layer_decay": Bounds(0, 1, takes_lowest=False),
    "optim.warmup_steps": Bounds(0, MANY),
    "optim.end_lr": _AMOUNT,
    "loss.smoothing": _PART,
    "mix.mixup": _AMOUNT,
    "mix.cutmix": _AMOUNT,
    "tune.blocks": _COUNT,
    "tune.rank": _COUNT,
    "ema": _PART,
    "dropout": _PART,
    "drop_path": _PART,
    "seed": Bounds(0, MANY),
    "workers": Bounds(0, 1024),
    "patience": Bounds(0, MANY),
    "save_seconds": Bounds(0, 1e9),
    "most_bad": Bounds(0, 1),
}


def check_numbers(settings: Mapping[str, Any]) -> None:
    """ConfigError for the first setting, by its dotted name, that is out of its bounds; words are passed over."""
    for name, value in settings.items():
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if not isfinite(number):
                raise ConfigError(f"{name}={value} must be a finite number.")
            if name in BOUNDS and not BOUNDS[name].hold(number):
                raise ConfigError(f"{name}={value} must be {BOUNDS[name]}.")
