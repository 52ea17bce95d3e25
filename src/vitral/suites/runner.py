"""A suite over a model: fine-tuned on every task that is there, and measured on its test pictures.

The protocol is the paper's (table 4): SGD with momentum, 2,500 steps at a learning rate of 0.01, batch 512, 384 pixels,
the same for every task. Smaller numbers may be asked for, and the result says so.
"""

import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from vitral.data.dataset import DatasetIndex
from vitral.devices import choose_device
from vitral.errors import ConfigError, DataError, VitralError
from vitral.suites.vtab import GROUPS, PAPERS, TASKS, TRAIN, VAL, find_task, no_tasks, open_task
from vitral.training.build import build_model
from vitral.training.config import TrainConfig, as_settings, with_settings
from vitral.training.entry import start_run
from vitral.training.events import Finished, Interrupted, Stepped
from vitral.training.settings import flatten, over
from vitral.weights.load import peek

PROTOCOL: dict[str, Any] = {
    "steps": 2500,
    "batch_size": 512,
    "image_size": (384, 384),
    "resize": "squash",
    "tune.what": "all",
    "optim.name": "sgd",
    "optim.lr": 0.01,
    "optim.momentum": 0.9,
    "optim.weight_decay": 0.0,
    "optim.clip": 1.0,
    "optim.layer_decay": 1.0,
    "optim.schedule": "cosine",
    "optim.warmup_steps": "auto",
    "loss.class_weights": "none",
    "augment.crop": "none",
    "keep": "last",
    "save_seconds": 1e9,  # a task is not resumed
}
_OF_THE_MACHINE = ("accumulate", "compile", "device", "gradient_checkpointing", "precision", "workers")
"""They change what it takes, not what is learnt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    task: str
    group: str
    top1: float
    low: float
    high: float
    images: int
    train_images: int
    papers: tuple[float, float, float]
    stand_in: str | None = None
    """What was measured in the task's place; the paper's numbers are not about it."""
    unreadable: int = 0
    """Test pictures that could not be read."""
    classes_seen: int
    """Of the test pictures."""
    notes: tuple[str, ...] = ()
    """What there is to say about its data."""

    @property
    def is_the_papers(self) -> bool:
        """The task itself, with all of its training pictures and nothing missing from its test."""
        is_whole = not self.unreadable and self.classes_seen == TASKS[self.task].classes
        return self.stand_in is None and self.train_images == TRAIN + VAL and is_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteResult:
    suite: str
    model: str
    tasks: tuple[TaskResult, ...]
    missing: tuple[str, ...]
    """Tasks that are not there."""
    failed: dict[str, str]
    """Tasks that could not be used, and why."""
    changed: dict[str, Any]
    """What differs from the paper's protocol."""
    left: tuple[str, ...] = ()
    """Tasks that were not begun or not finished when it was interrupted."""
    signal: int = 0
    """What interrupted it."""
    unknown: tuple[str, ...] = ()
    """What lies there and is no task."""

    @property
    def interrupted(self) -> bool:
        return bool(self.left)

    def group_mean(self, group: str | None = None) -> float | None:
        scores = [task.top1 for task in self.tasks if group in (None, task.group)]
        return mean(scores) if scores else None

    def as_dict(self) -> dict[str, Any]:
        groups = {group: self.group_mean(group) for group in GROUPS}
        whole = len(self.tasks) == len(TASKS) and all(task.is_the_papers for task in self.tasks) and not self.changed
        return {
            **asdict(self),
            "tasks": [{**asdict(task), "classes": TASKS[task.task].classes} for task in self.tasks],
            "interrupted": self.interrupted,
            "groups": groups,
            "mean": self.group_mean(),
            "is_whole": whole,
            "papers": list(PAPERS),
            "train_images": TRAIN + VAL,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskProgress:
    """How far the suite is, in steps of training over all tasks."""

    task: str
    done: int
    total: int


def run_suite(
    model: str | Path, place: str | Path, **changes: Any
) -> Iterator[TaskProgress | TaskResult | SuiteResult]:
    """Every task below ``place`` that is there; ``changes`` are settings that differ from the paper's protocol."""
    if not isinstance(model, str | Path) or not isinstance(place, str | Path):
        raise ConfigError("run_suite takes the path or the name of a model, and the folder of the tasks.")
    if taken := sorted({"data", "from", "from_weights", "model", "objective", "val_fraction", "val"} & changes.keys()):
        raise ConfigError(f"{taken[0]} is not for a suite to change.")
    model, folder = str(model), Path(place)
    found = find_tasks(folder)
    changes = flatten(changes)
    if isinstance(side := changes.get("image_size"), int):
        changes["image_size"] = (side, side)
    protocol = with_settings(None, {**PROTOCOL, "data": "", "from": model}, "vtab-1k")
    config = over(protocol, changes, "vtab-1k")  # epochs instead of steps, if asked for
    usual = as_settings(protocol)
    # What is wrong for every task is told once, before the first.
    choose_device(config.device)
    build_model(replace(config, channels=peek(model).channels), classes=2)
    results: list[TaskResult] = []
    failed: dict[str, str] = {}
    caught = 0
    for number, (name, (path, stand_in)) in enumerate(found.items()):
        try:
            data = open_task(TASKS[name], path, stand_in)
            for event in learn_task(replace(config, data=str(path)), name, data, stand_in):
                if isinstance(event, TaskProgress):
                    done = number * event.total + event.done
                    yield TaskProgress(task=name, done=done, total=len(found) * event.total)
                elif isinstance(event, TaskResult):
                    results.append(event)
                    yield event
                else:
                    caught = event.signal
        except VitralError as error:
            failed[name] = str(error)
        except (RuntimeError, MemoryError, OSError) as error:  # no memory, no room: what is finished is not lost
            failed[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        except KeyboardInterrupt:  # while nothing is trained; what is finished is told
            caught = signal.SIGINT
        if caught:
            break
    ended = {result.task for result in results} | failed.keys()
    yield SuiteResult(
        suite="vtab-1k",
        model=model,
        tasks=tuple(results),
        missing=tuple(name for name in TASKS if name not in found),
        failed=failed,
        changed={
            name: value
            for name, value in as_settings(config).items()
            if value != usual.get(name) and name not in _OF_THE_MACHINE
        },
        left=tuple(name for name in found if name not in ended),
        signal=int(caught),
        unknown=tuple(no_tasks(folder)),
    )


def find_tasks(folder: Path) -> dict[str, tuple[Path, str | None]]:
    """Where each task lies that is there, and what stands in its place; DataError where there is none."""
    if not folder.is_dir():
        raise DataError(
            f"There is no folder {folder}.", hint="It holds a folder or a table for each task: docs/vtab.md."
        )
    found = {name: there for name in TASKS if (there := find_task(name, folder)) is not None}
    if not found:
        raise DataError(
            f"{folder} holds none of the tasks.",
            hint=f"They are called {', '.join(TASKS)}; what stands in a task's place cifar100=NAME.",
        )
    return found


def learn_task(
    config: TrainConfig, name: str, data: DatasetIndex, stand_in: str | None
) -> Iterator[TaskProgress | TaskResult | Interrupted]:
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for event in start_run(config, data, out=Path(folder) / name):
            if isinstance(event, Stepped):
                yield TaskProgress(task=name, done=event.step, total=event.steps)
            if isinstance(event, Interrupted):
                yield event
            if isinstance(event, Finished):
                held = event.test
                yield TaskResult(
                    task=name,
                    group=TASKS[name].group,
                    top1=held["top1"],
                    low=held["top1_low"],
                    high=held["top1_high"],
                    images=held["images"],
                    train_images=len(data.splits["train"]),
                    papers=TASKS[name].papers,
                    stand_in=stand_in,
                    unreadable=len(held["unreadable"]),
                    classes_seen=len({item.label for item in data.splits["test"]}),
                    notes=data.notes,
                )
