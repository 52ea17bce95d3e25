"""VTAB-1k (Zhai et al. 2019), as the paper uses it: 19 tasks of 1,000 training pictures each, what their labels are,
and which pictures are trained on.

Tables and shards keep their order, which decides what the first 800 are; pictures in class folders are ordered by a
hash of their names.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
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
    name: str
    group: str
    classes: int
    parts: tuple[float, float] | None = None
    """The parts of the train split that are trained on and validated on, where there is no val split; what is left is
    the test split, where there is none."""
    bin: Callable[[float], int] | None = None
    """From a raw number to a class; None: each label is a class."""
    papers: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Table 9: H/14 and L/16 pre-trained on JFT, L/16 on ImageNet-21k."""


def between(*edges: float) -> Callable[[float], int]:
    """The number of the interval that a value lies in; an edge belongs to the one below."""
    return lambda value: bisect_left(edges, value) - 1


def divided(values: int, classes: int) -> Callable[[float], int]:
    """Whole numbers below ``values`` in equal bins."""
    return lambda value: whole(value) * classes // values


def whole(value: float) -> int:
    if not value.is_integer():
        raise ValueError(value)
    return int(value)


TASKS = {task.name: task for task in (
    Task(name="caltech101", group="natural", classes=102, parts=(0.9, 0.1), papers=(95.3, 95.4, 90.8)),
    Task(name="cifar100", group="natural", classes=100, parts=(0.9, 0.1), papers=(85.5, 81.9, 84.1)),
    Task(name="dtd", group="natural", classes=47, papers=(75.2, 74.3, 74.1)),
    Task(name="flowers102", group="natural", classes=102, papers=(99.7, 99.7, 99.3)),
    Task(name="pets", group="natural", classes=37, parts=(0.8, 0.2), papers=(97.2, 96.7, 92.7)),
    Task(name="sun397", group="natural", classes=397, papers=(65.0, 63.5, 61.0)),
    Task(name="svhn", group="natural", classes=10, parts=(0.9, 0.1), papers=(88.9, 87.4, 80.9)),
    Task(name="camelyon", group="specialized", classes=2, papers=(83.3, 83.6, 82.5)),
    Task(name="eurosat", group="specialized", classes=10, parts=(0.6, 0.2), papers=(96.7, 96.5, 95.6)),
    Task(name="resisc45", group="specialized", classes=45, parts=(0.6, 0.2), papers=(91.4, 89.7, 85.2)),
    Task(name="retinopathy", group="specialized", classes=5, papers=(76.6, 77.1, 75.3)),
    Task(name="clevr-count", group="structured", classes=8, parts=(0.9, 0.1), bin=lambda n: whole(n) - 3,
         papers=(91.7, 86.4, 70.3)),
    Task(name="clevr-distance", group="structured", classes=6, parts=(0.9, 0.1),
         bin=between(0, 8, 8.5, 9, 9.5, 10, 100), papers=(63.8, 63.1, 56.1)),
    Task(name="dmlab", group="structured", classes=6, papers=(53.1, 49.7, 41.9)),
    Task(name="dsprites-location", group="structured", classes=16, parts=(0.8, 0.1), bin=divided(32, 16),
         papers=(79.4, 74.5, 74.7)),
    Task(name="dsprites-orientation", group="structured", classes=16, parts=(0.8, 0.1), bin=divided(40, 16),
         papers=(63.3, 60.5, 64.9)),
    Task(name="kitti-distance", group="structured", classes=4, bin=between(-100, 8, 20, 999),
         papers=(84.5, 82.2, 79.9)),
    Task(name="smallnorb-azimuth", group="structured", classes=18, papers=(33.2, 36.2, 30.5)),
    Task(name="smallnorb-elevation", group="structured", classes=9, papers=(51.2, 51.1, 41.7)),
)}  # fmt: skip
PAPERS = ("H/14 JFT", "L/16 JFT", "L/16 I21k")
TABLES = (".parquet", ".csv", ".tsv")
NO_VEHICLE = 1000.0
"""What KITTI's pictures without a vehicle count as, in metres."""


def find_task(name: str, place: Path) -> tuple[Path, str | None] | None:
    """Where a task lies below a place, and what stands in its place: ``cifar100=cifar10`` is CIFAR-10 as CIFAR-100."""
    found = [path for path in sorted(place.iterdir()) if _task_of(path)[0] == name]
    lists = {path.stem for path in found if path.suffix in (".csv", ".tsv")}
    found = [path for path in found if not (path.is_dir() and path.name in lists)]  # which holds their pictures
    if len(found) > 1:
        told = ", ".join(path.name for path in found)
        raise DataError(f"{place} has {len(found)} things in the place of {name}: {told}.", hint="Leave one of them.")
    for path in found:
        stand_in = _task_of(path)[1]
        if stand_in == "":
            raise DataError(f"{path} does not say what stands in the place of {name}.", hint=f"Such as {name}=cifar10.")
        return path, stand_in
    return None


def no_tasks(place: Path) -> list[str]:
    """What lies there and is none of the tasks, as a name in capital letters."""
    found = [path for path in sorted(place.iterdir()) if not path.name.startswith(".")]
    return [path.name for path in found if _task_of(path)[0] not in TASKS]


def _task_of(path: Path) -> tuple[str, str | None]:
    name, stands_in, what = path.name.removesuffix(path.suffix if path.suffix in TABLES else "").partition("=")
    return name, what if stands_in else None


def open_task(task: Task, path: Path, stand_in: str | None = None) -> DatasetIndex:
    """The task's own splits: train (800 + 200), val (the 200 of them), test. What stands in its place has classes of
    its own."""
    found = open_dataset(path) if stand_in else with_classes(open_dataset(path), task, path)
    if found.multi_label:
        raise DataError(f"{found.name} has several labels a picture, and {task.name} has one.")
    is_folders = path.is_dir() and not any(path.glob("*.tar"))
    splits = {name: by_hash(items) if is_folders else list(items) for name, items in found.splits.items()}
    train, val, test = (splits.get(name, []) for name in ("train", "val", "test"))
    if task.name.startswith("smallnorb") and not val:
        val, test = test[: len(test) // 2], test[len(test) // 2 :]
    if not val and task.parts is not None:
        first, second = (round(part * len(train)) for part in (task.parts[0], sum(task.parts)))
        test = test or train[second:]
        train, val = train[:first], train[first:second]
    if not train or not val or not test:
        missing = ", ".join(name for name, items in (("train", train), ("val", val), ("test", test)) if not items)
        raise DataError(f"{path} has no pictures for {missing}, and {task.name} needs them.")
    chosen = {"train": (*train[:TRAIN], *val[:VAL]), "val": tuple(val[:VAL]), "test": tuple(test)}
    return replace(found, name=task.name, splits=chosen)


def with_classes(data: DatasetIndex, task: Task, path: Path) -> DatasetIndex:
    """The same pictures with the classes of the task."""
    if task.bin is None:
        if len(data.classes) != task.classes:
            raise DataError(f"{path} has {len(data.classes)} classes, and {task.name} has {task.classes}.")
        return data
    numbers = [_class_of(name, task) for name in data.classes]
    splits = {
        split: tuple(replace(item, label=numbers[int(item.label)]) for item in items if isinstance(item.label, int))
        for split, items in data.splits.items()
    }
    return replace(data, classes=tuple(map(str, range(task.classes))), splits=splits)


def _class_of(name: str, task: Task) -> int:
    assert task.bin is not None
    try:
        value = NO_VEHICLE if task.name == "kitti-distance" and name.lower() == "none" else float(name)
        if isnan(value):
            raise ValueError(name)
        found = task.bin(value)
    except (ValueError, OverflowError):
        raise DataError(f"The label {name!r} is no number as {task.name} has them: docs/vtab.md.") from None
    if not 0 <= found < task.classes:
        raise DataError(f"The label {name!r} is outside of what {task.name} has.")
    return found


def by_hash(items: Sequence[Item]) -> list[Item]:
    """In no order that follows the classes."""
    return sorted(items, key=lambda item: hashlib.sha256(item.key.encode("utf-8", "surrogateescape")).digest())
