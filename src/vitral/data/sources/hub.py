"""Open hf:owner/name: a Hugging Face dataset that is stored as Parquet, from the hub or from its cache.

Before a download, vitral prints the files, their size and the target folder. Offline, only the cache is used.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath

from vitral.data.dataset import SPLIT_NAMES, DatasetIndex, split_from_name
from vitral.data.sources.table import Row, build_index, read_parquet
from vitral.errors import DataError
from vitral.weights.hub import HubUnreachableError, Repository


def open_hub(name: str, *, labeled: bool = True) -> DatasetIndex:
    """Return the index of owner/name, owner/name@revision, or owner/name/folder (one of several datasets)."""
    address, _, revision = name.partition("@")
    owner, dataset, folder = (*address.split("/", 2), "", "")[:3]
    if not owner or not dataset:
        raise DataError(f"hf:{name} is not the name of a dataset.", hint="Use hf:owner/name.")
    files = fetch(f"{owner}/{dataset}", revision or None, folder)
    rows: list[Row] = []
    classes: list[str] | None = None
    keys = {path: path.removesuffix(".parquet") for path in files}
    for path, local in files.items():
        file_rows, names = read_parquet(local, find_split(path), key=keys[path], labeled=labeled)
        rows += file_rows
        classes = classes or names
    index = build_index(folder.rpartition("/")[2] or dataset, rows, classes)
    return replace(index, tables=tuple((local, keys[path]) for path, local in files.items()))


def fetch(name: str, revision: str | None, folder: str) -> dict[str, Path]:
    """Download the Parquet files of a dataset. Return their local paths by path in the repository, sorted by name."""
    repository = Repository(name=name, revision=revision, kind="dataset")
    try:
        sizes = repository.list_files()
    except HubUnreachableError as error:
        return _from_cache(repository, folder, error)
    return repository.download({path: sizes[path] for path in choose_files(name, sizes, folder)})


def _from_cache(repository: Repository, folder: str, reason: HubUnreachableError) -> dict[str, Path]:
    home = repository.cached_folder(reason)
    cached = [path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()]
    chosen = choose_files(repository.name, cached, folder)
    if missing := missing_shards(chosen):
        raise DataError(
            f"hf:{repository.name} is only partly in the cache ({missing[0]} is missing), and the hub is unreachable: "
            f"{reason}.",
            hint="Connect and try again.",
        ) from reason
    return {path: home / path for path in chosen}


def choose_files(repository: str, paths: Iterable[str], folder: str = "") -> list[str]:
    """Return the Parquet files of one dataset, sorted by name."""
    tables = sorted(path for path in paths if path.endswith(".parquet"))
    inside = [path for path in tables if path.startswith(f"{folder}/")] if folder else tables
    if not inside:
        where = f" in {folder}/" if tables else ""
        raise DataError(f"hf:{repository} has no Parquet files{where}.", hint="Download it and pass its folder.")
    homes = sorted({_home(path) for path in inside})
    if len(homes) > 1:
        raise DataError(
            f"hf:{repository} has several datasets: {', '.join(home or 'the top folder' for home in homes[:8])}.",
            hint=f"Choose one: hf:{repository}/{homes[-1]}",
        )
    return inside


def _home(path: str) -> str:
    """Return the folder of a file, without folders that are a split."""
    return "/".join(part for part in PurePosixPath(path).parent.parts if part.lower() not in SPLIT_NAMES)


def find_split(path: str) -> str:
    """Return the split that the file name contains, or else the nearest folder: test/0000.parquet is test."""
    return next((split for part in reversed(PurePosixPath(path).parts) if (split := split_from_name(part))), "train")


def missing_shards(paths: Iterable[str]) -> list[str]:
    """Return the files that are missing from series such as 00000-of-00004."""
    paths, expected = set(paths), set()
    for path in paths:
        if number := re.search(r"-(\d+)-of-(\d+)(?=\.)", path):
            digits, count = len(number[1]), int(number[2])
            head, tail = path[: number.start()], path[number.end() :]
            expected |= {f"{head}-{index:0{digits}d}-of-{number[2]}{tail}" for index in range(min(count, 100_000))}
    return sorted(expected - paths)
