"""VTAB-1k (Zhai et al. 2019), as the paper uses it: 19 tasks with 1,000 training images each.

This module has the tasks, their labels and their splits. Tables and shards keep their order, which determines the first
800 images; images in class folders are ordered by a hash of their names.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path

from vitral.data.dataset import DatasetIndex, Item
from vitral.data.sources import open_dataset
from vitral.errors import DataError

TRAIN, VAL = 800, 200
GROUPS = ("natural", "specialized", "structured")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One task of the suite."""

    name: str
    group: str
    classes: int
    fractions: tuple[float, float] | None = None
    """Fractions of the train split for training and validation without a val split; the rest replaces a test split."""
    bin: Callable[[float], int] | None = None
    """Map a raw number to a class. None: each label is a class."""
    paper: tuple[float, float, float]
    """Scores in table 9 of the PAPER_MODELS, in percent."""


def between(*edges: float) -> Callable[[float], int]:
    """Return a function from a value to the index of its interval; an edge belongs to the interval below."""
    return lambda value: bisect_left(edges, value) - 1


def divided(values: int, classes: int) -> Callable[[float], int]:
    """Return a function from integers below ``values`` to equal bins."""
    return lambda value: whole(value) * classes // values


def whole(value: float) -> int:
    """Return a number as an int; raise ValueError if it has a fraction."""
    if not value.is_integer():
        raise ValueError(value)
    return int(value)


TASKS = {task.name: task for task in (
    Task(name="caltech101", group="natural", classes=102, fractions=(0.9, 0.1), paper=(95.3, 95.4, 90.8)),
    Task(name="cifar100", group="natural", classes=100, fractions=(0.9, 0.1), paper=(85.5, 81.9, 84.1)),
    Task(name="dtd", group="natural", classes=47, paper=(75.2, 74.3, 74.1)),
    Task(name="flowers102", group="natural", classes=102, paper=(99.7, 99.7, 99.3)),
    Task(name="pets", group="natural", classes=37, fractions=(0.8, 0.2), paper=(97.2, 96.7, 92.7)),
    Task(name="sun397", group="natural", classes=397, paper=(65.0, 63.5, 61.0)),
    Task(name="svhn", group="natural", classes=10, fractions=(0.9, 0.1), paper=(88.9, 87.4, 80.9)),
    Task(name="camelyon", group="specialized", classes=2, paper=(83.3, 83.6, 82.5)),
    Task(name="eurosat", group="specialized", classes=10, fractions=(0.6, 0.2), paper=(96.7, 96.5, 95.6)),
    Task(name="resisc45", group="specialized", classes=45, fractions=(0.6, 0.2), paper=(91.4, 89.7, 85.2)),
    Task(name="retinopathy", group="specialized", classes=5, paper=(76.6, 77.1, 75.3)),
    Task(name="clevr-count", group="structured", classes=8, fractions=(0.9, 0.1), bin=lambda n: whole(n) - 3,
         paper=(91.7, 86.4, 70.3)),
    Task(name="clevr-distance", group="structured", classes=6, fractions=(0.9, 0.1),
         bin=between(0, 8, 8.5, 9, 9.5, 10, 100), paper=(63.8, 63.1, 56.1)),
    Task(name="dmlab", group="structured", classes=6, paper=(53.1, 49.7, 41.9)),
    Task(name="dsprites-location", group="structured", classes=16, fractions=(0.8, 0.1), bin=divided(32, 16),
         paper=(79.4, 74.5, 74.7)),
    Task(name="dsprites-orientation", group="structured", classes=16, fractions=(0.8, 0.1), bin=divided(40, 16),
         paper=(63.3, 60.5, 64.9)),
    Task(name="kitti-distance", group="structured", classes=4, bin=between(-100, 8, 20, 999),
         paper=(84.5, 82.2, 79.9)),
    Task(name="smallnorb-azimuth", group="structured", classes=18, paper=(33.2, 36.2, 30.5)),
    Task(name="smallnorb-elevation", group="structured", classes=9, paper=(51.2, 51.1, 41.7)),
)}  # fmt: skip
PAPER_MODELS = ("H/14 JFT", "L/16 JFT", "L/16 I21k")
TABLES = (".parquet", ".csv", ".tsv")
NO_VEHICLE = 1000.0
"""Distance in meters of KITTI's images without a vehicle."""


def find_tasks(folder: Path) -> dict[str, tuple[Path, str | None]]:
    """Return the path and the stand-in of every task in the folder; raise DataError if there is none."""
    names = ", ".join(TASKS)
    hint = f"Name a folder or table per task: {names}; or a stand-in: cifar100=NAME. See docs/how-to/vtab.md."
    if not folder.is_dir():
        raise DataError(f"The folder {folder} does not exist.", hint=hint)
    tasks = {name: task for name in TASKS if (task := find_task(name, folder)) is not None}
    if not tasks:
        raise DataError(f"{folder} has no task of the suite.", hint=hint)
    return tasks


def find_task(name: str, folder: Path) -> tuple[Path, str | None] | None:
    """Return the path of a task and its stand-in, if any: ``cifar100=cifar10`` is CIFAR-10 in place of CIFAR-100."""
    paths = [path for path in sorted(folder.iterdir()) if _split_name(path)[0] == name]
    lists = {path.stem for path in paths if path.suffix in (".csv", ".tsv")}
    paths = [path for path in paths if not (path.is_dir() and path.name in lists)]  # it has the images of the list
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise DataError(f"{folder} has {len(paths)} datasets for {name}: {names}.", hint="Keep one of them.")
    if not paths:
        return None
    stand_in = _split_name(paths[0])[1]
    if stand_in == "":
        raise DataError(f"{paths[0]} does not name its stand-in.", hint=f"Rename it to {name}=cifar10, for example.")
    return paths[0], stand_in


def unrecognized_names(folder: Path) -> list[str]:
    """Return the names in the folder that are not tasks, such as one with a wrong capital letter."""
    paths = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    return [path.name for path in paths if _split_name(path)[0] not in TASKS]


def _split_name(path: Path) -> tuple[str, str | None]:
    """Return the task and the stand-in that a file or folder is named after."""
    stem = path.name.removesuffix(path.suffix if path.suffix in TABLES else "")
    name, equals, stand_in = stem.partition("=")
    return name, stand_in if equals else None


def open_task(task: Task, path: Path, stand_in: str | None = None) -> DatasetIndex:
    """Open a task with its splits: train (800 + 200 images), val (those 200) and test. A stand-in keeps its classes."""
    dataset = open_dataset(path) if stand_in else with_classes(open_dataset(path), task, path)
    if dataset.multi_label:
        raise DataError(f"{dataset.name} has several labels per image; {task.name} needs one.")
    is_folders = path.is_dir() and not any(path.glob("*.tar"))
    names = ("train", "val", "test")
    train, val, test = (list(dataset.splits.get(name, ())) for name in names)
    if is_folders:  # an order that does not follow the classes
        train, val, test = (sorted(items, key=_hash) for items in (train, val, test))
    if task.name.startswith("smallnorb") and not val:
        val, test = test[: len(test) // 2], test[len(test) // 2 :]
    if not val and task.fractions is not None:
        first, second = (round(fraction * len(train)) for fraction in (task.fractions[0], sum(task.fractions)))
        test = test or train[second:]
        train, val = train[:first], train[first:second]
    if missing := [name for name, items in zip(names, (train, val, test), strict=True) if not items]:
        raise DataError(f"{path} has no images for {', '.join(missing)}; {task.name} needs them.")
    chosen = {"train": (*train[:TRAIN], *val[:VAL]), "val": tuple(val[:VAL]), "test": tuple(test)}
    return replace(dataset, name=task.name, splits=chosen)


def with_classes(data: DatasetIndex, task: Task, path: Path) -> DatasetIndex:
    """Return the same images with the classes of the task."""
    if task.bin is None:
        if len(data.classes) != task.classes:
            raise DataError(f"{path} has {len(data.classes)} classes; {task.name} needs {task.classes}.")
        return data
    numbers = [class_of_label(name, task) for name in data.classes]
    splits = {
        split: tuple(replace(item, label=numbers[int(item.label)]) for item in items if isinstance(item.label, int))
        for split, items in data.splits.items()
    }
    return replace(data, classes=tuple(map(str, range(task.classes))), splits=splits)


def class_of_label(label: str, task: Task) -> int:
    """Return the class of a raw label, such as a distance; raise DataError if it is not a number in range."""
    assert task.bin is not None
    try:
        value = NO_VEHICLE if task.name == "kitti-distance" and label.lower() == "none" else float(label)
        if isnan(value):
            raise ValueError(label)
        index = task.bin(value)
    except (ValueError, OverflowError):
        problem = f"{task.name}: the label {label!r} is not a valid number."
        raise DataError(problem, hint="See docs/how-to/vtab.md.") from None
    if not 0 <= index < task.classes:
        raise DataError(f"{task.name}: the label {label!r} is out of range.", hint="See docs/how-to/vtab.md.")
    return index


def _hash(item: Item) -> bytes:
    return hashlib.sha256(item.key.encode("utf-8", "surrogateescape")).digest()
