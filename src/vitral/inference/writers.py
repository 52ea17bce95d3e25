"""Rows of predictions: on the console as they come, or in a file that survives an interruption."""

import csv
import io
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from vitral.errors import ConfigError
from vitral.files import as_text, printable, to_json, try_lock

Top = list[tuple[str, float]]


@contextmanager
def open_rows(out: Path | None, format: str, top: int, files: Sequence[str], *, resume: bool) -> "Iterator[Rows]":
    """What the rows of these files go to; a file is never written over, and only gone on with by ``resume``."""
    if out is None:
        shown: dict[str, type[Rows]] = {"human": HumanRows, "json": JsonRows, "csv": CsvRows, "quiet": QuietRows}
        rows = shown[format](sys.stdout, top)
        rows.begin()
        yield rows
        return
    with _open_to_go_on(out, check_target(out, resume=resume), top, files) as rows:
        yield rows
        rows.keep()


def check_target(out: Path, *, resume: bool) -> "type[FileRows]":
    """How rows are written there; ConfigError where they cannot be."""
    kinds: dict[str, type[FileRows]] = {".csv": CsvRows, ".jsonl": JsonRows, ".json": JsonRows}
    if out.suffix.lower() not in kinds:
        raise ConfigError(f"--out {out} must end in .csv or .jsonl.")
    if out.exists() and not resume:
        raise ConfigError(f"{out} is there already.", hint="Go on with it by --resume, or give another name.")
    return kinds[out.suffix.lower()]


@contextmanager
def _open_to_go_on(out: Path, kind: "type[FileRows]", top: int, files: Sequence[str]) -> "Iterator[Rows]":
    try:
        stream = out.open("r+b" if out.exists() else "x+b")
    except OSError as error:
        raise ConfigError(f"{out} cannot be used: {error.strerror}.") from error
    with stream:
        if not try_lock(stream.fileno()):
            raise ConfigError(f"{out} is being written by another process.", hint="Wait for it, or give another --out.")
        try:
            content = stream.read()
            complete = kind.complete(content)
            already = kind.parse(complete.decode("utf-8"), top)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{out} cannot be used: {getattr(error, 'strerror', None) or error}.") from error
        if not kind.START.startswith(content[: len(kind.START)]):
            raise ConfigError(f"{out} holds no predictions, so there is nothing to go on with.")
        check_rows(already, files)
        stream.truncate(len(complete))  # what was cut off while it was written is written again
        stream.seek(len(complete))
        rows = kind(io.TextIOWrapper(stream, encoding="utf-8", newline="", write_through=True), top)
        rows.is_file, rows.already = True, already
        if not complete:
            rows.begin()
        yield rows


def check_rows(already: "Sequence[Already]", files: Sequence[str]) -> None:
    """ConfigError where the rows that are there are not the first of these files."""
    for place, row in enumerate(already):
        if place >= len(files) or as_text(files[place]) != row.file:
            raise ConfigError(
                f"Row {place + 1} of --out is {row.file}, which is not picture {place + 1} of those given.",
                hint="Give the same pictures in the same order, or another --out.",
            )


def check_same_model(already: "Sequence[Already]", ask: "Callable[[int], Top | None]") -> None:
    """ConfigError where the last answer of a file that is gone on with is not what the model says now. ``ask`` gives
    that for the picture of a row, None where it can no longer be read; then the row before it is asked about."""
    for place in reversed(range(len(already))):
        row = already[place]
        if row.label is None:
            continue
        now = ask(place)
        if now is None:
            continue
        same = len(now) == row.width and now[0][0] == row.label and abs(now[0][1] - row.probability) < 1e-3
        if not same:
            raise ConfigError(
                f"--out has {row.label} ({row.probability:.1%}, {row.width} labels) for {row.file}, and would now have "
                f"{now[0][0]} ({now[0][1]:.1%}, {len(now)} labels).",
                hint="Go on with the model and the --top that it was begun with, or give another --out.",
            )
        return


class Already(NamedTuple):
    """A row that is there; ``label`` is None for a picture that failed."""

    file: str
    label: str | None
    probability: float
    width: int


class Rows(ABC):
    """A row for each picture: add or add_error; ``keep`` brings them to the disk."""

    def __init__(self, stream: TextIO, top: int):
        self.stream, self.top = stream, top
        self.is_file = False
        self.already: list[Already] = []
        """What a file that is gone on with holds."""

    @property
    def done(self) -> int:
        return len(self.already)

    @property
    def failed(self) -> int:
        return sum(row.label is None for row in self.already)

    def begin(self) -> None:  # noqa: B027 (most kinds have nothing before their rows)
        """What comes before the rows."""

    @abstractmethod
    def add(self, file: str, top: Top) -> None: ...

    @abstractmethod
    def add_error(self, file: str, reason: str) -> None: ...

    def keep(self) -> None:
        self.stream.flush()
        if self.is_file:
            os.fsync(self.stream.fileno())


class FileRows(Rows):
    """Rows that can be read again."""

    START: bytes
    """What such a file begins with."""

    @staticmethod
    def complete(content: bytes) -> bytes:
        """Without a last row that was cut off."""
        return content[: content.rfind(b"\n") + 1]

    @staticmethod
    @abstractmethod
    def parse(text: str, top: int) -> list[Already]:
        """ConfigError when the rows were not made with this ``top``."""


class JsonRows(FileRows):
    START = b'{"file": '

    def add(self, file: str, top: Top) -> None:
        places = [{"label": label, "probability": probability} for label, probability in top]
        self._write({"file": as_text(file), **places[0], "top": places})

    def add_error(self, file: str, reason: str) -> None:
        self._write({"file": as_text(file), "error": reason})

    def _write(self, row: dict[str, Any]) -> None:
        self.stream.write(to_json(row, self.stream) + "\n")

    @staticmethod
    def parse(text: str, top: int) -> list[Already]:
        try:
            rows = [json.loads(line) for line in text.split("\n")[:-1]]
            found = [
                Already(row["file"], None, 0.0, 0)
                if "error" in row
                else Already(row["file"], str(row["label"]), float(row["probability"]), len(row["top"]))
                for row in rows
            ]
        except (ValueError, TypeError, KeyError):
            raise _no_predictions() from None
        if (widest := max((row.width for row in found), default=0)) > top:
            raise ConfigError(f"--out was made with --top {widest}, and this is --top {top}.")
        return found


class CsvRows(FileRows):
    """file, label, probability, label_2, probability_2, ..., error."""

    START = b"file,label,probability,"

    def begin(self) -> None:
        pairs = [("label", "probability"), *((f"label_{k}", f"probability_{k}") for k in range(2, self.top + 1))]
        self._write(["file", *(name for pair in pairs for name in pair), "error"])

    def add(self, file: str, top: Top) -> None:
        values = [value for label, probability in top for value in (label, f"{probability:.6f}")]
        self._write([as_text(file), *values, *[""] * (2 * self.top - len(values)), ""])

    def add_error(self, file: str, reason: str) -> None:
        self._write([as_text(file), *[""] * (2 * self.top), reason])

    def _write(self, row: list[str]) -> None:
        csv.writer(self.stream, lineterminator="\n").writerow(row)

    @staticmethod
    def complete(content: bytes) -> bytes:
        """Also a line break inside of quotes is not the end of a row."""
        end = quotes = start = 0
        while (at := content.find(b"\n", start)) >= 0:
            quotes += content.count(b'"', start, at)
            start = at + 1
            end = start if quotes % 2 == 0 else end
        return content[:end]

    @staticmethod
    def parse(text: str, top: int) -> list[Already]:
        rows = list(csv.reader(io.StringIO(text, newline="")))
        if not rows:
            return []
        if rows[0][:1] != ["file"] or rows[0][-1] != "error" or any(len(row) != len(rows[0]) for row in rows):
            raise _no_predictions()
        if len(rows[0]) != 2 * top + 2:
            raise ConfigError(f"--out was made with --top {len(rows[0]) // 2 - 1}, and this is --top {top}.")
        try:
            return [
                Already(row[0], None, 0.0, 0)
                if row[-1]
                else Already(row[0], row[1], float(row[2]), sum(map(bool, row[2:-1:2])))
                for row in rows[1:]
            ]
        except ValueError:
            raise _no_predictions() from None


def _no_predictions() -> ConfigError:
    return ConfigError("--out holds lines that are no predictions.")


class HumanRows(Rows):
    """A line a picture: its name, and the labels with their probabilities."""

    def add(self, file: str, top: Top) -> None:
        shown = "  ".join(f"{label} {probability:.1%}" for label, probability in top)
        self.stream.write(f"{printable(file)}  {printable(shown)}\n")

    def add_error(self, file: str, reason: str) -> None:
        self.stream.write(f"{printable(file)}  cannot be used: {printable(reason)}\n")


class QuietRows(Rows):
    """The label alone; an empty line for a picture that failed."""

    def add(self, file: str, top: Top) -> None:
        self.stream.write(f"{printable(top[0][0])}\n")

    def add_error(self, file: str, reason: str) -> None:
        self.stream.write("\n")
