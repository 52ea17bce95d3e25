"""Train and evaluate one cell of a study with one seed, and write study.json into its run folder.

A study runs this module in a process per cell: python -m vitral.studies.cell STUDY CELL SEED DATA OUT
"""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from vitral.data.dataset import DatasetIndex, natural_channels, sample_headers
from vitral.data.splits import own_test_split
from vitral.data.transforms import preprocess_image
from vitral.errors import ConfigError, VitralError
from vitral.evaluation.evaluator import evaluate
from vitral.files import atomic_folder, write_json
from vitral.inference.loaded_model import load_model
from vitral.model.config import ViTConfig
from vitral.model.cost import count_cost
from vitral.model.network import Config, Network
from vitral.preprocess import Preprocess
from vitral.runs import Run
from vitral.studies.images import dataset_for, open_with_test_split
from vitral.studies.spec import RESULT, Job, load_result, read_study
from vitral.training.config import Masking, as_resolved
from vitral.training.entry import train_events
from vitral.training.prepare import build_model
from vitral.training.settings import flatten, with_settings
from vitral.training.tasks.masked_patches import MaskedPatchHead
from vitral.weights.load import peek
from vitral.weights.save import save

BATCH_SIZE = 64
SAMPLED_HEADERS = 50


def main(study: str, cell: str, seed: str, data: str, out: str) -> None:
    try:
        jobs = read_study(study, (int(seed),)).jobs()
        run_cell(next(job for job in jobs if job.cell.name == cell), data, Path(out))
    except VitralError as error:
        sys.exit(str(error))


def run_cell(job: Job, data: str, out: Path) -> None:
    """Train the cell, or resume its training; then evaluate it and write study.json."""
    folder, cell = job.folder(out), job.cell
    if not folder.exists():
        _copy_equal_run(job, folder, out)
    settings: dict[str, Any] = {**cell.settings, "seed": job.seed}
    if cell.start is not None:
        settings |= {"from": str(Run(job.folder(out, cell.start)).model), "tune.probe": False}
        settings.pop("model", None)
    if cell.untrained:
        result = _initialize(settings, open_with_test_split(data), folder)
    else:
        result = _train(settings, dataset_for(data, out, images=cell.images, canvas=cell.canvas), folder)
    config = peek(Run(folder).model).config
    sizes = {name: options["image_size"] for name, options in cell.evaluations.items() if "image_size" in options}
    result |= {
        "forward_flops": count_cost(config).forward_flops,
        "evaluation_flops": {name: _forward_flops(config, size) for name, size in sizes.items()},
        "cell": cell.name,
        "training": cell.training,
        "start_training": cell.start_training,
        "seed": job.seed,
        "threads": torch.get_num_threads(),
        "evaluations": cell.evaluations,
        "scores": {name: evaluate_cell(folder, data, out, options) for name, options in cell.evaluations.items()},
    }
    write_json(folder / RESULT, result)


def _copy_equal_run(job: Job, folder: Path, out: Path) -> None:
    """Copy a finished run that was trained in the same way: most studies have the base itself as a cell."""
    for path in sorted(out.glob(f"*/*-seed{job.seed}/{RESULT}")):
        result = load_result(path.parent)
        if result is not None and result["training"] == job.cell.training and job.cell.start is None:
            with atomic_folder(folder) as temporary:
                ignored = shutil.ignore_patterns(RESULT)
                shutil.copytree(path.parent, temporary, ignore=ignored, dirs_exist_ok=True)
            return


def _train(settings: dict[str, Any], data: str, folder: Path) -> dict[str, Any]:
    run = Run(folder)
    has_started = run.config.is_file()
    if folder.is_dir() and not has_started:
        shutil.rmtree(folder)  # it was stopped before its settings were written
    # A resumed run refuses settings that have changed since.
    options = {"resume": folder} if has_started else {"out": folder, "recipe": "none"}
    parent = os.getppid()
    for _ in train_events(data, **options, **settings):
        if os.getppid() != parent:
            sys.exit("The study was killed.")  # its next start resumes from the saved state
    if not (report := run.read_report()):
        sys.exit("interrupted")
    test = report["test"]
    is_classifier = settings.get("objective", "classify") == "classify"  # masked patches have an accuracy of colors
    return {
        "top1": test["top1"] if is_classifier else None,
        "loss": test["loss"],
        "steps": report["steps"],
        "parameters": report["parameters"],
        "flops": training_flops(peek(run.model).config, flatten(run.read_config()), report["steps"]),
        "seconds": report["train_seconds"],
        "images": test["images"],
    }


def _initialize(settings: dict[str, Any], index: DatasetIndex, folder: Path) -> dict[str, Any]:
    """Write the untrained network as the model of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    channels = settings.get("channels") or natural_channels(sample_headers(index.splits["train"], SAMPLED_HEADERS))
    model, preprocess = build_network(settings, classes=len(index.classes), channels=channels)
    save(model, Run(folder).model, preprocess=preprocess)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"top1": None, "steps": 0, "parameters": parameters, "flops": 0.0, "seconds": 0.0, "images": 0}


def build_network(settings: Mapping[str, Any], *, classes: int, channels: int = 3) -> tuple[Network, Preprocess]:
    """Return the network of a cell, initialized as vitral train does, and its preprocessing."""
    config = with_settings(None, {"data": "none", "channels": channels, **settings}, "study")
    if "auto" in (config.image_size, config.resize):
        raise ConfigError("An untrained cell needs image_size and resize.", hint="Set both in [base].")
    return build_model(as_resolved(config), classes)[:2]


def evaluate_cell(folder: Path, data: str, out: Path, options: Mapping[str, Any]) -> float:
    """Return the test accuracy of a cell's model under one of its further evaluations."""
    weights = Run(folder).model
    if "packed" in options:
        return evaluate_packed(weights, data, options["packed"])
    arguments: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if name not in ("canvas", "line", "x")
    }
    evaluation = evaluate(weights, dataset_for(data, out, canvas=options.get("canvas")), **arguments)
    features = evaluation.knn or evaluation.few_shot
    return features["top1"] if features else evaluation.scores.top1


def evaluate_packed(weights: Path, data: str, sides: list[int]) -> float:
    """Return the test accuracy with images of several sizes in turn, each batch packed into one sequence."""
    loaded, index = load_model(weights), open_with_test_split(data)
    preprocesses = cycle(replace(loaded.preprocess, size=(side, side)) for side in sides)
    items = index.splits[own_test_split(index) or "test"]
    correct = 0
    for start in range(0, len(items), BATCH_SIZE):
        batch = items[start : start + BATCH_SIZE]
        images = [preprocess_image(item.source.read(), next(preprocesses)) for item in batch]
        labels = torch.tensor([item.label for item in batch])
        correct += int((loaded.logits(images).argmax(1) == labels).sum())
    return correct / len(items)


def training_flops(config: Config, settings: Mapping[str, Any], steps: int) -> float:
    """Return the operations of a training run: three forward passes per image and step."""
    flops = count_cost(config).forward_flops
    if settings.get("objective") == "masked-patches":  # its head runs on the corrupted patches only
        assert isinstance(config, ViTConfig)
        prefix = "masking."
        masking = Masking(**{name.removeprefix(prefix): settings[name] for name in settings if name.startswith(prefix)})
        rows, columns = config.grid(*config.image_hw)
        head = MaskedPatchHead(config, masking).head
        flops += 2 * masking.corrupted_patches(rows * columns) * head.weight.numel()
    return 3.0 * flops * settings["batch_size"] * steps


def _forward_flops(config: Config, size: int | list[int]) -> int:
    """Return the operations of a forward pass at another image size."""
    height, width = size if isinstance(size, list) else (size, size)
    return count_cost(config, (height, width)).forward_flops


if __name__ == "__main__":
    main(*sys.argv[1:])
