"""From what a person types to a dataset: class folders, tables, tar shards, the hub, or the built-in digits.

photos/                        a folder for each class, or train/ val/ test/ with such folders
labels.csv, labels.parquet     a column of pictures and one of labels
shards/, shards/train-{000..009}.tar, one.tar
hf:owner/name                  a dataset of the Hugging Face hub that is stored as Parquet
builtin:digits
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vitral.data.dataset import NO_LABEL, DatasetIndex, DigitsSource, FileSource, Item, TarSource, digits
from vitral.data.limits import BadImageError
from vitral.data.sources.folder import open_folder, open_pictures
from vitral.errors import DataError

HELD_OUT = 0.2
"""The part of each class that is held out where the data have no split of their own."""
_END = 4096
"""Bytes by which files of one size are told apart."""


def open_dataset(data: str | Path, *, labelled: bool = True) -> DatasetIndex:
    """A dataset by its name or path; DataError says what is wrong with it. Where it need not be ``labelled``, labels
    are left aside, and there are no classes."""
    found = _open(str(data), labelled)
    if labelled:
        return found
    splits = {split: tuple(replace(item, label=NO_LABEL) for item in items) for split, items in found.splits.items()}
    return replace(found, classes=(), splits=splits, multi_label=False)


def _open(words: str, labelled: bool) -> DatasetIndex:
    if words.startswith("builtin:"):
        return open_builtin(words.removeprefix("builtin:"))
    if words.startswith("hf:"):
        from vitral.data.sources.hub import open_hub

        return open_hub(words.removeprefix("hf:"), labelled=labelled)
    from vitral.data.sources.shards import expand_braces, open_shards

    path = Path(os.path.expanduser(words))
    if path.suffix.lower() == ".tar" and path.is_file():
        return open_shards([path], labelled=labelled)
    if not path.exists() and ("{" in words or words.endswith(".tar")):
        return open_shards(expand_braces(words), labelled=labelled)
    if path.suffix.lower() in (".csv", ".tsv", ".parquet"):
        from vitral.data.sources.table import open_table

        return open_table(path, labelled=labelled)
    if not path.is_dir():
        raise DataError(
            f"There is no folder {path}." if not path.exists() else f"{path} is no folder, table or tar shard.",
            hint="Data is a folder of class folders, a .csv or .parquet table, .tar shards, hf:owner/name, or "
            "builtin:digits.",
        )
    if shards := sorted(shard for shard in path.glob("*.tar") if shard.is_file()):
        return open_shards(shards, folder=path, labelled=labelled)
    return open_folder(path) if labelled else open_pictures(path)


def open_builtin(name: str) -> DatasetIndex:
    if name != "digits":
        raise DataError(f"There is no built-in dataset {name!r}.", hint="There is builtin:digits.")
    splits = {
        split: tuple(
            Item(f"{split}/{row:04d}", int(label), DigitsSource(split, row))
            for row, label in enumerate(digits()[f"{split}_labels"])
        )
        for split in ("train", "test")
    }
    return DatasetIndex(name="digits", classes=tuple("0123456789"), splits=splits)


# ---- a split where there is none ----


def split_off(
    items: Iterable[Item],
    part: float = HELD_OUT,
    salt: str = "held out",
    leaders: Mapping[str, str] | None = None,
) -> tuple[list[Item], list[Item]]:
    """(rest, part): about so many of each class, by a hash of their names, so that adding pictures moves no others.

    Equal pictures come on one side; a class of two or more has at least one on each (of several labels a picture,
    unless another of them needs it elsewhere). ``leaders``: of find_equal, where it is known already."""
    items = list(items)
    place = {item.key: _place(item.key, salt) for item in items}
    leaders = find_equal(items) if leaders is None else leaders
    equal: dict[str, list[str]] = {}
    groups_of: dict[int, set[str]] = {}
    for item in items:
        equal.setdefault(leaders[item.key], []).append(item.key)
        for label in item.label if isinstance(item.label, tuple) else (item.label,):
            groups_of.setdefault(label, set()).add(leaders[item.key])
    chosen = {item.key for item in items if place[leaders[item.key]] < part}
    for members in groups_of.values():
        groups = sorted(members, key=lambda key: place[key])
        inside = [key for key in groups if key in chosen]
        if len(groups) > 1 and not inside:
            chosen.update(equal[groups[0]])
        elif inside and len(inside) == len(groups):  # the only picture of a class is for training
            chosen.difference_update(equal[groups[-1]])
    return [item for item in items if item.key not in chosen], [item for item in items if item.key in chosen]


def _place(key: str, salt: str) -> float:
    digest = hashlib.sha256(f"{salt}\n{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def find_equal(items: Sequence[Item]) -> dict[str, str]:
    """For each picture the first one of those that are equal to it, byte for byte. Only those are read that have the
    size and the end of another."""
    alike: dict[int | None, list[Item]] = {}
    for item in items:
        alike.setdefault(_size(item), []).append(item)
    leaders = {item.key: item.key for item in items}
    for size, same in alike.items():
        if size is None or len(same) == 1:
            continue
        ends: dict[bytes, list[Item]] = {}
        for item in same:
            ends.setdefault(_end(item, size), []).append(item)
        for close in ends.values():
            if len(close) > 1:
                leaders |= _equal_to_the_first(close)
    return leaders


def _equal_to_the_first(items: Iterable[Item]) -> dict[str, str]:
    first: dict[bytes, str] = {}
    leaders = {}
    for item in items:
        with suppress(BadImageError):  # whoever loads it will tell
            content = item.source.read()
            digest = hashlib.sha256(content if isinstance(content, bytes) else content.tobytes()).digest()
            leaders[item.key] = first.setdefault(digest, item.key)
    return leaders


def _end(item: Item, size: int) -> bytes:
    """The last bytes of a large file; equal ones are compared as a whole."""
    source = item.source
    if size <= 2 * _END or not isinstance(source, FileSource | TarSource):
        return b""
    start = source.offset if isinstance(source, TarSource) else 0
    try:
        with open(source.path, "rb") as stream:
            stream.seek(start + size - _END)
            return stream.read(_END)
    except (OSError, ValueError, OverflowError):
        return b""


def _size(item: Item) -> int | None:
    source = item.source
    if isinstance(source, FileSource):
        try:
            return os.stat(source.path).st_size
        except (OSError, ValueError):  # ValueError: a zero byte in the name
            return None
    return getattr(source, "size", None)
