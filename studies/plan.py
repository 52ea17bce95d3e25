"""A study as its TOML says: cells that differ in a few settings, trained with several seeds each.

title = "Positions"
question = "..."
paper = "..."             the paper's numbers, as a table in Markdown
seeds = [0, 1, 2]
[base]                    settings of vitral train, in all cells
[[cells]]                 name, and settings of their own
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Cell:
    name: str
    settings: dict[str, Any]
    """Dotted names."""
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other ways to measure the same network: a name, and options of vitral evaluate."""


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    question: str
    paper: str
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]

    def jobs(self) -> "Iterator[Job]":
        """Seed by seed, so that a study that is stopped has whole rounds."""
        for seed in self.seeds:
            for cell in self.cells:
                yield Job(self.name, cell, seed)


@dataclass(frozen=True)
class Job:
    study: str
    cell: Cell
    seed: int

    def folder(self, place: Path) -> Path:
        return place / self.study / f"{self.cell.name.replace(' ', '-').replace('/', '-')}-seed{self.seed}"


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.toml"))


def read_study(name: str) -> Study:
    told = tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))
    base = flat(told["base"])
    cells = []
    for cell in told["cells"]:
        own = {key: value for key, value in cell.items() if key not in ("name", "evaluations")}
        cells.append(Cell(cell["name"], base | flat(own), cell.get("evaluations", {})))
    return Study(
        name=name,
        title=told["title"],
        question=told["question"],
        paper=told.get("paper", ""),
        seeds=tuple(told["seeds"]),
        cells=tuple(cells),
    )


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}; a stem is one value."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and name != "stem":
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found
