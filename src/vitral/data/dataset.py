"""Describe a dataset: `Item` is one image with its label, `DatasetIndex` lists the items of every split."""

import hashlib
import os
import re
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from threading import Lock
from types import ModuleType
from typing import Any, Protocol
from weakref import finalize

import numpy as np

from vitral.data.headers import PEEKED_BYTES, BadImageError, Header, Pixels, check_bytes, check_start, read_header
from vitral.errors import DataError, first_line, missing_package

_ALIASES = {"train": ("train", "training"), "val": ("val", "valid", "validation", "dev"), "test": ("test", "testing")}
SPLIT_NAMES = {alias: split for split, aliases in _ALIASES.items() for alias in aliases}
"""Names that people give their splits, and the split that each stands for."""
NO_LABEL = -1
"""The label of an image in an unlabeled dataset."""
_PEEK_ABOVE = 2**23
"""The start of a larger file is checked before the file is read."""


class Source(Protocol):
    """Read the content of one image, or raise BadImageError."""

    def read(self) -> bytes | Pixels: ...


@dataclass(frozen=True, slots=True)
class FileSource:
    """An image file."""

    path: str

    def read(self) -> bytes:
        try:
            path = Path(self.path)
            status = path.stat()
            if S_ISDIR(status.st_mode):
                os.scandir(path).close()  # raises an OSError if the folder cannot be listed
            if not S_ISREG(status.st_mode):  # a device does not end, and a pipe may never begin
                raise BadImageError("unreadable", "not a regular file")
            check_bytes(status.st_size)
            with path.open("rb") as stream:
                if status.st_size > _PEEK_ABOVE:
                    check_start(stream.read(PEEKED_BYTES))
                    stream.seek(0)
                return stream.read()
        except FileNotFoundError:
            raise BadImageError("missing", "no such file. Check the path") from None
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            raise BadImageError("unreadable", getattr(error, "strerror", None) or str(error)) from error


@dataclass(frozen=True, slots=True)
class TarSource:
    """A member of a tar shard, by its offset; nothing is extracted."""

    path: str
    offset: int
    size: int

    def read(self) -> bytes:
        check_bytes(self.size)
        try:
            content = _open_shard(self.path, os.getpid()).read(self.offset, self.size)
        except (OSError, OverflowError) as error:  # OverflowError: an offset that no file has
            raise BadImageError("unreadable", getattr(error, "strerror", None) or str(error)) from error
        if len(content) < self.size:
            raise BadImageError("truncated", "the shard ends inside the image")
        return content


class _OpenShard:
    """An open shard, which any thread may read: the lock keeps another thread from moving the position."""

    def __init__(self, path: str):
        self._stream, self._lock = Path(path).open("rb"), Lock()  # noqa: SIM115 - it stays open for the next image
        finalize(self, self._stream.close)  # at the latest when the process ends

    def read(self, offset: int, size: int) -> bytes:
        with self._lock:
            self._stream.seek(offset)
            return self._stream.read(size)


@lru_cache(maxsize=64)
def _open_shard(path: str, process: int) -> _OpenShard:
    """Open a shard once per process: a handle shared by a fork would move under the other process."""
    return _OpenShard(path)


@dataclass(frozen=True, slots=True)
class TableSource:
    """A cell of a Parquet file that contains images."""

    path: str
    column: str
    row: int

    def read(self) -> bytes:
        try:
            cell = _ROW_GROUPS.read_cell(self.path, self.column, self.row)
        except FileNotFoundError:
            raise BadImageError("missing") from None
        except (OSError, ValueError, NotImplementedError, MemoryError, IndexError) as error:  # pyarrow raises these
            raise BadImageError("unreadable", first_line(error)) from error
        content = cell.get("bytes") if isinstance(cell, dict) else cell
        if not isinstance(content, bytes):
            raise BadImageError("empty", "the cell has no image")
        return content


class RowGroups:
    """Cache columns of row groups: at most `max_bytes` of them, and at least the last one. Any thread may read them.

    Whole Parquet files of images would not fit into memory, and single cells cannot be read.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes, self.bytes = max_bytes, 0
        self._lock = Lock()
        self.cached: OrderedDict[tuple[str, str, int], Any] = OrderedDict()

    def read_cell(self, path: str, column: str, row: int) -> object:
        """Return the value of one cell as a Python object."""
        with self._lock:
            file, starts = _open_parquet(path, os.getpid())
            group = bisect_right(starts, row) - 1
            key = (path, column, group)
            if key not in self.cached:
                self.cached[key] = file.read_row_group(group, columns=[column])[column]
                self.bytes += self.cached[key].nbytes
                while self.bytes > self.max_bytes and len(self.cached) > 1:
                    self.bytes -= self.cached.popitem(last=False)[1].nbytes
            self.cached.move_to_end(key)
            cells = self.cached[key]
        return cells[row - starts[group]].as_py()


_ROW_GROUPS = RowGroups(2**29)


@lru_cache(maxsize=64)
def _open_parquet(path: str, process: int) -> tuple[Any, list[int]]:
    """Open a file once per process. Return it with the first row of each of its groups."""
    file = import_pyarrow().ParquetFile(path, memory_map=True)
    sizes = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
    return file, list(accumulate(sizes, initial=0))


def import_pyarrow() -> ModuleType:
    """Return pyarrow.parquet, or raise MissingError that names the extra."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_package("pyarrow", "tables", "A Parquet table") from None
    return pyarrow.parquet


@dataclass(frozen=True, slots=True)
class DigitsSource:
    """An image of the built-in digits."""

    split: str
    row: int

    def read(self) -> Pixels:
        return load_digits()[f"{self.split}_images"][self.row][..., None]


@lru_cache(maxsize=1)
def load_digits() -> dict[str, np.ndarray]:
    """Return the images and labels of the built-in digits, by split."""
    with files("vitral.data").joinpath("digits.npz").open("rb") as stream, np.load(stream) as arrays:
        return dict(arrays)


@dataclass(frozen=True, slots=True)
class Item:
    """One image of a dataset."""

    key: str
    """A stable, printable name: the path below the dataset, or shard and key."""
    label: int | tuple[int, ...]
    """The class, all classes of a multi-label image, or NO_LABEL."""
    source: Source

    @property
    def labels(self) -> tuple[int, ...]:
        """Return the classes of the image, of which there is one unless it is multi-label."""
        return self.label if isinstance(self.label, tuple) else (self.label,)


@dataclass(frozen=True, kw_only=True)
class DatasetIndex:
    """The items of every split of a dataset. No image has been read yet."""

    name: str
    classes: tuple[str, ...]
    splits: dict[str, tuple[Item, ...]]
    """train, and val or test if the dataset has them."""
    multi_label: bool = False
    notes: tuple[str, ...] = ()
    """Remarks on how the dataset was read."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Members, rows and links that are not an image with a label, and the reasons."""
    tables: tuple[tuple[Path, str | None], ...] = ()
    """The CSV or Parquet files that were read, and what the names of their rows begin with."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """The group of each image, by its name: images of one group stay in one split."""
    dropped: frozenset[str] = frozenset()
    """Names of images that are not trained on."""

    def fingerprint(self) -> str:
        """Return a SHA-256 over the names, labels and groups of every split, and over what is dropped.

        Resuming a run requires the same one.
        """
        digest = hashlib.sha256("\n".join(self.classes).encode())
        for split in sorted(self.splits):
            digest.update(f"\n{split}".encode())
            for item in self.splits[split]:
                digest.update(f"\n{item.key}\t{item.label}".encode())
        for name, pairs in {"groups": sorted(self.groups.items()), "dropped": sorted(self.dropped)}.items():
            if pairs:  # datasets without them have the fingerprints of earlier versions
                digest.update(f"\n{name}\t{pairs}".encode())
        return digest.hexdigest()

    def content_fingerprint(self) -> str:
        """Return a SHA-256 over the size and modification time of every file, which is cheap: no image is read."""
        digest = hashlib.sha256()
        status_of = lru_cache(maxsize=1024)(_file_status)
        for split in sorted(self.splits):
            for item in self.splits[split]:
                if isinstance(item.source, FileSource | TarSource | TableSource):
                    digest.update(f"{split}\t{item.key}\t{status_of(item.source.path)}\n".encode())
        return digest.hexdigest()


def _file_status(path: str) -> str:
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # ValueError: a zero byte in the name
        return "missing"
    return f"{status.st_size}\t{status.st_mtime_ns}"


def check_classes(data: DatasetIndex) -> None:
    """Raise DataError unless a classifier can be trained: at least two classes with training images."""
    counts = class_counts(data.splits.get("train", ()), len(data.classes))
    used = [name for name, count in zip(data.classes, counts, strict=True) if count]
    if len(data.classes) >= 2 and (data.multi_label or len(used) >= 2):
        return
    used_names = f" ({used[0]})" if used else ""
    raise DataError(
        f"{data.name} has {len(used)} {'class' if len(used) == 1 else 'classes'} with training images{used_names}; "
        "classification needs at least 2.",
        hint="Put each class into its own folder.",
    )


def class_counts(items: Sequence[Item], classes: int) -> list[int]:
    """Return the number of images per class."""
    counts = Counter(label for item in items for label in item.labels)
    return [counts[label] for label in range(classes)]


def sample_headers(items: Sequence[Item], count: int, *, required: bool = False) -> list[Header]:
    """Return the headers of at most `count` images, evenly spaced among the items; unreadable images are skipped.

    If one is `required` and none can be read, DataError names the first reason.
    """
    count = min(count, len(items))
    headers: list[Header] = []
    problems: list[str] = []
    for index in range(count):
        item = items[index * len(items) // count]
        try:
            headers.append(read_header(item.source.read()))
        except BadImageError as error:
            problems.append(f"{item.key} ({error})")
    if required and problems and not headers:
        raise DataError(
            f"None of the {count} images that were tried can be read, such as {problems[0]}.",
            hint="Run `vitral data` to list them.",
        )
    return headers


def content_digest(content: bytes | Pixels) -> bytes:
    """Return the SHA-256 of what a source reads."""
    return hashlib.sha256(content if isinstance(content, bytes) else content.tobytes()).digest()


def natural_channels(headers: Sequence[Header]) -> int:
    """Return the channels of a model for these images: 1 for gray, 3 for color, or the commonest number of bands."""
    counts = Counter(header.bands for header in headers)
    if not counts:
        return 3
    commonest = counts.most_common(1)[0][0]
    return commonest if commonest not in (1, 3) else max(bands for bands in counts if bands in (1, 3))


def split_from_name(name: str) -> str | None:
    """Return the split that a file name contains, by its last such word: crash-test-train-00000.tar is train."""
    words = reversed(re.split(r"[^a-z]+", name.lower()))
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)


def natural_order(name: str) -> tuple[object, ...]:
    """Return a sort key that puts class2 before class10. 01 and 1 are equal numbers, so their text decides."""
    parts = [(part.lstrip("0") if part.isdecimal() else None, part) for part in re.split(r"(\d+)", name)]
    return tuple((1, 0, part) if digits is None else (0, len(digits), digits) for digits, part in parts), name


def summarize_reasons(skipped: dict[str, str]) -> str:
    """Return the commonest reasons, each with an example."""
    examples = {reason: key for key, reason in reversed(skipped.items())}
    commonest = Counter(skipped.values()).most_common(3)
    words = [f"{count} ({examples[reason]}: {reason})" for reason, count in commonest]
    rest = len(skipped) - sum(count for _, count in commonest)
    return ", ".join([*words, f"{rest} more"] if rest else words)
