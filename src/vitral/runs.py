"""The run folder: the only module that knows the names of its files."""

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
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitral.errors import ConfigError
from vitral.files import atomic_path, try_lock, write_json, write_text

if TYPE_CHECKING:
    from vitral.weights.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class TestScores:
    """The scores of a run on its test split."""

    top1: float | None
    """Accuracy from 0 to 1; None if pixels were predicted."""
    top5: float | None
    loss: float
    images: int
    details: Mapping[str, Any]
    """Everything under `test` in report.json."""


class Run:
    """A training run on disk."""

    def __init__(self, folder: str | Path):
        self.folder = folder = Path(folder)
        self.config = folder / "config.toml"
        self.manifest = folder / "manifest.json"
        self.metrics = folder / "metrics.csv"
        self.losses = folder / "losses.csv"
        self.model = folder / "model.safetensors"
        self.adapter = folder / "adapter.safetensors"
        self.masking = folder / "masking.safetensors"
        self.novelty = folder / "novelty.safetensors"
        self.state = folder / "state"
        self.results = folder / "report.json"
        self.report = folder / "report.html"
        self.card = folder / "card.md"
        self.plots = folder / "plots"
        self.tensorboard = folder / "tensorboard"
        self.skipped = folder / "skipped.txt"
        self.log = folder / "log.txt"
        self.lock = folder / ".lock"

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def test(self) -> TestScores:
        """Return the scores on the test split. ConfigError if the run is not finished."""
        scores = self.read_report().get("test")
        if scores is None:
            raise ConfigError(f"{self.folder} is not finished.", hint=f"Run: vitral train --resume {self.folder}")
        names = ("top1", "top5", "loss", "images")
        return TestScores(**{name: scores.get(name) for name in names}, details=scores)

    def checkpoint(self) -> "Checkpoint":
        """Load the trained model, with its preprocessing and labels."""
        from vitral.weights.load import load

        return load(self.trained_model())

    # ---- folders ----

    @classmethod
    def create(cls, folder: Path | None, data: str, model: str) -> "Run":
        """Create a new folder; existing runs are never overwritten."""
        try:
            if folder is None:
                return cls(_next_folder(f"{data}-{model}".replace("/", "-")))
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"Cannot create the run folder {folder or 'runs'}: {error.strerror}.") from error
        cls.check_free(folder)
        return cls(folder)

    @classmethod
    def check_free(cls, folder: Path) -> None:
        """Raise ConfigError if a new run cannot use this folder."""
        try:
            is_taken = folder.exists() and any(path != cls(folder).lock for path in folder.iterdir())
        except OSError as error:
            raise ConfigError(f"Cannot create the run folder {folder}: {error.strerror}.") from error
        if is_taken:
            is_unfinished = cls.is_run(folder) and not cls(folder).results.is_file()
            hint = "Pass another --out" + (f", or resume it: vitral train --resume {folder}" if is_unfinished else ".")
            raise ConfigError(f"{folder} already exists; runs are never overwritten.", hint=hint)

    @classmethod
    def is_run(cls, folder: Path) -> bool:
        return cls(folder).config.is_file()

    @classmethod
    def open(cls, folder: Path) -> "Run":
        run = cls(folder)
        if not run.config.is_file():
            raise ConfigError(f"{folder} is not a run folder: it has no config.toml.")
        return run

    def trained_model(self) -> Path:
        """Return the path of the model. ConfigError if the first epoch has not ended."""
        if not self.model.is_file():
            problem = f"{self.folder} has no model yet: its first epoch has not ended."
            raise ConfigError(problem, hint=f"Run: vitral train --resume {self.folder}")
        return self.model

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Lock the folder for this process. ConfigError while another process trains in it.

        The system releases the lock when the process ends, however it ends, so the lock file can stay.
        """
        try:
            handle = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ConfigError(f"Cannot write to {self.folder}: {error.strerror}.") from error
        try:
            if not try_lock(handle):
                pid = os.read(handle, 20).decode("ascii", "replace").strip() or "unknown"
                problem = f"Another process (pid {pid}) is training in {self.folder}."
                raise ConfigError(problem, hint="Wait for it or stop it, or pass another --out.")
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
            yield
        finally:
            os.close(handle)

    # ---- files ----

    def write_config(self, text: str) -> None:
        write_text(self.config, text, ConfigError)

    def read_config(self) -> dict[str, Any]:
        """Return the settings, with those of older versions under their current names."""
        try:
            content = tomllib.loads(self.config.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{self.config} is damaged: {error}.") from error
        return upgrade_config(content)

    def write_manifest(self, content: Mapping[str, Any]) -> None:
        write_json(self.manifest, content, ConfigError)

    def read_manifest(self) -> dict[str, Any]:
        """Return the manifest; empty if there is none."""
        return _read_json(self.manifest, _MANIFEST)

    def write_report(self, content: Mapping[str, Any]) -> None:
        """Write report.json, which marks the run as finished."""
        write_json(self.results, content, ConfigError)

    def read_report(self) -> dict[str, Any]:
        """Return the content of report.json; empty if the run is not finished."""
        return _read_json(self.results, _REPORT)

    def add_row(self, table: Path, row: Mapping[str, Any]) -> None:
        """Append a row to metrics.csv or losses.csv."""
        is_new = not table.exists()
        with table.open("a", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(row))
            if is_new:
                writer.writeheader()
            writer.writerow(row)

    def read_rows(self, table: Path) -> list[dict[str, str]]:
        if not table.exists():
            return []
        hint = "Delete the file to continue without its curve."
        try:
            with table.open(newline="", encoding="utf-8") as stream:
                rows = list(csv.DictReader(stream))
        except (ValueError, csv.Error) as error:
            raise ConfigError(f"{table} is damaged: {error}.", hint=hint) from error
        if rows and "step" not in rows[0]:
            raise ConfigError(f"{table} is damaged: the column step is missing.", hint=hint)
        return rows

    def drop_rows_after(self, step: int) -> None:
        """Delete the rows of steps that a resumed run will repeat."""
        for table in (self.metrics, self.losses):
            rows = [row for row in self.read_rows(table) if _step_of(row) <= step]
            if not rows:
                table.unlink(missing_ok=True)
                continue
            with atomic_path(table, ConfigError) as temporary:
                for row in rows:
                    self.add_row(temporary, row)

    def add_log(self, *lines: str) -> None:
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        with self.log.open("a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.writelines(f"{now} {line}\n" for line in lines)

    def add_skipped(self, key: str, reason: str) -> None:
        """List an image in skipped.txt, once, also when a resumed run meets it again."""
        line = f"{key}\t{reason}".translate({ord("\n"): "\\n", ord("\r"): "\\r"})
        line = line.encode("utf-8", "backslashreplace").decode("utf-8")  # names may contain anything
        if self.skipped.exists() and line in self.skipped.read_text(encoding="utf-8").split("\n"):
            return
        with self.skipped.open("a", encoding="utf-8") as stream:
            stream.write(f"{line}\n")


def quote(word: str) -> str:
    """Return a word as it can be copied into a shell."""
    return subprocess.list2cmdline([word]) if sys.platform == "win32" else shlex.quote(word)


def _next_folder(name: str) -> Path:
    """Create runs/NAME-1, or the next number that is free, also when two runs start at once."""
    number = 0
    while True:
        number += 1
        folder = Path("runs") / f"{name}-{number}"
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def _step_of(row: Mapping[Any, Any]) -> float:
    """Return the step of a row; infinity if the row was cut off while it was written."""
    if None in row or None in row.values() or not re.fullmatch("[0-9]{1,15}", str(row["step"])):
        return float("inf")
    return int(row["step"])


# ---- files of older versions ----

_OLD_NAMES = {
    "held_out": "test",
    "selection": "validation",
    "decisions": "choices",
    "pictures": "images",
    "train_pictures": "train_images",
    "bad_pictures": "bad_images",
    "changes_pictures": "augmented",
    "commonest": "most_common",
    "truth": "label",
    "answer": "prediction",
    "right": "accuracy",
}
"""Names in manifest.json and report.json of version 0.1, at any depth."""


def upgrade_config(content: dict[str, Any]) -> dict[str, Any]:
    """Return settings under their current names and values."""
    names = {"selection": "val_fraction", "most_bad": "max_bad_fraction"}
    optim, masking = content.get("optim"), content.get("masking")
    if isinstance(optim, dict):
        if optim.get("name") == "adam":
            optim["name"] = "adamw"
        if "selection" in content and optim.get("name") != "sgd":
            optim.pop("momentum", None)  # it had no effect
    if isinstance(masking, dict) and masking.get("target") == "mean-colour":
        masking["target"] = "mean-color"
    return {names.get(name, name): value for name, value in content.items()}


# ---- checks of what is read back ----

Check = Callable[[Any], bool]


def _read_json(path: Path, checks: Mapping[str, Check]) -> dict[str, Any]:
    """Return the object in a file, with current names; empty if there is no file."""
    if not path.is_file():
        return {}
    hint = "Restore it, or start another run."
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=_with_current_names)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}.", hint=hint) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged: got a {type(content).__name__}, expected an object.", hint=hint)
    for name, is_valid in checks.items():
        if not is_valid(content.get(name)):
            raise ConfigError(f"{path} is damaged: {name} is missing or invalid.", hint=hint)
    return content


def _with_current_names(fields: dict[str, Any]) -> dict[str, Any]:
    return {_OLD_NAMES.get(name, name): value for name, value in fields.items()}


def _is_list_of(is_valid: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(is_valid, value))


def _is_optional(is_valid: Check) -> Check:
    return lambda value: value is None or is_valid(value)


def _is_a(*kinds: type) -> Check:
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool)


def _is_candidate(value: object) -> bool:
    names = {"name", "top1", "interval", "loss", "evidence", "seconds", "chosen"}
    return isinstance(value, dict) and set(value) == names and isinstance(value["interval"], list)


_MANIFEST: dict[str, Check] = {
    "data_fingerprint": _is_a(str),
    "threads": _is_a(int),
    "choices": _is_list_of(lambda choice: _is_list_of(_is_a(str))(choice) and len(choice) == 3),
    "resumes": _is_list_of(_is_a(int)),
    "candidates": _is_optional(_is_list_of(_is_candidate)),
}
_REPORT: dict[str, Check] = {
    **dict.fromkeys(("test", "data", "environment"), _is_a(dict)),
    **dict.fromkeys(("best_step", "steps", "bad_images", "parameters"), _is_a(int)),
    "train_seconds": _is_a(int, float),
    "choices": _is_list_of(_is_a(dict)),
    "candidates": _is_optional(_is_list_of(_is_candidate)),
    "command": _is_a(str),
}
