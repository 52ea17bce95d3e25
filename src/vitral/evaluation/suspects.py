"""Find images of a dataset to look at, from a model's features: likely label errors and near-duplicates."""

import csv
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from vitral.data.dataset import NO_LABEL, DatasetIndex, Item
from vitral.data.scan import Progress
from vitral.errors import ConfigError
from vitral.evaluation.feature_cache import cached_features
from vitral.evaluation.label_errors import LabelErrorRow, find_label_errors
from vitral.evaluation.linear_probe import choose_folds, cross_validate
from vitral.evaluation.near_duplicates import find_near_duplicates, group_pairs
from vitral.files import as_text, atomic_path
from vitral.inference.loaded_model import LoadedModel, load_model
from vitral.inference.pipeline import ModelOutputs

MAX_IMAGE_SIZE = 224
"""Checkpoints trained at larger sizes are used at this one, rounded down to their patch size."""
LABEL_ERRORS_FILE, NEAR_DUPLICATES_FILE = "label-errors.csv", "near-duplicates.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class NearDuplicateRow:
    """A row of near-duplicates.csv."""

    file: str
    other: str
    similarity: float
    split: str
    other_split: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspects:
    """The result of `find_suspects`: rows in order, the most likely ones first."""

    images: int
    label_errors: tuple[LabelErrorRow, ...]
    near_duplicates: tuple[NearDuplicateRow, ...]
    unreadable: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def load_for_features(
    source: str,
    *,
    image_size: int | tuple[int, int] | None = None,
    device: str = "auto",
    max_image_size: int = MAX_IMAGE_SIZE,
) -> LoadedModel:
    """Load a model whose features are needed, at no more than `max_image_size` pixels unless you pass a size."""
    model = load_model(source, image_size=image_size, device=device, verify=True)
    if image_size is not None or max(model.model.config.image_hw) <= max_image_size:
        return model
    rows, columns = (max(1, max_image_size // step) * step for step in model.model.config.step_hw)
    return load_model(source, image_size=(rows, columns), device=device, verify=False)


def find_suspects(model: LoadedModel, dataset: DatasetIndex, *, batch_size: int = 64) -> Iterator[Progress | Suspects]:
    """Yield progress, then the likely label errors and near-duplicates of all splits together."""
    splits = [(split, item) for split, items in dataset.splits.items() for item in items]
    features = yield from compute_features(model, [item for _, item in splits], batch_size=batch_size)
    rows = [splits[index] for index in features.indices.tolist()]
    pairs = find_near_duplicates(features.outputs)
    near_duplicates = (
        NearDuplicateRow(
            file=rows[pair.first][1].key,
            other=rows[pair.second][1].key,
            similarity=pair.similarity,
            split=rows[pair.first][0],
            other_split=rows[pair.second][0],
        )
        for pair in pairs
    )
    groups = group_pairs(pairs, len(rows))
    label_errors, notes = (), tuple(_notes(model, dataset))
    if _has_single_labels(dataset):
        label_errors = _label_errors(features, groups, [item for _, item in rows], dataset.classes)
    yield Suspects(
        images=len(rows),
        label_errors=tuple(label_errors),
        near_duplicates=tuple(near_duplicates),
        unreadable=features.unreadable,
        notes=notes,
    )


def _label_errors(
    features: ModelOutputs, groups: torch.Tensor, items: Sequence[Item], classes: Sequence[str]
) -> Iterator[LabelErrorRow]:
    labels = torch.tensor([item.label for item in items])
    folds = choose_folds(labels, groups=groups)  # a near-duplicate with the same wrong label must not vouch for it
    probe = cross_validate(features.outputs, labels, classes=len(classes), folds=folds)
    files = [item.key for item in items]
    for error in find_label_errors(probe.out_of_fold, labels, folds=folds):
        yield error.as_row(files, classes)


def _has_single_labels(dataset: DatasetIndex) -> bool:
    used = {item.label for items in dataset.splits.values() for item in items}
    return not dataset.multi_label and NO_LABEL not in used and len(used) > 1


def _notes(model: LoadedModel, dataset: DatasetIndex) -> Iterator[str]:
    if not _has_single_labels(dataset):
        yield "Label errors were not searched: that needs one label per image and at least two classes."
    elif model.run is not None:
        yield "A model that was trained on these images hides some label errors; pass the checkpoint it started from."


def compute_features(
    model: LoadedModel, items: Sequence[Item], *, batch_size: int
) -> Generator[Progress, None, ModelOutputs]:
    """Return the features of some images, from the cache if they are there."""
    items = [replace(item, label=0) for item in items]  # they do not depend on the labels
    return (yield from cached_features(model, items, batch_size=batch_size))


# ---- files ----


def check_suspect_target(folder: Path) -> None:
    """Raise ConfigError if the CSV files cannot be written to this folder."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out must be a folder (got the file {folder}).")
    for name in (LABEL_ERRORS_FILE, NEAR_DUPLICATES_FILE):
        if (folder / name).exists():
            raise ConfigError(f"{folder / name} already exists.", hint="Pass another --out.")


def write_suspects(suspects: Suspects, folder: Path, *, near_duplicates: bool = True) -> list[Path]:
    """Write label-errors.csv and (if they were searched) near-duplicates.csv to a folder; return their paths."""
    tables = ((LABEL_ERRORS_FILE, LabelErrorRow, suspects.label_errors),)
    if near_duplicates:
        tables += ((NEAR_DUPLICATES_FILE, NearDuplicateRow, suspects.near_duplicates),)
    paths = []
    for name, kind, rows in tables:
        with (
            atomic_path(folder / name, ConfigError) as temporary,
            temporary.open("w", newline="", encoding="utf-8") as stream,
        ):
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(field.name for field in fields(kind))
            writer.writerows(map(_cells, rows))
        paths.append(folder / name)
    return paths


def _cells(row: LabelErrorRow | NearDuplicateRow) -> list[str]:
    return [f"{value:.6f}" if isinstance(value, float) else as_text(value) for value in astuple(row)]
