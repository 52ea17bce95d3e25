"""Open tar shards, as WebDataset writes them: members KEY.jpg and KEY.cls.

Shards are indexed once and read in place. Nothing is extracted, and member names serve as keys only.
"""

import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

from vitral.data.dataset import NO_LABEL, DatasetIndex, Item, TarSource, split_from_name, summarize_reasons
from vitral.data.headers import SUFFIXES
from vitral.errors import DataError
from vitral.files import as_text

MAX_CLASSES = 100_000
MAX_SHARDS = 100_000
MAX_LABEL_BYTES = 64 * 1024
Label = str | int | tuple[int, ...]
_CLASSES_HINT = "Write one class name per line, for the indices 0, 1, 2, ..."


class Sample(NamedTuple):
    """An image of a shard with its label as written."""

    key: str
    label: Label
    source: TarSource


def expand_braces(pattern: str) -> list[Path]:
    """Return the files that a pattern such as train-{000..009}.tar or {train,val}-0.tar names, as shells expand it."""
    choices: list[list[str] | range] = []
    widths = []
    for part in re.split(r"(\{[^{}]*\})", pattern):
        numbers = re.fullmatch(r"\{(\d{1,12})\.\.(\d{1,12})\}", part)
        widths.append(len(numbers[1]) if numbers else 0)
        if numbers:
            choices.append(range(int(numbers[1]), int(numbers[2]) + 1))
        else:
            choices.append(part[1:-1].split(",") if part.startswith("{") else [part])
    if not 0 < (count := prod(map(len, choices))) <= MAX_SHARDS:
        raise DataError(f"{pattern} names {count:,} shards (expected 1 to {MAX_SHARDS:,}).")
    names = [
        "".join(str(word).zfill(width) for word, width in zip(words, widths, strict=True))
        for words in product(*choices)
    ]
    paths = [Path(os.path.expanduser(name)) for name in names]
    if missing := [path for path in paths if not path.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(f"Shards not found: {missing[0]}{more}.")
    return paths


def open_shards(paths: Iterable[Path], folder: Path | None = None, *, labeled: bool = True) -> DatasetIndex:
    """Return the index of all shards of a dataset; a word in the name of each shard is its split."""
    paths = list(paths)
    home, skipped, notes = paths[0].parent, {}, []
    samples: dict[str, list[Sample]] = {}
    for path, split in _find_splits(paths, folder, notes).items():
        samples.setdefault(split, []).extend(_read_shard(path, skipped, notes, labeled))
    classes = _find_classes(home, [sample for members in samples.values() for sample in members]) if labeled else ()
    index_of = {name: index for index, name in enumerate(classes)}
    splits: dict[str, list[Item]] = {split: [] for split in samples}
    for split, members in samples.items():
        for key, written, source in members:
            item = Item(key, index_of.get(written, -1) if isinstance(written, str) else written, source)
            if not labeled or all(0 <= index < len(classes) for index in item.labels):
                splits[split].append(item)
            else:
                skipped[key] = f"label {written!r} is not one of the {len(classes)} classes"
    if not any(splits.values()):
        reason = f" ({next(iter(skipped.values()))})" if skipped else ""
        raise DataError(
            f"The shards in {home} have no image with a label{reason}.", hint="Name the members KEY.jpg and KEY.cls."
        )
    if skipped:
        notes.append(f"Skipped members: {summarize_reasons(skipped)}.")
    return DatasetIndex(
        name=as_text(folder.resolve().name if folder else paths[0].stem),
        classes=classes,
        splits={split: tuple(items) for split, items in splits.items()},
        notes=tuple(notes),
        skipped=skipped,
        multi_label=any(isinstance(item.label, tuple) for items in splits.values() for item in items),
    )


def _find_splits(paths: list[Path], folder: Path | None, notes: list[str]) -> dict[Path, str]:
    names = {path: split_from_name(path.name) for path in paths}
    if folder is None and len(set(names.values())) == 1:
        return dict.fromkeys(paths, "train")  # shards that somebody names are the training data, whatever their names
    if any(names.values()) and (unnamed := [path.name for path, split in names.items() if split is None]):
        more = f" and {len(unnamed) - 1} more" if len(unnamed) > 1 else ""
        notes.append(f"Used for training, because the name contains no split: {as_text(unnamed[0])}{more}.")
    return {path: split or "train" for path, split in names.items()}


def _check_one_kind(home: Path, samples: Sequence[Sample]) -> None:
    """Raise DataError if some labels are names and others are indices: 0 could be either."""
    name = next((sample for sample in samples if isinstance(sample.label, str)), None)
    index = next((sample for sample in samples if not isinstance(sample.label, str)), None)
    if name and index:
        raise DataError(
            f"The labels of the shards in {home} mix names and indices (got {name.label!r} for {name.key} and "
            f"{index.label!r} for {index.key}; expected one kind).",
            hint="Write class names, or zero-based class indices, for all images.",
        )


def _find_classes(folder: Path, samples: Sequence[Sample]) -> tuple[str, ...]:
    """Return the classes in classes.txt, or else the names that occur, or one class per index up to the largest."""
    _check_one_kind(folder, samples)
    labels = {sample.label for sample in samples}
    listed = folder / "classes.txt"
    if listed.is_file():
        return _read_classes(listed)
    if names := sorted(label for label in labels if isinstance(label, str)):
        return tuple(names)
    numbers = [label if isinstance(label, tuple) else (label,) for label in labels if not isinstance(label, str)]
    usable = [index for indices in numbers for index in indices if 0 <= index < MAX_CLASSES]
    return tuple(str(index) for index in range(max(usable, default=-1) + 1))


def _read_classes(listed: Path) -> tuple[str, ...]:
    try:
        names = [line.strip() for line in listed.read_text(encoding="utf-8-sig").rstrip().splitlines()]
    except UnicodeDecodeError as error:
        raise DataError(f"{listed} is not UTF-8 text: {error}.") from error
    if "" in names:
        raise DataError(f"Line {names.index('') + 1} of {listed} is empty.", hint=_CLASSES_HINT)
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{listed} repeats a class: {', '.join(repeated[:5])}.", hint=_CLASSES_HINT)
    return tuple(names)


@dataclass
class _ShardIndex:
    """Collect the images and labels of one shard."""

    path: Path
    skipped: dict[str, str]
    images: dict[str, TarSource] = field(default_factory=dict)
    labels: dict[str, Label] = field(default_factory=dict)
    label_names: set[str] = field(default_factory=set)
    compound: dict[str, tarfile.TarInfo] = field(default_factory=dict)
    """Images with a word between key and suffix: KEY.depth.png."""

    def add(self, shard: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Index one member. Its key is the path up to the first dot of the file name, as in WebDataset."""
        folder, slash, file_name = member.name.rpartition("/")
        stem, _, suffix = file_name.partition(".")
        key = folder + slash + stem
        parts = member.name.replace("\\", "/").split("/")
        if not member.isreg() or member.issparse() or ".." in parts or member.name.startswith("/"):
            self.skip(member, "not a plain file inside the shard")
        elif f".{suffix.lower()}".endswith(SUFFIXES):
            self._add_image(member, key, is_plain=f".{suffix.lower()}" in SUFFIXES)
        elif suffix in ("cls", "json") and member.size <= MAX_LABEL_BYTES:
            self._add_label(shard, member, key, suffix)

    def _add_image(self, member: tarfile.TarInfo, key: str, *, is_plain: bool) -> None:
        """Add an image, preferring KEY.jpg to KEY.depth.png, whichever comes first."""
        if key in self.images and not (is_plain and key in self.compound):
            self.skip(member, "an earlier image has the same key")
            return
        if key in self.compound:
            self.skip(self.compound.pop(key), "another image has the same key and a plain name")
        if not is_plain:
            self.compound[key] = member
        self.images[key] = TarSource(str(self.path), member.offset_data, member.size)

    def _add_label(self, shard: tarfile.TarFile, member: tarfile.TarInfo, key: str, suffix: str) -> None:
        if member.name in self.label_names:
            self.skip(member, "an earlier label has the same name")
            return
        self.label_names.add(member.name)
        stream = shard.extractfile(member)
        label = _parse_label(stream.read() if stream else b"", suffix)
        if label is not None:
            self.labels.setdefault(key, label)

    def skip(self, member: tarfile.TarInfo, reason: str) -> None:
        self.skipped[as_text(f"{self.path.stem}/{member.name[:100]}")] = reason


def _read_shard(path: Path, skipped: dict[str, str], notes: list[str], labeled: bool) -> list[Sample]:
    index = _ShardIndex(path, skipped)
    try:
        with tarfile.open(path, "r:") as shard:
            for member in shard:
                if member.size < 0:  # forged: the reader would return to the same member again and again
                    raise tarfile.ReadError(f"{member.name} has {member.size} bytes")
                if not member.isdir():
                    index.add(shard, member)
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, RecursionError) as error:
        if not index.images:
            raise DataError(f"{path} is not a tar shard: {error}.") from error
        notes.append(f"{as_text(path.name)} is cut off; the {len(index.images)} images before that are used.")
    keys = {key: as_text(f"{path.stem}/{key}") for key in index.images}
    if not labeled:
        return [Sample(keys[key], NO_LABEL, source) for key, source in index.images.items()]
    skipped |= {keys[key]: "no usable label" for key in index.images if key not in index.labels}
    return [Sample(keys[key], index.labels[key], source) for key, source in index.images.items() if key in index.labels]


def _parse_label(content: bytes, suffix: str) -> Label | None:
    """Return a class name, an index or a list of indices, or None if the content is none of these."""
    try:
        text = content.decode("utf-8").strip()
        if suffix == "cls":
            return int(text) if re.fullmatch(r"-?\d+", text) else text or None
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    label = value.get("label", value.get("cls")) if isinstance(value, dict) else value
    if isinstance(label, list):
        return tuple(sorted(set(label))) if all(type(index) is int for index in label) else None
    return as_text(label) if isinstance(label, str) and label else label if type(label) is int else None
