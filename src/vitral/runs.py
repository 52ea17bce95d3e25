"""The run folder: the only place that knows the names of its files."""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from vitral.errors import ConfigError
from vitral.files import try_lock


class Run:
    """A training run on disk."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = folder / "config.toml"
        self.manifest = folder / "manifest.json"
        self.metrics = folder / "metrics.csv"
        self.model = folder / "model.safetensors"
        self.adapter = folder / "adapter.safetensors"
        self.state = folder / "state"
        self.report = folder / "report.json"
        self.page = folder / "report.html"
        self.card = folder / "card.md"
        self.losses = folder / "losses.csv"
        self.plots = folder / "plots"
        self.masking = folder / "masking.safetensors"
        self.tensorboard = folder / "tensorboard"
        self.skipped = folder / "skipped.txt"
        self.log = folder / "log.txt"
        self.lock = folder / ".lock"

    @classmethod
    def create(cls, folder: Path | None, data: str, model: str) -> "Run":
        """A new folder; an existing run is never written over."""
        try:
            if folder is None:
                return cls(_next_folder(f"{data}-{model}".replace("/", "-")))
            folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                folder.mkdir()
                return cls(folder)
            cls.check_free(folder)
        except OSError as error:
            raise ConfigError(f"The run folder {folder or 'runs'} cannot be made: {error.strerror}.") from error
        return cls(folder)

    @classmethod
    def check_free(cls, folder: Path) -> None:
        """ConfigError where something is in the way of a new run."""
        try:
            is_taken = folder.exists() and any(path != cls(folder).lock for path in folder.iterdir())
        except OSError as error:
            raise ConfigError(f"The run folder {folder} cannot be made: {error.strerror}.") from error
        if is_taken:
            unfinished = cls.is_run(folder) and not cls(folder).report.is_file()
            on = f", or go on with it: vitral train --resume {folder}" if unfinished else "."
            raise ConfigError(
                f"{folder} is there already, and a run never overwrites another.", hint=f"Give another --out{on}"
            )

    @classmethod
    def is_run(cls, folder: Path) -> bool:
        return cls(folder).config.is_file()

    def trained_model(self) -> Path:
        if not self.model.is_file():
            raise ConfigError(
                f"{self.folder} has no model yet: its first epoch has not ended.",
                hint=f"Go on with it: vitral train --resume {self.folder}",
            )
        return self.model

    @classmethod
    def open(cls, folder: Path) -> "Run":
        run = cls(folder)
        if not run.config.is_file():
            raise ConfigError(f"{folder} is no run: it has no config.toml.")
        return run

    def read_config(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self.config.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{self.config} is damaged: {error}.") from error

    @contextmanager
    def claim(self) -> Iterator[None]:
        """For one process at a time; ConfigError while another trains here. The system lets go of it when the process
        ends, in whatever way, so the file itself can stay."""
        try:
            handle = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be written to: {error.strerror}.") from error
        try:
            if not try_lock(handle):
                by = os.read(handle, 20).decode("ascii", "replace").strip()
                raise ConfigError(
                    f"{self.folder} is being trained by another process (pid {by or 'unknown'}).",
                    hint="Wait for it or stop it, or give another --out.",
                )
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
            yield
        finally:
            os.close(handle)

    def write_config(self, text: str) -> None:
        _write(self.config, text)

    def write_json(self, path: Path, content: Mapping[str, Any]) -> None:
        _write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def read_json(self, path: Path) -> dict[str, Any]:
        """What a run has written; empty, where it has not. ConfigError for what no run writes."""
        if not path.is_file():
            return {}
        hint = "Bring it back as it was, or start another run."
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is damaged: {error}.", hint=hint) from error
        if not isinstance(content, dict):
            raise ConfigError(f"{path} is damaged: it holds a {type(content).__name__} and no object.", hint=hint)
        for name, is_right in _WRITTEN.get(path.name, {}).items():
            if not is_right(content.get(name)):
                raise ConfigError(f"{path} is damaged: {name} is missing or not what a run writes.", hint=hint)
        return content

    def add_row(self, table: Path, row: Mapping[str, Any]) -> None:
        is_new = not table.exists()
        with table.open("a", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(row))
            if is_new:
                writer.writeheader()
            writer.writerow(row)

    def read_rows(self, table: Path) -> list[dict[str, str]]:
        if not table.exists():
            return []
        hint = "Without the file the run goes on, and its curve begins there."
        try:
            with table.open(newline="", encoding="utf-8") as stream:
                rows = list(csv.DictReader(stream))
        except (ValueError, csv.Error) as error:
            raise ConfigError(f"{table} is damaged: {error}.", hint=hint) from error
        if rows and "step" not in rows[0]:
            raise ConfigError(f"{table} is damaged: its first line names no column step.", hint=hint)
        return rows

    def keep_rows(self, until_step: int) -> None:
        """Forgets rows of steps that a resumed run will do again."""
        for table in (self.metrics, self.losses):
            rows = [row for row in self.read_rows(table) if _step(row) <= until_step]
            aside = table.with_name(f".{table.name}.tmp")
            aside.unlink(missing_ok=True)
            for row in rows:
                self.add_row(aside, row)
            if rows:
                os.replace(aside, table)
            else:
                table.unlink(missing_ok=True)

    def add_log(self, *lines: str) -> None:
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        with self.log.open("a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.writelines(f"{now} {line}\n" for line in lines)

    def add_skipped(self, key: str, reason: str) -> None:
        """Each once, also when a resumed run comes by again."""
        line = f"{key}\t{reason}".translate({ord("\n"): "\\n", ord("\r"): "\\r"})
        line = line.encode("utf-8", "backslashreplace").decode("utf-8")  # names may hold anything
        if self.skipped.exists() and line in self.skipped.read_text(encoding="utf-8").split("\n"):
            return
        with self.skipped.open("a", encoding="utf-8") as stream:
            stream.write(f"{line}\n")


def quoted(word: str) -> str:
    """For a line that somebody copies into a shell."""
    return subprocess.list2cmdline([word]) if sys.platform == "win32" else shlex.quote(word)


def _next_folder(name: str) -> Path:
    """runs/NAME-1, or the next one that nobody has; also when two runs start at once."""
    number = 1
    while True:
        folder = Path("runs") / f"{name}-{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1


def _step(row: Mapping[str, Any]) -> float:
    """Of a row; one that was cut off while it was written is as good as not there."""
    if None in row or None in row.values() or not re.fullmatch("[0-9]{1,15}", str(row["step"])):
        return float("inf")
    return int(row["step"])


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(aside, path)


def _is_list_of(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def _is_a(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool)


def _is_baseline(told: Any) -> bool:
    names = {"few_shot", "knn", "train_pictures", "pictures"}
    return told is None or (
        isinstance(told, dict) and set(told) == names and all(map(_is_a(int, float), told.values()))
    )


_WRITTEN: dict[str, dict[str, Callable[[Any], bool]]] = {  # what is read back, and how to know that it is whole
    "manifest.json": {
        "data_fingerprint": _is_a(str),
        "threads": _is_a(int),
        "decisions": _is_list_of(lambda one: _is_list_of(_is_a(str))(one) and len(one) == 3),
        "resumes": _is_list_of(_is_a(int)),
        "baseline": _is_baseline,
    },
    "report.json": {
        **dict.fromkeys(("test", "data", "environment"), _is_a(dict)),
        **dict.fromkeys(("best_step", "steps", "bad_pictures", "parameters"), _is_a(int)),
        "train_seconds": _is_a(int, float),
        "decisions": _is_list_of(_is_a(dict)),
        "baseline": _is_baseline,
        "command": _is_a(str),
    },
}
