"""Open a dataset by what a person types: class folders, a table, tar shards, a hub name, or the built-in digits.

photos/                        one folder per class, or train/ val/ test/ with such folders
labels.csv, labels.parquet     a column of images and a column of labels
shards/, shards/train-{000..009}.tar, one.tar
s3://bucket/shards/, https://host/train-{000..009}.tar     the same on an object store or a web server
hf:owner/name                  a Hugging Face dataset that is stored as Parquet
builtin:digits
"""

import os
from dataclasses import replace
from pathlib import Path

from vitral.data.dataset import NO_LABEL, DatasetIndex, DigitsSource, Item, load_digits
from vitral.data.remote import is_url
from vitral.data.sources.folder import open_folder, open_unlabeled_folder
from vitral.data.sources.shards import expand_paths, open_shards
from vitral.data.sources.table import open_table
from vitral.errors import DataError


def open_dataset(data: str | Path, *, labeled: bool = True) -> DatasetIndex:
    """Return the index of a dataset, or raise DataError. `labeled=False` ignores labels: there are no classes then."""
    index = _open(str(data), labeled)
    if labeled:
        return index
    splits = {split: tuple(replace(item, label=NO_LABEL) for item in items) for split, items in index.splits.items()}
    return replace(index, classes=(), splits=splits, multi_label=False)


def _open(name: str, labeled: bool) -> DatasetIndex:
    if name.startswith("builtin:"):
        return open_builtin(name.removeprefix("builtin:"))
    if name.startswith("hf:"):
        from vitral.data.sources.hub import open_hub

        return open_hub(name.removeprefix("hf:"), labeled=labeled)
    if is_url(name):
        from vitral.data.sources.remote_shards import open_remote_shards

        return open_remote_shards(name, labeled=labeled)
    path = Path(os.path.expanduser(name))
    if path.suffix.lower() == ".tar" and path.is_file():
        return open_shards([path], labeled=labeled)
    if not path.exists() and ("{" in name or name.endswith(".tar")):
        return open_shards(expand_paths(name), labeled=labeled)
    if path.suffix.lower() in (".csv", ".tsv", ".parquet"):
        return open_table(path, labeled=labeled)
    if not path.is_dir():
        raise DataError(
            f"{path} not found." if not path.exists() else f"{path} is not a folder, a table or a tar shard.",
            hint="Pass a folder of class folders, a .csv or .parquet table, .tar shards, hf:owner/name, or "
            "builtin:digits.",
        )
    if shards := sorted(shard for shard in path.glob("*.tar") if shard.is_file()):
        return open_shards(shards, folder=path, labeled=labeled)
    return open_folder(path) if labeled else open_unlabeled_folder(path)


def open_builtin(name: str) -> DatasetIndex:
    """Return a dataset that is part of vitral."""
    if name != "digits":
        raise DataError(f"There is no built-in dataset {name!r}.", hint="Use builtin:digits.")
    splits = {
        split: tuple(
            Item(f"{split}/{row:04d}", int(label), DigitsSource(split, row))
            for row, label in enumerate(load_digits()[f"{split}_labels"])
        )
        for split in ("train", "test")
    }
    return DatasetIndex(name="digits", classes=tuple("0123456789"), splits=splits)
