"""One cell of a study: train, or go on with training, measure, and write study.json beside the run."""

import json
import shutil
import sys
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

import vitral
from studies.pictures import pictures_for
from studies.plan import Job, read_study
from vitral.data.sources import open_dataset
from vitral.data.transforms import prepare
from vitral.inference.loaded_model import load_model
from vitral.model.network import Network
from vitral.preprocess import Preprocess
from vitral.training.build import build_model
from vitral.training.config import with_settings
from vitral.training.entry import start_run, train
from vitral.training.events import Finished
from vitral.training.settings import collect_settings


def main(study: str, cell: str, seed: str, data: str, place: str) -> None:
    job = next(job for job in read_study(study).jobs() if job.cell.name == cell and job.seed == int(seed))
    run_cell(job, data, Path(place))


def run_cell(job: Job, data: str, place: Path) -> None:
    run, cell = job.folder(place), job.cell
    trained = {"training": cell.training, "seed": job.seed}
    if not run.exists():
        _copy_of_another_study(trained, run, place)
    settings: dict[str, Any] = {**cell.settings, "seed": job.seed}
    if cell.start is not None:
        settings["from"] = str(job.folder(place, cell.start) / "model.safetensors")
        settings.pop("model")
    pictures = pictures_for(data, place, cell.images, cell.canvas)
    found = _untrained(settings, run) if cell.untrained else _trained(settings, pictures, run)
    found = {"cell": cell.name, **trained, **found}
    found["threads"] = torch.get_num_threads()
    found["begins_as"] = cell.begins_as
    found["evaluations"] = cell.evaluations
    found["others"] = {name: measure(run, data, place, how) for name, how in cell.evaluations.items()}
    aside = run / "study.json.part"
    aside.write_text(json.dumps(found, indent=1), encoding="utf-8")
    aside.replace(run / "study.json")


def _copy_of_another_study(trained: dict[str, Any], run: Path, place: Path) -> None:
    """If a finished run differs in nothing: most studies have the base itself as a cell."""
    for path in sorted(place.glob(f"*/*-seed{trained['seed']}/study.json")):
        training = json.loads(path.read_text(encoding="utf-8"))["training"]
        if training == trained["training"] and not training["start"]:
            aside = run.with_name(f"{run.name}.part")
            shutil.rmtree(aside, ignore_errors=True)
            shutil.copytree(path.parent, aside, ignore=shutil.ignore_patterns("study.json"))
            aside.rename(run)
            return


def _trained(settings: dict[str, Any], data: str, run: Path) -> dict[str, Any]:
    has_begun = (run / "config.toml").is_file()
    if run.is_dir() and not has_begun:
        shutil.rmtree(run)  # it was ended before its settings were written
    if has_begun:
        events = train(data, resume=run, **settings)  # refuses settings that have changed since
    else:
        events = start_run(*collect_settings(data, settings, recipe="none"), out=run)
    *_, last = events
    if not isinstance(last, Finished):
        sys.exit(f"{run} was interrupted")
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    kept = {"steps": report["steps"], "parameters": report["parameters"], "seconds": report["train_seconds"]}
    kept["images"] = last.test["images"]
    is_classifier = settings.get("objective", "classify") == "classify"  # others count colours, not pictures
    return {"top1": last.test["top1"] if is_classifier else None, "loss": last.test["loss"], **kept}


def _untrained(settings: dict[str, Any], run: Path) -> dict[str, Any]:
    run.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(settings["seed"])
    model, preprocess = build_network(settings)
    vitral.save(model, run / "model.safetensors", preprocess=preprocess)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"top1": None, "steps": 0, "parameters": parameters, "seconds": 0.0, "images": 0}


def build_network(settings: dict[str, Any]) -> tuple[Network, Preprocess]:
    """As vitral train builds it."""
    config = with_settings(None, {"data": "none", "channels": 3, **settings}, "the study")
    return build_model(config, classes=10)[:2]


def measure(run: Path, data: str, place: Path, how: dict[str, Any]) -> float:
    """The part of the test pictures that is right, measured in another way than the run was."""
    weights = run / "model.safetensors"
    if "packed" in how:
        return measure_packed(weights, data, how["packed"])
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in how.items()}
    options = {name: value for name, value in options.items() if name not in ("canvas", "line", "x")}
    return vitral.evaluate(weights, pictures_for(data, place, None, how.get("canvas")), **options).scores.top1


def measure_packed(weights: Path, data: str, sides: list[int]) -> float:
    """Pictures of several sizes in turns, each batch packed into one sequence."""
    ready = load_model(weights)
    sized = cycle(replace(ready.preprocess, size=(side, side)) for side in sides)
    right, items = 0, open_dataset(data).splits["test"]
    for start in range(0, len(items), 64):
        some = items[start : start + 64]
        images = [prepare(item.source.read(), next(sized)) for item in some]
        truth = torch.tensor([item.label for item in some])
        right += int((ready.logits(images).argmax(1) == truth).sum())
    return right / len(items)


if __name__ == "__main__":
    main(*sys.argv[1:])
