"""Choose the images to evaluate a model on: the test split of its own run, or a split of another dataset."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitral.data.dataset import DatasetIndex, Item
from vitral.data.grouping import group_images
from vitral.data.sources import open_dataset
from vitral.data.splits import TEST_SPLIT_REASON, VAL_FRACTION, choose_splits, own_test_split, split_off
from vitral.errors import ConfigError, DataError, VitralError
from vitral.runs import Run

NAME_DATASET = "Name the dataset to evaluate on: vitral evaluate MODEL DATA."


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationData:
    """A dataset with the images to evaluate on, and those that frozen features may learn from."""

    dataset: DatasetIndex
    train: tuple[Item, ...]
    test: tuple[Item, ...]
    reason: str
    """The origin of the test images."""
    validation: tuple[Item, ...] = ()
    """The validation images of the run, if it is known."""


def choose_evaluation_data(run: Run | None, data: str | Path | None, *, needs_train: bool) -> EvaluationData:
    """Return the images that the run held out, or the test split, the val split or all images of another dataset."""
    config, manifest = (run.read_config(), run.read_manifest()) if run else ({}, {})
    if data is None and "data" not in config:
        raise ConfigError("There is no dataset to evaluate on.", hint=NAME_DATASET)
    source = str(config["data"]) if data is None else data
    dataset = trained = open_dataset(source)
    is_same = data is None or ("data" in config and _is_same_path(str(data), str(config["data"])))
    is_unchanged = False
    with suppress(*(() if is_same else (VitralError,))):  # another dataset may not have the groups of the run
        trained = _as_trained(dataset, config, manifest)
        fingerprint = _fingerprint(trained, source, config, manifest)
        is_unchanged = bool(manifest) and manifest.get("data_fingerprint") == fingerprint
    if data is None and not is_unchanged:
        raise DataError(f"The dataset {source} has changed since the model was trained on it.", hint=NAME_DATASET)
    # A hash of its name assigns an image to a split, so images keep their split if others are added or removed.
    if is_unchanged or is_same:
        val = open_dataset(config["val"]) if config.get("val") else None
        if data is None and val is not None:
            fingerprint = _fingerprint(val, config["val"], config)
            if manifest.get("val_fingerprint", fingerprint) != fingerprint:
                raise DataError(f"The dataset {config['val']} (--val) has changed since the run.", hint=NAME_DATASET)
        splits = choose_splits(trained, val, config.get("val_fraction", VAL_FRACTION), manifest.get("groups"))
        return EvaluationData(
            dataset=trained,
            train=splits.train,
            test=splits.test,
            reason=splits.reasons["test"],
            validation=splits.validation,
        )
    return _split_of(dataset, needs_train=needs_train)


def _split_of(dataset: DatasetIndex, *, needs_train: bool) -> EvaluationData:
    """Return the test images of another dataset; ``needs_train`` splits one without splits as training would do it."""
    train = dataset.splits.get("train", ())
    if name := own_test_split(dataset):
        test, reason = dataset.splits[name], f"the dataset's {name} split"
    elif needs_train:
        (train, test), reason = split_off(train), TEST_SPLIT_REASON
    else:
        train, test, reason = (), train, "all images"
    return EvaluationData(dataset=dataset, train=tuple(train), test=tuple(test), reason=reason)


def _as_trained(dataset: DatasetIndex, config: Mapping[str, Any], manifest: Mapping[str, Any]) -> DatasetIndex:
    """Return the dataset with the groups of a run, and without the images that the run dropped."""
    dropped = frozenset(manifest.get("dropped", ()))
    return group_images(replace(dataset, dropped=dropped), config.get("group_by"))


def _fingerprint(
    dataset: DatasetIndex, source: str | Path, config: Mapping[str, Any], manifest: Mapping[str, Any] | None = None
) -> str:
    """Return the fingerprint that a run of this objective records: without labels for masked patches."""
    if config.get("objective") == "masked-patches":
        dataset = open_dataset(source, labeled=False)
        dataset = dataset if manifest is None else _as_trained(dataset, config, manifest)
    return dataset.fingerprint()


def _is_same_path(first: str, second: str) -> bool:
    return first == second or Path(first).expanduser().resolve() == Path(second).expanduser().resolve()
