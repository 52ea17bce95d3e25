"""The run folder: the only place that knows the names of its files."""

import csv
import json
import os
import tomllib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from vitral.errors import ConfigError


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
        self.tensorboard = folder / "tensorboard"
        self.skipped = folder / "skipped.txt"
        self.log = folder / "log.txt"

    @classmethod
    def create(cls, folder: Path | None, data: str, model: str) -> "Run":
        """A new folder; an existing run is never written over."""
        try:
            if folder is None:
                return cls(_next_folder(f"{data}-{model}".replace("/", "-")))
            cls.check_free(folder)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"The run folder {folder or 'runs'} cannot be made: {error.strerror}.") from error
        return cls(folder)

    @classmethod
    def check_free(cls, folder: Path) -> None:
        """ConfigError where something is in the way of a new run."""
        try:
            is_taken = folder.exists() and any(folder.iterdir())
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
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.config} is damaged: {error}.") from error

    def write_json(self, path: Path, content: Mapping[str, Any]) -> None:
        """Whole or not at all."""
        aside = path.with_name(f".{path.name}.tmp")
        with aside.open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(aside, path)

    def read_json(self, path: Path) -> dict[str, Any]:
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except ValueError as error:
            raise ConfigError(f"{path} is damaged: {error}.") from error

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
        with table.open(newline="", encoding="utf-8") as stream:
            return list(csv.DictReader(stream))

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
        with self.log.open("a", encoding="utf-8") as stream:
            stream.writelines(f"{now} {line}\n" for line in lines)

    def add_skipped(self, key: str, reason: str) -> None:
        """Each once, also when a resumed run comes by again."""
        line = f"{key}\t{reason}"
        if self.skipped.exists() and line in self.skipped.read_text(encoding="utf-8").split("\n"):
            return
        with self.skipped.open("a", encoding="utf-8") as stream:
            stream.write(f"{key}\t{reason}\n")


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
    if None in row.values() or not str(row["step"]).isdigit():
        return float("inf")
    return int(row["step"])
