"""The events of a training run. The console, the CSV files, the report and the tests read the same events."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """vitral chose a setting."""

    name: str
    value: Any
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """vitral tried a way of training."""

    name: str
    top1: float
    interval: tuple[float, float]
    """95 % interval of top1."""
    loss: float
    evidence: str
    """The images that top1 is measured on."""
    seconds: float
    chosen: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Training starts, or continues after `step` steps."""

    folder: Path
    step: int
    steps: int
    steps_per_epoch: int
    parameters: int
    trained: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped:
    """The optimizer took a step."""

    step: int
    steps: int
    epoch: int
    loss: float
    lr: float
    images_per_second: float
    seconds_left: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Measuring:
    """The model runs over a split: "validation", "test" or, for the linear probe, "features"."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochEnded:
    """An epoch ended and has validation scores."""

    epoch: int
    step: int
    train_loss: float
    top1: float
    top5: float
    loss: float
    is_best: bool
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """The state is on disk."""

    path: Path
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Warned:
    """Something unexpected that training can continue with."""

    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupted:
    """A signal stopped the run after its state was saved; `resume` is the command that continues it."""

    step: int
    resume: str
    signal: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The run is complete, with its scores on the test split."""

    folder: Path
    test: dict[str, Any]
    best_step: int
    train_seconds: float


Event = Chosen | Candidate | Started | Stepped | Measuring | EpochEnded | Saved | Warned | Interrupted | Finished


def as_log_line(event: Event) -> str | None:
    """Return the event as a line of log.txt; None for those of every few seconds."""
    if isinstance(event, Stepped | Measuring | Saved):
        return None
    values = {item.name: getattr(event, item.name) for item in fields(event) if item.name != "test"}
    if isinstance(event, Finished):
        values |= {name: event.test[name] for name in ("top1", "top5", "images", "loss")}
    return f"{type(event).__name__.lower()} " + " ".join(f"{name}={value!s}" for name, value in values.items())
