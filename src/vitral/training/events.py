"""What a training run tells while it goes on. The console, the CSV, the report and the tests read the same events."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """One thing that was decided, and why."""

    name: str
    value: Any
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """What the features of the starting weights are worth as they are: what training has to beat."""

    few_shot: float
    """Top-1 of the ridge regression on ten pictures a class."""
    knn: float
    """Top-1 of the ten nearest neighbours."""
    train_pictures: int
    pictures: int
    """Of the validation, that they are measured on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Training starts, or goes on after ``step`` steps."""

    folder: Path
    step: int
    steps: int
    batches: int
    parameters: int
    trained: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped:
    step: int
    steps: int
    epoch: int
    loss: float
    lr: float
    images_per_second: float
    seconds_left: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Measuring:
    """Pictures are being answered for: of the validation, those held out, or the start."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochEnded:
    """With the scores on the slice that chooses the model."""

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
    path: Path
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Warned:
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupted:
    """The state is saved; ``resume`` is the line that goes on."""

    step: int
    resume: str
    signal: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    folder: Path
    test: dict[str, Any]
    best_step: int
    train_seconds: float


Event = Chosen | Baseline | Started | Stepped | Measuring | EpochEnded | Saved | Warned | Interrupted | Finished


def as_line(event: Event) -> str:
    """For the log of a run."""
    told = {one.name: getattr(event, one.name) for one in fields(event) if one.name != "test"}
    if isinstance(event, Finished):
        told |= {name: event.test[name] for name in ("top1", "top5", "images", "loss")}
    return f"{type(event).__name__.lower()} " + " ".join(f"{name}={value!s}" for name, value in told.items())
