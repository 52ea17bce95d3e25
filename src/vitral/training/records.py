"""What a run writes down about itself: manifest.json before it starts, report.json when it is finished."""

import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from vitral import __version__
from vitral.data.contact_sheet import contact_sheet
from vitral.data.dataset import class_counts
from vitral.runs import quote
from vitral.training.events import Candidate
from vitral.training.job import Job
from vitral.training.state import TrainState

SPLITS = ("train", "validation", "test")


def describe_machine(device: str) -> dict[str, Any]:
    return {
        "versions": {"vitral": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "system": f"{platform.system()} {platform.machine()}",
        "device": device,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def make_manifest(job: Job) -> dict[str, Any]:
    """Return the content of manifest.json for a new run."""
    manifest: dict[str, Any] = {
        **describe_machine(job.config.device),
        "data": job.config.data,
        "data_fingerprint": job.dataset.fingerprint(),
        "content_fingerprint": job.dataset.content_fingerprint(),
        "classes": list(job.dataset.classes),
        "seed": job.config.seed,
        "dropped": sorted(job.dataset.dropped),
        "images": {name: len(getattr(job.splits, name)) for name in SPLITS},
        "choices": [[choice.name, str(choice.value), choice.reason] for choice in job.choices],
        "candidates": [asdict(candidate) for candidate in job.candidates],
        "resumes": [],
        "base_sha256": job.base_sha256,
    }
    return manifest | ({} if job.val is None else {"val_fingerprint": job.val.fingerprint()})


def write_report(job: Job, state: TrainState, test: dict[str, Any], candidates: Sequence[Candidate]) -> None:
    """Write report.json and the contact sheet; the HTML page is rendered from them."""
    run, config, classes = job.run, job.config, job.dataset.classes
    items = [item if classes else replace(item, label=0) for item in job.splits.train]
    contact_sheet(items, classes or ("images",)).save(run.plots / "data.png")
    run.write_report(  # the last file of all: it marks the run as finished
        {
            "test": test,
            "objective": config.objective,
            "best_step": state.best.step,
            "keep": config.keep,
            "steps": state.step,
            "train_seconds": round(state.seconds, 3),
            "bad_images": len(state.unreadable.reasons),
            "augmented": config.is_augmented,
            "parameters": sum(parameter.numel() for parameter in job.learner.model.parameters()),
            "candidates": [asdict(candidate) for candidate in candidates],
            "data": _describe_data(job),
            "choices": [asdict(choice) | {"value": str(choice.value)} for choice in job.choices],
            "environment": describe_machine(config.device),
            "command": f"vitral train {quote(config.data)} --recipe none --config {quote(str(run.config))}",
        }
    )


def list_candidates(job: Job, state: TrainState) -> tuple[Candidate, ...]:
    """Return everything that was tried, with the model that was kept marked as chosen."""
    tuned = tuple(Candidate(**candidate) for candidate in state.tuned)
    if not any(candidate.chosen for candidate in tuned):
        return (*job.candidates, *tuned)
    return (*(replace(candidate, chosen=False) for candidate in job.candidates), *tuned)


def _describe_data(job: Job) -> dict[str, Any]:
    dataset, splits = job.dataset, {name: getattr(job.splits, name) for name in SPLITS}
    return {
        "name": dataset.name,
        "classes": list(dataset.classes),
        "multi_label": dataset.multi_label,
        "images": {name: len(items) for name, items in splits.items()},
        "per_class": {name: class_counts(items, len(dataset.classes)) for name, items in splits.items()},
        "reasons": job.splits.reasons,
        "notes": [*dataset.notes, *job.splits.notes],
    }
