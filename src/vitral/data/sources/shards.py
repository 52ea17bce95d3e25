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
from typing import BinaryIO, NamedTuple

from vitral.data.dataset import NO_LABEL, DatasetIndex, Item, Source, TarSource, split_from_name, summarize_reasons
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
    source: Source


def expand_paths(pattern: str) -> list[Path]:
    """Return the files that a pattern such as train-{000..009}.tar or {train,val}-0.tar names, as shells expand it."""
    paths = [Path(os.path.expanduser(name)) for name in expand_braces(pattern)]
    if missing := [path for path in paths if not path.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(f"Shards not found: {missing[0]}{more}.")
    return paths


def expand_braces(pattern: str) -> list[str]:
    """Return the names that a pattern stands for."""
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
    return [
        "".join(str(word).zfill(width) for word, width in zip(words, widths, strict=True))
        for words in product(*choices)
    ]


def open_shards(paths: Iterable[Path], folder: Path | None = None, *, labeled: bool = True) -> DatasetIndex:
    """Return the index of all shards of a dataset; a word in the name of each shard is its split."""
    paths = list(paths)
    home = paths[0].parent
    listed = home / "classes.txt"
    return combine_shards(
        [read_shard(ShardIndex(path.name, str(path)), path) for path in paths],
        home=str(home),
        name=as_text(folder.resolve().name if folder else paths[0].stem),
        is_folder=folder is not None,
        classes=parse_classes(listed.read_bytes(), str(listed)) if labeled and listed.is_file() else None,
        labeled=labeled,
    )


def combine_shards(
    shards: "Sequence[ShardIndex]",
    *,
    home: str,
    name: str,
    is_folder: bool,
    classes: tuple[str, ...] | None,
    labeled: bool,
) -> DatasetIndex:
    """Return the index of a dataset. `classes` are those of classes.txt, if there is one."""
    skipped, notes = dict[str, str](), list[str]()
    samples: dict[str, list[Sample]] = {}
    splits_of = _find_splits([shard.name for shard in shards], notes, is_folder=is_folder)
    for shard, split in zip(shards, splits_of, strict=True):
        skipped |= shard.skipped
        if shard.is_cut_off:
            notes.append(f"{as_text(shard.name)} is cut off; the {len(shard.images)} images before that are used.")
        samples.setdefault(split, []).extend(shard.samples(skipped, labeled=labeled))
    members = [sample for members in samples.values() for sample in members]
    classes = _find_classes(home, members, classes) if labeled else ()
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
        name=name,
        classes=classes,
        splits={split: tuple(items) for split, items in splits.items()},
        notes=tuple(notes),
        skipped=skipped,
        multi_label=any(isinstance(item.label, tuple) for items in splits.values() for item in items),
    )


def _find_splits(names: Sequence[str], notes: list[str], *, is_folder: bool) -> list[str]:
    """Return the split of each shard, by its name."""
    splits = [split_from_name(name) for name in names]
    if not is_folder and len(set(splits)) == 1:
        return ["train"] * len(names)  # shards that somebody names are the training data, whatever their names
    unnamed = [name for name, split in zip(names, splits, strict=True) if split is None]
    if any(splits) and unnamed:
        more = f" and {len(unnamed) - 1} more" if len(unnamed) > 1 else ""
        notes.append(f"Used for training, because the name contains no split: {as_text(unnamed[0])}{more}.")
    return [split or "train" for split in splits]


def _check_one_kind(home: str, samples: Sequence[Sample]) -> None:
    """Raise DataError if some labels are names and others are indices: 0 could be either."""
    name = next((sample for sample in samples if isinstance(sample.label, str)), None)
    index = next((sample for sample in samples if not isinstance(sample.label, str)), None)
    if name and index:
        raise DataError(
            f"The labels of the shards in {home} mix names and indices (got {name.label!r} for {name.key} and "
            f"{index.label!r} for {index.key}; expected one kind).",
            hint="Write class names, or zero-based class indices, for all images.",
        )


def _find_classes(home: str, samples: Sequence[Sample], listed: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the listed classes, or else the names that occur, or one class per index up to the largest."""
    _check_one_kind(home, samples)
    labels = {sample.label for sample in samples}
    if listed is not None:
        return listed
    if names := sorted(label for label in labels if isinstance(label, str)):
        return tuple(names)
    numbers = [label if isinstance(label, tuple) else (label,) for label in labels if not isinstance(label, str)]
    usable = [index for indices in numbers for index in indices if 0 <= index < MAX_CLASSES]
    return tuple(str(index) for index in range(max(usable, default=-1) + 1))


def parse_classes(content: bytes, listed: str) -> tuple[str, ...]:
    """Return the class names of classes.txt, one per line."""
    try:
        names = [line.strip() for line in content.decode("utf-8-sig").rstrip().splitlines()]
    except UnicodeDecodeError as error:
        raise DataError(f"{listed} is not UTF-8 text: {error}.") from error
    if "" in names:
        raise DataError(f"Line {names.index('') + 1} of {listed} is empty.", hint=_CLASSES_HINT)
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{listed} repeats a class: {', '.join(repeated[:5])}.", hint=_CLASSES_HINT)
    return tuple(names)


@dataclass
class ShardIndex:
    """Collect the images and labels of one shard."""

    name: str
    """The file name."""
    path: str
    skipped: dict[str, str] = field(default_factory=dict)
    images: dict[str, Source] = field(default_factory=dict)
    labels: dict[str, Label] = field(default_factory=dict)
    is_cut_off: bool = False
    label_names: set[str] = field(default_factory=set)
    compound: dict[str, tarfile.TarInfo] = field(default_factory=dict)
    """Images with a word between key and suffix: KEY.depth.png."""

    @property
    def stem(self) -> str:
        """Return the file name without the suffix, with which the names of the images start."""
        return Path(self.name).stem

    def samples(self, skipped: dict[str, str], *, labeled: bool) -> list[Sample]:
        """Return the images with their labels, and add those without one to `skipped`."""
        keys = {key: as_text(f"{self.stem}/{key}") for key in self.images}
        if not labeled:
            return [Sample(keys[key], NO_LABEL, source) for key, source in self.images.items()]
        skipped |= {keys[key]: "no usable label" for key in self.images if key not in self.labels}
        return [Sample(keys[k], self.labels[k], source) for k, source in self.images.items() if k in self.labels]

    def source(self, shard: tarfile.TarFile, member: tarfile.TarInfo) -> Source:
        """Return where the image of a member is."""
        return TarSource(self.path, member.offset_data, member.size)

    def add(self, shard: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Index one member. Its key is the path up to the first dot of the file name, as in WebDataset."""
        folder, slash, file_name = member.name.rpartition("/")
        stem, _, suffix = file_name.partition(".")
        key = folder + slash + stem
        parts = member.name.replace("\\", "/").split("/")
        if not member.isreg() or member.issparse() or ".." in parts or member.name.startswith("/"):
            self.skip(member, "not a plain file inside the shard")
        elif f".{suffix.lower()}".endswith(SUFFIXES):
            self._add_image(shard, member, key, is_plain=f".{suffix.lower()}" in SUFFIXES)
        elif suffix in ("cls", "json") and member.size <= MAX_LABEL_BYTES:
            self._add_label(shard, member, key, suffix)

    def _add_image(self, shard: tarfile.TarFile, member: tarfile.TarInfo, key: str, *, is_plain: bool) -> None:
        """Add an image, preferring KEY.jpg to KEY.depth.png, whichever comes first."""
        if key in self.images and not (is_plain and key in self.compound):
            self.skip(member, "an earlier image has the same key")
            return
        if key in self.compound:
            self.skip(self.compound.pop(key), "another image has the same key and a plain name")
        if not is_plain:
            self.compound[key] = member
        self.images[key] = self.source(shard, member)

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
        self.skipped[as_text(f"{self.stem}/{member.name[:100]}")] = reason


def read_shard(index: ShardIndex, content: Path | BinaryIO) -> ShardIndex:
    """Fill the index of a shard from its file. Raise DataError if it is not a tar file."""
    path, stream = (content, None) if isinstance(content, Path) else (None, content)
    try:
        with tarfile.open(path, "r:", stream) as shard:
            for member in shard:
                if member.size < 0:  # forged: the reader would return to the same member again and again
                    raise tarfile.ReadError(f"{member.name} has {member.size} bytes")
                if not member.isdir():
                    index.add(shard, member)
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, RecursionError) as error:
        if not index.images:
            raise DataError(f"{index.path} is not a tar shard: {error}.") from error
        index.is_cut_off = True
    return index


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
