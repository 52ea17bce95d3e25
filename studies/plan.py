"""A study as its TOML says: cells that differ in a few settings, trained with several seeds each.

title, question, paper    paper: the paper's numbers, as a table in Markdown
seeds = [0, 1, 2]
x_label                   where the plot has lines
flops = true              and a second panel: operations of one picture against x
[base]                    settings of vitral train for all cells, over those of base.toml
[evaluations]             of all cells, beside their own
[[cells]]                 a name, settings of its own (another model leaves the base's network behind), and any of
    images = 500          train on so many pictures, equally many of each class
    canvas = 48           pictures on a larger canvas, not enlarged
    start = "cell"        begin with that cell's network of the same seed
    untrained = true      measure the network as it was initialised
    evaluations = {}      other ways to measure it: a name, and options of vitral evaluate, or packed, or canvas
    line, x               where the cell lies in a plot of lines; evaluations may have them too
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitral.training.settings import flatten

HERE = Path(__file__).parent
BASE = "base"
OWN = ("name", "images", "canvas", "start", "untrained", "line", "x")


@dataclass(frozen=True)
class Cell:
    name: str
    settings: dict[str, Any]
    """Dotted names."""
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    images: int | None = None
    canvas: int | None = None
    start: str | None = None
    begins_as: dict[str, Any] | None = None
    """How that one is trained."""
    untrained: bool = False
    line: str | None = None
    x: float | None = None

    @property
    def training(self) -> dict[str, Any]:
        """All that decides what the network becomes, but the seed and what it begins as."""
        return {name: getattr(self, name) for name in ("settings", "images", "canvas", "start", "untrained")}

    def was_trained_so(self, found: dict[str, Any]) -> bool:
        """Whether a finished cell (study.json) has these settings, and began with a network that had its own."""
        return found["training"] == self.training and found.get("begins_as", self.begins_as) == self.begins_as


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    question: str
    paper: str
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    x_label: str = ""
    flops: bool = False

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

    def folder(self, place: Path, cell: str | None = None) -> Path:
        """Of this cell, or of another one with the same seed."""
        name = (cell or self.cell.name).replace(" ", "-").replace("/", "-")
        return place / self.study / f"{name}-seed{self.seed}"


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.toml") if path.stem != BASE)


def read_study(name: str) -> Study:
    told = _read(name)
    base = flatten(_read(BASE)) | flatten(told.get("base", {}))
    cells = []
    for cell in told["cells"]:
        own = {key: value for key, value in cell.items() if key not in (*OWN, "evaluations")}
        evaluations = told.get("evaluations", {}) | cell.get("evaluations", {})
        kept = {key: cell[key] for key in OWN if key in cell}
        shared = base if "model" not in own else {key: base[key] for key in base if not key.startswith("network.")}
        begins_as = next((before.training for before in cells if before.name == cell.get("start")), None)
        cells.append(Cell(settings=shared | flatten(own), evaluations=evaluations, begins_as=begins_as, **kept))
    return Study(
        name=name,
        title=told["title"],
        question=told["question"],
        paper=told.get("paper", ""),
        seeds=tuple(told["seeds"]),
        cells=tuple(cells),
        x_label=told.get("x_label", ""),
        flops=told.get("flops", False),
    )


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))
