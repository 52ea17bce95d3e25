"""Items: one picture each, wherever it lies, with its label; and the dataset that they make."""

import atexit
import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, Protocol
from weakref import WeakSet

import numpy as np

from vitral.data.decode import Header, Pixels, read_header
from vitral.data.limits import BadImageError, check_bytes
from vitral.data.parquet import GROUPS
from vitral.errors import first_line

SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}
"""What people call their splits."""


def named_split(name: str) -> str | None:
    """crash-test-train-00000.tar -> train: the last word that is one."""
    return next((SPLITS[word] for word in reversed(re.split(r"[^a-z]+", name.lower())) if word in SPLITS), None)


class Source(Protocol):
    """Where a picture's content is."""

    def read(self) -> bytes | Pixels: ...


NO_LABEL = -1
"""Of a picture that is only looked at."""


@dataclass(frozen=True, slots=True)
class FileSource:
    path: str

    def read(self) -> bytes:
        try:
            path = Path(self.path)
            found = path.stat()
            if not S_ISREG(found.st_mode):  # a device does not end, and a pipe may never begin
                raise BadImageError("unreadable", "no regular file")
            check_bytes(found.st_size)
            return path.read_bytes()
        except FileNotFoundError:
            raise BadImageError("missing") from None
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            raise BadImageError("unreadable", getattr(error, "strerror", None) or str(error)) from error


@dataclass(frozen=True, slots=True)
class TarSource:
    """A member of a shard, by its place: nothing is ever extracted."""

    path: str
    offset: int
    size: int

    def read(self) -> bytes:
        check_bytes(self.size)
        try:
            stream = _open(self.path, os.getpid())
            stream.seek(self.offset)
            content = stream.read(self.size)
        except (OSError, OverflowError) as error:  # OverflowError: a place that no file has
            raise BadImageError("unreadable", getattr(error, "strerror", None) or str(error)) from error
        if len(content) < self.size:
            raise BadImageError("truncated", "the shard ends before the picture does")
        return content


@lru_cache(maxsize=64)
def _open(path: str, process: int) -> BinaryIO:
    """A handle for each process: one shared by a fork would move under its feet."""
    stream = Path(path).open("rb")  # noqa: SIM115 - it stays open for the next picture
    _OPENED.add(stream)
    return stream


_OPENED: WeakSet[BinaryIO] = WeakSet()


@atexit.register
def _close_all() -> None:
    for stream in list(_OPENED):
        stream.close()


@dataclass(frozen=True, slots=True)
class TableSource:
    """A row of a Parquet file whose cells hold pictures."""

    path: str
    column: str
    row: int

    def read(self) -> bytes:
        try:
            cell = GROUPS.read_cell(self.path, self.column, self.row)
        except FileNotFoundError:
            raise BadImageError("missing") from None
        except (OSError, ValueError, NotImplementedError, MemoryError, IndexError) as error:  # what pyarrow raises
            raise BadImageError("unreadable", first_line(error)) from error
        content = cell.get("bytes") if isinstance(cell, dict) else cell
        if not isinstance(content, bytes):
            raise BadImageError("empty", "the cell holds no picture")
        return content


@dataclass(frozen=True, slots=True)
class DigitsSource:
    """One of the built-in digits."""

    split: str
    row: int

    def read(self) -> Pixels:
        return digits()[f"{self.split}_images"][self.row][..., None]


@lru_cache(maxsize=1)
def digits() -> dict[str, np.ndarray]:
    with files("vitral.data").joinpath("digits.npz").open("rb") as stream, np.load(stream) as arrays:
        return dict(arrays)


@dataclass(frozen=True, slots=True)
class Item:
    key: str
    """A stable name that can be written anywhere: the path below the dataset, or shard and key."""
    label: int | tuple[int, ...]
    """The class, or all classes of a multi-label picture; -1: not labelled."""
    source: Source


@dataclass(frozen=True, kw_only=True)
class DatasetIndex:
    name: str
    classes: tuple[str, ...]
    splits: dict[str, tuple[Item, ...]]
    """train, and val or test where there are any."""
    multi_label: bool = False
    notes: tuple[str, ...] = ()
    """What was noticed while looking for pictures."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Members and rows that are no picture with a label, and why."""

    def fingerprint(self) -> str:
        """SHA-256 over names and labels of every split: whether a run goes on with the data that it began with."""
        digest = hashlib.sha256("\n".join(self.classes).encode())
        for split in sorted(self.splits):
            digest.update(f"\n{split}".encode())
            for item in self.splits[split]:
                digest.update(f"\n{item.key}\t{item.label}".encode())
        return digest.hexdigest()


def header_of(content: bytes | Pixels) -> Header:
    """What is known of a picture before it is decoded."""
    if isinstance(content, bytes):
        return read_header(content)
    height, width, bands = content.shape
    return Header(format="built-in", height=height, width=width, mode="grey" if bands == 1 else "colour", bands=bands)


def sample_headers(items: Sequence[Item], most: int) -> list[Header]:
    """Of at most so many pictures, from everywhere among them; those that cannot be read are passed over."""
    number = min(most, len(items))
    found = []
    for place in range(number):
        try:
            found.append(header_of(items[place * len(items) // number].source.read()))
        except BadImageError:
            continue
    return found


def natural_channels(headers: Sequence[Header]) -> int:
    """What a network for these pictures should see: 1 where all are grey, 3 where some have colours, or the commonest
    number of bands."""
    found = Counter(header.bands for header in headers)
    if not found:
        return 3
    commonest = found.most_common(1)[0][0]
    return commonest if commonest not in (1, 3) else max(bands for bands in found if bands in (1, 3))


def counts(items: Sequence[Item], classes: int) -> list[int]:
    """Pictures of each class."""
    found = [0] * classes
    for item in items:
        for label in (item.label,) if isinstance(item.label, int) else item.label:
            if label >= 0:
                found[label] += 1
    return found


def natural_order(name: str) -> tuple[object, ...]:
    """class2 before class10; 01 and 1 are as large as each other, so that their letters decide."""
    parts = [(part.lstrip("0") if part.isdecimal() else None, part) for part in re.split(r"(\d+)", name)]
    return tuple((1, 0, part) if digits is None else (0, len(digits), digits) for digits, part in parts), name


def counted_reasons(skipped: dict[str, str]) -> str:
    """The commonest reasons, and an example of each."""
    examples = {reason: key for key, reason in reversed(skipped.items())}
    told = [f"{n} ({examples[reason]}: {reason})" for reason, n in Counter(skipped.values()).most_common(3)]
    rest = len(skipped) - sum(n for _, n in Counter(skipped.values()).most_common(3))
    return ", ".join([*told, f"{rest} more"] if rest else told)
