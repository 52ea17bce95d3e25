"""Tar shards, as WebDataset writes them: members KEY.jpg and KEY.cls. They are indexed once and read in place; nothing
is extracted, and names serve as keys only."""

import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path

from vitral.data.dataset import NO_LABEL, DatasetIndex, Item, TarSource, counted_reasons, named_split
from vitral.data.decode import SUFFIXES
from vitral.errors import DataError
from vitral.files import as_text

_LARGEST_LABEL = 64 * 1024
MOST_CLASSES = 100_000
MOST_SHARDS = 100_000
Label = str | int | tuple[int, ...]


def expand_braces(pattern: str) -> list[Path]:
    """train-{000..009}.tar and {train,val}-0.tar, as shells have it."""
    choices: list[list[str] | range] = []
    widths = []
    for part in re.split(r"(\{[^{}]*\})", pattern):
        numbers = re.fullmatch(r"\{(\d{1,12})\.\.(\d{1,12})\}", part)
        widths.append(len(numbers[1]) if numbers else 0)
        if numbers:
            choices.append(range(int(numbers[1]), int(numbers[2]) + 1))
        else:
            choices.append(part[1:-1].split(",") if part.startswith("{") else [part])
    if not 0 < (number := prod(map(len, choices))) <= MOST_SHARDS:
        raise DataError(f"{pattern} stands for {number:,} shards; it may be 1 to {MOST_SHARDS:,}.")
    named = [
        "".join(str(word).zfill(width) for word, width in zip(words, widths, strict=True))
        for words in product(*choices)
    ]
    paths = [Path(os.path.expanduser(name)) for name in named]
    if missing := [path for path in paths if not path.is_file()]:
        raise DataError(
            f"There is no shard {missing[0]}{f' (and {len(missing) - 1} more)' if len(missing) > 1 else ''}."
        )
    return paths


def open_shards(paths: Iterable[Path], folder: Path | None = None, *, labelled: bool = True) -> DatasetIndex:
    """All shards of a dataset; a word of their names tells the split."""
    found: dict[str, list[tuple[str, Label, TarSource]]] = {}
    skipped: dict[str, str] = {}
    notes: list[str] = []
    paths = list(paths)
    named = {path: named_split(path.name) for path in paths}
    if folder is None and len(set(named.values())) == 1:
        named = dict.fromkeys(paths)  # shards that somebody chose are what is asked for, whatever they are called
    if any(named.values()) and (unnamed := [path.name for path, split in named.items() if split is None]):
        more = f" and {len(unnamed) - 1} more" if len(unnamed) > 1 else ""
        notes.append(f"Taken for training, as the name says no split: {as_text(unnamed[0])}{more}.")
    for path in paths:
        found.setdefault(named[path] or "train", []).extend(_read_index(path, skipped, notes, labelled))
    home = paths[0].parent
    classes = () if not labelled else _classes(home, {label for rows in found.values() for _, label, _ in rows})
    numbers = {name: index for index, name in enumerate(classes)}
    splits: dict[str, tuple[Item, ...]] = {}
    for split, rows in found.items():
        items = []
        for key, label, source in rows:
            number = numbers.get(label, -1) if isinstance(label, str) else label
            parts = number if isinstance(number, tuple) else [number]
            if not labelled or all(0 <= part < len(classes) for part in parts):
                items.append(Item(key, number, source))
            else:
                skipped[key] = f"label {label!r} is none of the {len(classes)} classes"
        splits[split] = tuple(items)
    if not any(splits.values()):
        reason = f" ({next(iter(skipped.values()))})" if skipped else ""
        raise DataError(
            f"The shards in {home} hold no picture with a label{reason}.", hint="Members are KEY.jpg and KEY.cls."
        )
    if skipped:
        notes.append(f"Members that were left out: {counted_reasons(skipped)}.")
    name = folder.resolve().name if folder else paths[0].stem
    multi = any(isinstance(item.label, tuple) for items in splits.values() for item in items)
    return DatasetIndex(
        name=as_text(name), classes=classes, splits=splits, notes=tuple(notes), skipped=skipped, multi_label=multi
    )


def _classes(folder: Path, labels: set[Label]) -> tuple[str, ...]:
    listed = folder / "classes.txt"
    if listed.is_file():
        return _read_classes(listed)
    names = sorted(label for label in labels if isinstance(label, str))
    if names:
        return tuple(names)
    numbers = [label for label in labels if isinstance(label, int)]
    numbers += [number for label in labels if isinstance(label, tuple) for number in label]
    # One class for each number up to the largest.
    sensible = [number for number in numbers if 0 <= number < MOST_CLASSES]
    return tuple(str(number) for number in range(max(sensible, default=-1) + 1))


def _read_classes(listed: Path) -> tuple[str, ...]:
    try:
        lines = listed.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{listed} is no text in UTF-8: {error}.") from error
    names = [line.strip() for line in lines]
    while names and not names[-1]:
        names.pop()
    if "" in names:
        raise DataError(
            f"Line {names.index('') + 1} of {listed} is empty.", hint="Line by line, it is the names of 0, 1, 2."
        )
    if twice := [name for name, number in Counter(names).items() if number > 1]:
        raise DataError(
            f"{listed} names a class twice: {', '.join(twice[:5])}.", hint="Line by line, it is the names of 0, 1, 2."
        )
    return tuple(names)


@dataclass
class _Index:
    """What is in one shard."""

    path: Path
    skipped: dict[str, str]
    pictures: dict[str, TarSource] = field(default_factory=dict)
    labels: dict[str, Label] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    compound: dict[str, tarfile.TarInfo] = field(default_factory=dict)
    """Pictures with a word between key and ending."""

    def take(self, shard: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Its key is the path up to the first dot of the last part, as in WebDataset."""
        folder, slash, last = member.name.rpartition("/")
        stem, _, ending = last.partition(".")
        key = folder + slash + stem
        parts = member.name.replace("\\", "/").split("/")
        if not member.isreg() or member.issparse() or ".." in parts or member.name.startswith("/"):
            self.skip(member, "no plain file inside the shard")
        elif f".{ending.lower()}".endswith(SUFFIXES):
            is_plain = f".{ending.lower()}" in SUFFIXES  # KEY.jpg rather than KEY.depth.png, whichever comes first
            if key in self.pictures and not (is_plain and key in self.compound):
                self.skip(member, "there is another picture of the same key before it")
                return
            if key in self.compound:
                self.skip(self.compound.pop(key), "there is another picture of the same key, without a word between")
            if not is_plain:
                self.compound[key] = member
            self.pictures[key] = TarSource(str(self.path), member.offset_data, member.size)
        elif ending in ("cls", "json") and member.size <= _LARGEST_LABEL:
            if member.name in self.names:
                self.skip(member, "there is another label of the same name before it")
                return
            self.names.add(member.name)
            stream = shard.extractfile(member)
            label = _parse_label(stream.read() if stream else b"", ending)
            if label is not None:
                self.labels.setdefault(key, label)

    def skip(self, member: tarfile.TarInfo, reason: str) -> None:
        self.skipped[as_text(f"{self.path.stem}/{member.name[:100]}")] = reason


def _read_index(
    path: Path, skipped: dict[str, str], notes: list[str], labelled: bool
) -> list[tuple[str, Label, TarSource]]:
    index = _Index(path, skipped)
    try:
        with tarfile.open(path, "r:") as shard:
            for member in shard:
                if member.size < 0:  # which would bring the reader back to the same member for ever
                    raise tarfile.ReadError(f"{member.name} has {member.size} bytes")
                if not member.isdir():
                    index.take(shard, member)
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, RecursionError) as error:
        if not index.pictures:
            raise DataError(f"{path} is no tar shard: {error}.") from error
        notes.append(f"{as_text(path.name)} is cut off; the {len(index.pictures)} pictures before that are used.")
    keys = {key: as_text(f"{path.stem}/{key}") for key in index.pictures}
    if not labelled:
        return [(keys[key], NO_LABEL, source) for key, source in index.pictures.items()]
    skipped |= {keys[key]: "no usable label beside it" for key in index.pictures.keys() - index.labels.keys()}
    return [(keys[key], index.labels[key], source) for key, source in index.pictures.items() if key in index.labels]


def _parse_label(content: bytes, ending: str) -> Label | None:
    try:
        text = content.decode("utf-8").strip()
        if ending == "cls":
            return int(text) if re.fullmatch(r"-?\d+", text) else text or None
        told = json.loads(text)
    except (ValueError, RecursionError):
        return None
    label = told.get("label", told.get("cls")) if isinstance(told, dict) else told
    if isinstance(label, list):
        return tuple(sorted(set(label))) if all(type(number) is int for number in label) else None
    return as_text(label) if isinstance(label, str) and label else label if type(label) is int else None
