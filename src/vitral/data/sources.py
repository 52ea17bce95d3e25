"""From what a person types to a dataset: class folders, tables, tar shards, the hub, or the built-in digits.

photos/                        a folder for each class, or train/ val/ test/ with such folders
labels.csv, labels.parquet     a column of pictures and one of labels
shards/, shards/train-{000..009}.tar, one.tar
hf:owner/name                  a dataset of the Hugging Face hub that is stored as Parquet
builtin:digits
"""

import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from vitral.data.decode import SUFFIXES, BadPicture
from vitral.data.items import SPLITS, Dataset, InDigits, InFile, Item, digits, natural_order
from vitral.errors import DataError

HELD_OUT = 0.2
"""The part of each class that is held out where the data have no split of their own."""


def open_data(data: str | Path) -> Dataset:
    """A dataset by its name or path; DataError says what is wrong with it."""
    words = str(data)
    if words.startswith("builtin:"):
        return open_builtin(words.removeprefix("builtin:"))
    if words.startswith("hf:"):
        from vitral.data.hub import open_hub

        return open_hub(words.removeprefix("hf:"))
    from vitral.data.shards import expand_braces, open_shards

    if "{" in words or words.endswith(".tar"):
        return open_shards(expand_braces(words))
    path = Path(words).expanduser()
    if path.suffix.lower() in (".csv", ".tsv", ".parquet"):
        from vitral.data.tables import open_table

        return open_table(path)
    if not path.is_dir():
        raise DataError(
            f"There is no folder {path}." if not path.exists() else f"{path} is no folder, table or tar shard.",
            hint="Data is a folder of class folders, a .csv or .parquet table, .tar shards, hf:owner/name, or "
            "builtin:digits.",
        )
    if any(path.glob("*.tar")):
        return open_shards(sorted(path.glob("*.tar")), folder=path)
    return open_folder(path)


def open_builtin(name: str) -> Dataset:
    if name != "digits":
        raise DataError(f"There is no built-in dataset {name!r}.", hint="There is builtin:digits.")
    splits = {
        split: tuple(
            Item(f"{split}/{row:04d}", int(label), InDigits(split, row))
            for row, label in enumerate(digits()[f"{split}_labels"])
        )
        for split in ("train", "test")
    }
    return Dataset(name="digits", classes=tuple("0123456789"), splits=splits, channels=1)


# ---- folders ----


def open_folder(folder: Path) -> Dataset:
    """Class folders, below split folders or not."""
    below = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    splits = {entry: SPLITS[entry.name.lower()] for entry in below if entry.name.lower() in SPLITS}
    if splits and "train" not in splits.values() and len(below) > len(splits):
        splits = {}  # a class that happens to be called "test"
    others: Counter[str] = Counter()
    if not splits:
        found = {"train": dict(class_folders(folder, others))}
    else:
        found = {}
        for entry, split in splits.items():
            for name, pictures in class_folders(entry, others):
                found.setdefault(split, {}).setdefault(name, []).extend(pictures)
    named = {name for per_class in found.values() for name in per_class}
    filled = {name for per_class in found.values() for name, pictures in per_class.items() if pictures}
    classes = tuple(sorted(filled, key=natural_order))
    if not classes:
        _refuse_folder(folder, others)
    numbers = {name: index for index, name in enumerate(classes)}
    items = {
        split: tuple(
            Item(path.relative_to(folder).as_posix(), numbers[name], InFile(str(path)))
            for name in sorted(filled & per_class.keys(), key=natural_order)
            for path in per_class[name]
        )
        for split, per_class in found.items()
    }
    notes = [f"Left out, as there is no picture in it: {name}." for name in sorted(named - filled, key=natural_order)]
    if others:
        notes.append(f"Not taken, as these are no pictures that can be read: {_counted(others)}.")
    if empty := [name for name in classes if "train" in found and not found["train"].get(name)]:
        notes.append(f"No training picture: {', '.join(empty[:10])}.")
    return Dataset(name=folder.resolve().name, classes=classes, splits=items, notes=tuple(notes))


def class_folders(folder: Path, others: Counter[str]) -> Iterator[tuple[str, list[Path]]]:
    """The name of each class and its pictures; folders in a class folder belong to it. ``others`` counts the endings of
    what else is there."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.name.startswith("."):
            yield unicodedata.normalize("NFC", entry.name), list(pictures_below(entry, others))


def pictures_below(folder: Path, others: Counter[str] | None = None) -> Iterator[Path]:
    """Every picture in a folder and those below, hidden ones left out, links followed but not in circles."""
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            folders[:] = []
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.startswith("."):
                continue
            if name.lower().endswith(SUFFIXES):
                yield Path(place, name)
            elif others is not None:
                others[Path(name).suffix.lower() or "no ending"] += 1


def _counted(others: Counter[str]) -> str:
    return ", ".join(
        f"{number} {'file' if number == 1 else 'files'} ({ending})" for ending, number in others.most_common(5)
    )


def _refuse_folder(folder: Path, others: Counter[str]) -> None:
    loose = [entry for entry in folder.iterdir() if entry.name.lower().endswith(SUFFIXES)]
    if loose:
        raise DataError(
            f"{folder} holds {len(loose)} pictures, but no folders that say what they show.",
            hint="Put the pictures of each class into a folder with its name, or write a table: image,label.",
        )
    seen = f", but {_counted(others)}" if others else ""
    raise DataError(
        f"{folder} holds no pictures in class folders{seen}.", hint=f"Pictures end in {', '.join(SUFFIXES)}."
    )


# ---- a split where there is none ----


def split_off(items: Iterable[Item], part: float = HELD_OUT, salt: str = "held out") -> tuple[list[Item], list[Item]]:
    """(rest, part): about so many of each class, by a hash of their names, so that adding pictures moves no others.

    Equal pictures come on one side; a class of two or more has at least one on each."""
    items = list(items)
    place = {item.key: _place(item.key, salt) for item in items}
    leaders = _leaders(items)
    chosen = {item.key for item in items if place[leaders[item.key]] < part}
    per_class: dict[object, list[Item]] = {}
    for item in items:
        per_class.setdefault(item.label, []).append(item)
    for members in per_class.values():
        groups = sorted({leaders[item.key] for item in members}, key=lambda key: place[key])
        inside = [key for key in groups if key in chosen]
        if len(groups) > 1 and not inside:
            moved, add = groups[0], True
        elif len(groups) > 1 and len(inside) == len(groups):
            moved, add = groups[-1], False
        elif len(groups) == 1 and inside:
            moved, add = groups[0], False  # the only picture of a class is for training
        else:
            continue
        keys = {item.key for item in items if leaders[item.key] == moved}
        chosen = chosen | keys if add else chosen - keys
    return [item for item in items if item.key not in chosen], [item for item in items if item.key in chosen]


def _place(key: str, salt: str) -> float:
    digest = hashlib.sha256(f"{salt}\n{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _leaders(items: list[Item]) -> dict[str, str]:
    """For each picture the first one of those that are equal to it, byte for byte."""
    leaders, first = {}, {}
    sizes = {item.key: _size(item) for item in items}
    shared = {size for size, number in Counter(sizes.values()).items() if number > 1 and size is not None}
    for item in items:
        if sizes[item.key] not in shared:
            leaders[item.key] = item.key
            continue
        try:
            content = item.source.read()
        except BadPicture:  # whoever loads it will tell
            leaders[item.key] = item.key
            continue
        digest = hashlib.sha256(content if isinstance(content, bytes) else content.tobytes()).digest()
        leaders[item.key] = first.setdefault(digest, item.key)
    return leaders


def _size(item: Item) -> int | None:
    source = item.source
    if isinstance(source, InFile):
        try:
            return os.stat(source.path).st_size
        except OSError:
            return None
    return getattr(source, "size", None)
