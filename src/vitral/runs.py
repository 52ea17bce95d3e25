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
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, Literal

from vitral.errors import ConfigError
from vitral.files import atomic_path, is_leftover, is_locked, try_lock, write_json, write_text
from vitral.run_versions import upgrade_config, with_current_names

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
        self.probe = self.state / "probe.safetensors"
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
            paths = folder.iterdir() if folder.exists() else ()  # those that a killed process leaves take no folder
            is_taken = any(path != cls(folder).lock and not is_leftover(path) for path in paths)
        except OSError as error:
            raise ConfigError(f"Cannot create the run folder {folder}: {error.strerror}.") from error
        if is_taken:
            is_unfinished = cls.is_run(folder) and not cls(folder).results.is_file()
            hint = "Pass another --out" + (
                f", or resume it: vitral train --resume {quote(str(folder))}" if is_unfinished else "."
            )
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
            if not try_lock(handle) and (sleep(0.1) or not try_lock(handle)):  # `vitral runs` holds it for an instant
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


# ---- lists of runs ----

MAX_DEPTH = 4
"""How many folders below the given one may lie around a run: studies and suites nest theirs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """A row of `vitral runs`. None stands for what is unknown."""

    folder: str
    state: Literal["finished", "running", "interrupted", "damaged"]
    date: datetime
    """When it finished, or else when it last wrote something, in local time."""
    data: str | None = None
    model: str | None = None
    """The checkpoint that it started from, or the network that it trained from scratch."""
    top1: float | None = None
    images: int | None = None
    """Number of test images."""
    minutes: float | None = None
    """Time of the training steps and of the linear probe before them."""
    resume: str | None = None
    """The command that continues an interrupted run."""
    problem: str | None = None
    """Why the run is damaged."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"date": self.date.isoformat(timespec="seconds")}


def list_runs(folder: str | Path) -> list[RunSummary]:
    """Return the runs in a folder and the folders below it, newest first; the folder may be a run itself."""
    if not Path(folder).is_dir():
        raise ConfigError(f"Folder not found: {folder}.", hint="Pass the folder that contains your runs.")
    return sorted(map(_summarize, _find_runs(Path(folder), MAX_DEPTH)), key=lambda run: run.date, reverse=True)


def _find_runs(folder: Path, depth: int) -> Iterator[Run]:
    run = Run(folder)
    with suppress(OSError):
        if run.config.is_file() or (run.manifest.is_file() and (run.results.is_file() or run.model.is_file())):
            yield run
            return
        below = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)] if depth else []
        for name in below:
            yield from _find_runs(folder / name, depth - 1)


def _summarize(run: Run) -> RunSummary:
    """Return the row of a run; a damaged one has the reason instead of its results."""
    row = RunSummary(folder=str(run.folder), state="damaged", date=_last_write(run))
    try:
        config, report = Run.open(run.folder).read_config(), run.read_report()
        data, model = config.get("data"), config.get("from") or config.get("model")
        if not isinstance(data, str) or not isinstance(model, str):
            raise ConfigError(f"{run.config} is damaged: data or model is missing or invalid.")
        row = replace(row, data=data, model=model)
        if not report:
            is_running = is_locked(run.lock)
            resume = None if is_running else f"vitral train --resume {quote(str(run.folder))}"
            return replace(row, state="running" if is_running else "interrupted", resume=resume)
        top1, images, candidates = report["test"].get("top1"), report["test"].get("images"), report.get("candidates")
        if not _is_optional(_is_a(int, float))(top1) or not _is_a(int)(images):
            raise ConfigError(f"{run.results} is damaged: top1 or images is missing or invalid.")
        probes = [float(tried["seconds"]) for tried in candidates or () if str(tried["name"]).startswith("probe")]
        minutes = round((report["train_seconds"] + max(probes, default=0)) / 60, 3)
        return replace(row, state="finished", top1=top1, images=images, minutes=minutes)
    except ConfigError as error:
        return replace(row, problem=str(error))
    except (TypeError, ValueError):
        return replace(row, problem=f"{run.results} is damaged: the seconds of its candidates are not numbers.")


def _last_write(run: Run) -> datetime:
    seconds = [0.0]
    for path in (run.config, run.manifest, run.metrics, run.log, run.state, run.results):
        with suppress(OSError):
            seconds.append(path.stat().st_mtime)
            seconds = seconds[-1:] if path == run.results else seconds
    return datetime.fromtimestamp(max(seconds)).astimezone()


# ---- checks of what is read back ----

Check = Callable[[Any], bool]


def _read_json(path: Path, checks: Mapping[str, Check]) -> dict[str, Any]:
    """Return the object in a file, with current names; empty if there is no file."""
    if not path.is_file():
        return {}
    hint = "Restore it, or start another run."
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=with_current_names)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}.", hint=hint) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged: got a {type(content).__name__}, expected an object.", hint=hint)
    for name, is_valid in checks.items():
        if not is_valid(content.get(name)):
            raise ConfigError(f"{path} is damaged: {name} is missing or invalid.", hint=hint)
    return content


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
