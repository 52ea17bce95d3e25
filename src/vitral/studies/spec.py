"""Read a study: cells that differ in a few settings, each trained once per seed.

docs/reference/studies.md lists the keys.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitral.errors import ConfigError, check_int, check_number, check_type, did_you_mean
from vitral.training.settings import flatten, with_settings

BASE = "base"
RESULT = "study.json"
TEXTS = ("title", "question", "paper", "x_label")
STUDY_KEYS = ("title", "question", "paper", "seeds", "x_label", "flops", "base", "evaluations", "cells")
CELL_KEYS = ("name", "images", "canvas", "start", "untrained", "line", "x", "evaluations")
EVALUATION_KEYS = ("knn", "few_shot", "image_size", "label_map", "packed", "canvas", "line", "x")
KINDS = {
    **dict.fromkeys((*TEXTS, "start", "line"), (str, "text")),
    **dict.fromkeys(("base", "evaluations"), (dict, "a table")),
    "untrained": (bool, "true or false"),
}
"""The types of keys that are not checked where they are used."""
RENAMED_KEYS = {"begins_as": "start_training", "others": "scores"}
RENAMED_SETTINGS = {"selection": "val_fraction"}
"""Names in study.json as earlier versions wrote them."""
MAX_SEED, MAX_SIDE = 2**31, 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One variant of a study."""

    name: str
    settings: dict[str, Any]
    """Settings of vitral train, by their dotted names."""
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Further evaluations, by name: options of vitral.evaluate, packed or canvas."""
    images: int | None = None
    canvas: int | None = None
    start: str | None = None
    start_training: dict[str, Any] | None = None
    """How the cell named by `start` is trained."""
    untrained: bool = False
    line: str | None = None
    x: float | None = None

    @property
    def training(self) -> dict[str, Any]:
        """Return everything that determines the trained weights, apart from the seed and the starting weights."""
        return {name: getattr(self, name) for name in ("settings", "images", "canvas", "start", "untrained")}

    def matches(self, result: Mapping[str, Any]) -> bool:
        """Return whether a finished cell (the content of study.json) was trained with these settings."""
        start_training = result.get("start_training", self.start_training)
        return result["training"] == self.training and start_training == self.start_training


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One cell, trained with one seed."""

    study: str
    cell: Cell
    seed: int

    def folder(self, out: Path, cell: str | None = None) -> Path:
        """Return the run folder of this job, or of another cell with the same seed."""
        return out / self.study / f"{_folder_name(cell or self.cell.name)}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """A whole study, as its TOML file describes it."""

    path: Path
    title: str
    question: str = ""
    paper: str = ""
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    x_label: str = ""
    flops: bool = False

    @property
    def name(self) -> str:
        return self.path.stem

    def jobs(self) -> Iterator[Job]:
        """Yield all jobs seed by seed, so that an interrupted study has complete rounds."""
        for seed in self.seeds:
            for cell in self.cells:
                yield Job(study=self.name, cell=cell, seed=seed)


def study_names() -> list[str]:
    """Return the names of the shipped studies."""
    return sorted(path.stem for path in _shipped_folder().glob("*.toml") if path.stem != BASE)


def study_path(name: str | Path) -> Path:
    """Return the TOML file of a study: the path itself, or that of a shipped study by its name."""
    check_type("A study", name, str, Path)
    path, names = Path(name), study_names()
    if path.suffix == ".toml":
        if not path.is_file():
            raise ConfigError(f"{path} does not exist.", hint=f"Shipped studies: {', '.join(names)}.")
        return path
    if str(name) not in names:
        hint = did_you_mean(str(name), names) or f"Pass a .toml file, or one of {', '.join(names)}."
        raise ConfigError(f"There is no study {str(name)!r}.", hint=hint)
    return _shipped_folder() / f"{name}.toml"


def read_study(name: str | Path, seeds: tuple[int, ...] | None = None) -> Study:
    """Read and check a study; ``seeds`` replaces those of the file."""
    path = study_path(name)
    content = _read(path)
    _check_table(path.name, content, STUDY_KEYS)
    for key in ("title", "cells"):
        if not content.get(key):
            raise ConfigError(f"{path.name} has no {key}.", hint=f"Add {'[[cells]]' if key == 'cells' else key}.")
    seeds = content.get("seeds", [0]) if seeds is None else seeds
    if not isinstance(seeds, list | tuple) or not seeds:
        raise ConfigError(f"{path.name}: seeds must be a list of integers (got {seeds!r}).", hint="Use seeds = [0, 1].")
    return Study(
        path=path,
        **{key: content.get(key, "") for key in TEXTS},
        seeds=tuple(dict.fromkeys(check_int("seeds", seed, minimum=0, maximum=MAX_SEED) for seed in seeds)),
        cells=_cells(path.name, content),
        flops=bool(content.get("flops", False)),
    )


def load_result(folder: Path) -> dict[str, Any] | None:
    """Return the result of a finished cell from its run folder, or None."""
    path = folder / RESULT
    return upgrade_result(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def upgrade_result(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a study.json with today's names of keys and settings."""
    result = {RENAMED_KEYS.get(key, key): value for key, value in content.items()}
    for key in ("training", "start_training"):
        if training := result.get(key):
            settings = {RENAMED_SETTINGS.get(name, name): value for name, value in training["settings"].items()}
            result[key] = {**training, "settings": settings}
    return result


def _cells(file: str, content: dict[str, Any]) -> tuple[Cell, ...]:
    base = _layer(flatten(_read(_shipped_folder() / f"{BASE}.toml")), flatten(content.get("base", {})))
    if not isinstance(content["cells"], list) or not all(isinstance(cell, dict) for cell in content["cells"]):
        raise ConfigError(f"{file}: cells must be a list of tables.", hint="Write [[cells]] above each cell.")
    cells: dict[str, Cell] = {}
    for number, table in enumerate(content["cells"], 1):
        origin = f"{file}, cell {table.get('name', number)!r}"
        cell = _cell(origin, table, base, content.get("evaluations", {}))
        if cell.start is not None:
            if cell.start not in cells:
                raise ConfigError(f"{origin}: start={cell.start!r} is not an earlier cell.")
            cell = replace(cell, start_training=cells[cell.start].training)
        if _folder_name(cell.name) in map(_folder_name, cells):
            raise ConfigError(f"{file} has two cells named {cell.name!r}.", hint="Rename one of them.")
        cells[cell.name] = cell
    return tuple(cells.values())


def _cell(origin: str, table: dict[str, Any], base: dict[str, Any], shared: dict[str, Any]) -> Cell:
    name = table.get("name")
    if not isinstance(name, str) or not name.strip(". ") or not name.isprintable() or "\\" in name:
        raise ConfigError(f"{origin}: name must be printable text (got {name!r}).", hint='Add name = "...".')
    values = {key: table[key] for key in CELL_KEYS if key in table}
    _check_table(origin, values, CELL_KEYS)
    values["evaluations"] = shared | values.get("evaluations", {})
    for label, options in values["evaluations"].items():
        _check_table(f"{origin}, evaluation {label!r}", options, EVALUATION_KEYS)
    if "images" in values:
        check_int(f"{origin}: images", values["images"], minimum=1)
    if "canvas" in values:
        check_int(f"{origin}: canvas", values["canvas"], minimum=1, maximum=MAX_SIDE)
    if "x" in values:
        check_number(f"{origin}: x", values["x"], above=0)
    settings = _layer(base, flatten({key: value for key, value in table.items() if key not in CELL_KEYS}))
    with_settings(None, {"data": "", **settings}, origin)  # an unknown setting raises before the first cell is trained
    return Cell(settings=settings, **values)


def _layer(below: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings over those of the layer below, of which another network discards its own."""
    if "model" in settings or "from" in settings:
        below = {name: value for name, value in below.items() if not name.startswith("network.")}
    if "from" in settings:
        below.pop("model", None)
    return below | settings


def _check_table(origin: str, table: object, keys: tuple[str, ...]) -> None:
    """Raise ConfigError for an unknown key, or a value that has another type than its key."""
    if not isinstance(table, dict):
        raise ConfigError(f"{origin} must be a table (got {table!r}).")
    for key, value in table.items():
        if key not in keys:
            hint = did_you_mean(key, keys) or f"Known keys: {', '.join(keys)}."
            raise ConfigError(f"{origin}: unknown key {key!r}.", hint=hint)
        kind, expected = KINDS.get(key, (object, ""))
        if not isinstance(value, kind):
            raise ConfigError(f"{origin}: {key} must be {expected} (got {value!r}).")


def _folder_name(cell: str) -> str:
    return cell.replace(" ", "-").replace("/", "-")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error


def _shipped_folder() -> Path:
    """Return the folder of the shipped studies: inside the package, or in a clone beside ``src``."""
    inside = Path(__file__).parent / "shipped"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "studies"
