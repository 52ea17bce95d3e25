"""Run a suite: fine-tune a model on every task, and evaluate it on the task's test images.

The protocol is the paper's (table 4): SGD with momentum, 2,500 steps at a learning rate of 0.01, batch 512, 384 pixels,
the same for every task. Settings may be changed, and the result lists the changes.
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
from vitral.errors import ConfigError, VitralError, check_type, first_line
from vitral.suites.vtab import GROUPS, PAPER_MODELS, TASKS, TRAIN, VAL, find_tasks, open_task, unrecognized_names
from vitral.training.config import TrainConfig, as_resolved
from vitral.training.entry import start_run
from vitral.training.events import Event, Finished, Interrupted, Stepped
from vitral.training.prepare import build_model
from vitral.training.request import Request, add_layer
from vitral.training.settings import as_settings, flatten, with_settings
from vitral.weights.load import peek

PROTOCOL: dict[str, Any] = {
    "steps": 2500,
    "batch_size": 512,
    "image_size": (384, 384),
    "resize": "squash",
    "tune.what": "all",
    "tune.probe": False,
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
_FIXED = ("data", "from", "from_", "from_weights", "model", "objective", "val_fraction", "val")
_MACHINE_SETTINGS = ("accumulate", "compile", "device", "gradient_checkpointing", "precision", "workers")
"""Settings that change the cost of training, but not the protocol."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """The scores of one task."""

    task: str
    group: str
    top1: float
    low: float
    high: float
    """The 95 % confidence interval of top1."""
    images: int
    train_images: int
    paper: tuple[float, float, float]
    """The scores in table 9, in percent, of PAPER_MODELS."""
    stand_in: str | None = None
    """The dataset that was used instead of the task's own."""
    unreadable: int = 0
    """Number of unreadable test images."""
    classes_seen: int
    """Number of classes among the test images."""
    notes: tuple[str, ...] = ()
    """Notes on the dataset."""

    @property
    def is_comparable(self) -> bool:
        """Return whether this is the task itself, with all training images and no gap in its test split."""
        is_complete = not self.unreadable and self.classes_seen == TASKS[self.task].classes
        return self.stand_in is None and self.train_images == TRAIN + VAL and is_complete


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteResult:
    """The scores of all tasks, and why some are missing."""

    suite: str
    model: str
    tasks: tuple[TaskResult, ...]
    missing: tuple[str, ...]
    """Tasks without data."""
    failed: dict[str, str]
    """Tasks that failed, with the reason."""
    changed: dict[str, Any]
    """Settings that differ from the paper's protocol."""
    unfinished: tuple[str, ...] = ()
    """Tasks that were left when the suite was interrupted."""
    signal: int = 0
    """The signal that interrupted the suite, or 0."""
    unrecognized: tuple[str, ...] = ()
    """Names in the folder that are not tasks."""

    def group_mean(self, group: str | None = None) -> float | None:
        """Return the mean accuracy of a group, or of all tasks; None without tasks."""
        scores = [task.top1 for task in self.tasks if group in (None, task.group)]
        return mean(scores) if scores else None

    def as_dict(self) -> dict[str, Any]:
        all_comparable = len(self.tasks) == len(TASKS) and all(task.is_comparable for task in self.tasks)
        return {
            **asdict(self),
            "tasks": [{**asdict(task), "classes": TASKS[task.task].classes} for task in self.tasks],
            "interrupted": bool(self.unfinished),
            "groups": {group: self.group_mean(group) for group in GROUPS},
            "mean": self.group_mean(),
            "complete": all_comparable and not self.changed,
            "paper_models": list(PAPER_MODELS),
            "train_images": TRAIN + VAL,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskProgress:
    """Training steps that are done, over all tasks."""

    task: str
    done: int
    total: int


def run_suite(model: str | Path, data: str | Path, **changes: Any) -> SuiteResult:
    """Fine-tune and evaluate a model on every task in the folder ``data``, and return the scores.

    ``changes`` are settings of TrainConfig that differ from the paper's protocol.
    """
    *_, result = suite_events(model, data, **changes)
    assert isinstance(result, SuiteResult)
    return result


def suite_events(
    model: str | Path, data: str | Path, **changes: Any
) -> Iterator[TaskProgress | TaskResult | SuiteResult]:
    """Run a suite as `run_suite` does; yield progress, a TaskResult per task, and the SuiteResult at the end."""
    check_type("model", model, str, Path, hint="Pass the path or name of a model.")
    check_type("data", data, str, Path, hint="Pass the folder of the tasks.")
    folders = find_tasks(Path(data))
    config, changed = _configure(str(model), changes)
    results: dict[str, TaskResult] = {}
    failed: dict[str, str] = {}
    caught = 0
    for number, (name, (path, stand_in)) in enumerate(folders.items()):
        try:
            dataset = open_task(TASKS[name], path, stand_in)
            for event in _fine_tune(replace(config, data=str(path)), name, dataset):
                if isinstance(event, Stepped):
                    done, total = number * event.steps + event.step, len(folders) * event.steps
                    yield TaskProgress(task=name, done=done, total=total)
                elif isinstance(event, Interrupted):
                    caught = event.signal
                elif isinstance(event, Finished):
                    results[name] = _task_result(name, dataset, stand_in, event.test)
                    yield results[name]
        except VitralError as error:
            failed[name] = str(error)
        except (RuntimeError, MemoryError, OSError) as error:  # out of memory or disk: keep what is finished
            failed[name] = f"{type(error).__name__}: {first_line(error)}"
        except KeyboardInterrupt:  # between two trainings: report what is finished
            caught = signal.SIGINT
        if caught:
            break
    yield SuiteResult(
        suite="vtab-1k",
        model=str(model),
        tasks=tuple(results.values()),
        missing=tuple(name for name in TASKS if name not in folders),
        failed=failed,
        changed=changed,
        unfinished=tuple(name for name in folders if name not in results and name not in failed),
        signal=int(caught),
        unrecognized=tuple(unrecognized_names(Path(data))),
    )


def _configure(model: str, changes: dict[str, Any]) -> tuple[TrainConfig, dict[str, Any]]:
    """Return the settings, and those that differ from the protocol; raise for what is wrong with every task."""
    if fixed := sorted(set(_FIXED) & changes.keys()):
        raise ConfigError(f"A suite sets {fixed[0]} itself.", hint=f"Drop {fixed[0]}.")
    changes = flatten(changes)
    if isinstance(side := changes.get("image_size"), int):
        changes["image_size"] = (side, side)
    protocol = with_settings(None, {**PROTOCOL, "data": "", "from": model}, "vtab-1k")
    config = add_layer(protocol, changes, "vtab-1k")  # epochs replace the protocol's steps
    choose_device(config.device)
    build_model(as_resolved(replace(config, channels=peek(model).config.channels)), classes=2)
    original = as_settings(protocol)
    return config, {
        name: value
        for name, value in as_settings(config).items()
        if value != original.get(name) and name not in _MACHINE_SETTINGS
    }


def _fine_tune(config: TrainConfig, name: str, dataset: DatasetIndex) -> Iterator[Event]:
    """Fine-tune on one task in a temporary run folder."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield from start_run(Request(config=config, dataset=dataset), out=Path(folder) / name)


def _task_result(name: str, dataset: DatasetIndex, stand_in: str | None, test: dict[str, Any]) -> TaskResult:
    return TaskResult(
        task=name,
        group=TASKS[name].group,
        top1=test["top1"],
        low=test["top1_low"],
        high=test["top1_high"],
        images=test["images"],
        train_images=len(dataset.splits["train"]),
        paper=TASKS[name].paper,
        stand_in=stand_in,
        unreadable=len(test["unreadable"]),
        classes_seen=len({item.label for item in dataset.splits["test"]}),
        notes=dataset.notes,
    )
