"""Record a run: manifest.json before it starts, report.json when it is finished."""

import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from vitral import __version__
from vitral.collectives import current_world
from vitral.data.contact_sheet import contact_sheet, thumbnail
from vitral.data.dataset import class_counts
from vitral.data.headers import BadImageError
from vitral.evaluation.label_errors import LabelErrorRow
from vitral.evaluation.suspects import NearDuplicateRow, Suspects, write_suspects
from vitral.runs import quote
from vitral.training.events import Candidate
from vitral.training.state import TrainState

if TYPE_CHECKING:
    from vitral.training.job import Job

SPLITS = ("train", "validation", "test")
MAX_FINDINGS, MAX_THUMBNAILS = 200, 12
"""Label errors and near-duplicates in report.json, and thumbnails among them; the CSV files have all."""


def describe_machine(device: str) -> dict[str, Any]:
    return {
        "versions": {"vitral": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "system": f"{platform.system()} {platform.machine()}",
        "device": device,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def make_manifest(job: "Job") -> dict[str, Any]:
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
        "groups": dict(job.groups),
        "findings": dict(job.findings),
        "resumes": [],
        "base_sha256": job.base_sha256,
        "launch": current_world().launch,
    }
    return manifest | ({} if job.val is None else {"val_fingerprint": job.val.fingerprint()})


def write_report(job: "Job", state: TrainState, test: dict[str, Any], candidates: Sequence[Candidate]) -> None:
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
            "refit_steps": state.step - state.pace.first if state.pace.first and state.best.step == state.step else 0,
            "train_seconds": round(state.seconds, 3),
            "bad_images": len(state.unreadable.reasons),
            "augmented": config.is_augmented,
            "parameters": sum(parameter.numel() for parameter in job.learner.model.parameters()),
            "candidates": [asdict(candidate) for candidate in candidates],
            "data": _describe_data(job),
            **_describe_findings(job),
            "choices": [asdict(choice) | {"value": str(choice.value)} for choice in job.choices],
            "environment": describe_machine(config.device),
            "command": f"vitral train {quote(config.data)} --recipe none --config {quote(str(run.config))}",
        }
    )


def list_candidates(job: "Job", state: TrainState) -> tuple[Candidate, ...]:
    """Return everything that was tried, with the model that was kept marked as chosen."""
    tuned = tuple(Candidate(**candidate) for candidate in state.tuned)
    if not any(candidate.chosen for candidate in tuned):
        return (*job.candidates, *tuned)
    return (*(replace(candidate, chosen=False) for candidate in job.candidates), *tuned)


def _describe_data(job: "Job") -> dict[str, Any]:
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


def _describe_findings(job: "Job") -> dict[str, Any]:
    """Return the likely label errors, the first ones with thumbnails, and the near-duplicates for report.json."""
    if not job.findings:
        return {}
    errors = job.findings["label_errors"][:MAX_FINDINGS]
    by_key = {item.key: item for name in SPLITS for item in getattr(job.splits, name)}
    rows: list[dict[str, Any]] = []
    for number, error in enumerate(errors, 1):
        row = {"key": error["file"], **{name: error[name] for name in ("label", "suggested", "probability")}}
        if number <= MAX_THUMBNAILS:
            row["thumbnail"] = f"label-error-{number:02d}.png"
            with suppress(BadImageError, KeyError):  # the report can do without
                thumbnail(by_key[row["key"]]).save(job.run.plots / row["thumbnail"])
        rows.append(row)
    pairs = [{"key": row["file"], **row} for row in job.findings["near_duplicates"][:MAX_FINDINGS]]
    return {"label_errors": rows, "near_duplicates": pairs, "random_split": job.findings["random_split"]}


def write_findings(job: "Job") -> None:
    """Write all likely label errors and near-duplicates as CSV files, as `vitral data --from` does."""
    if not job.findings:
        return
    suspects = Suspects(
        images=len(job.splits.train) + len(job.splits.validation),
        label_errors=tuple(LabelErrorRow(**row) for row in job.findings["label_errors"]),
        near_duplicates=tuple(NearDuplicateRow(**row) for row in job.findings["near_duplicates"]),
        unreadable=(),
        notes=(),
    )
    is_searched = job.findings.get("near_duplicates_searched", True)
    write_suspects(suspects, job.run.folder, near_duplicates=is_searched)
