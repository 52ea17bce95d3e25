"""hf:owner/name: a dataset of the Hugging Face hub that is stored as Parquet, from its server or from the cache.

Nothing is downloaded without saying what, how large and where to. What is in the cache is all there is when offline.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from vitral.data.dataset import SPLITS, DatasetIndex, named_split
from vitral.data.sources.table import Row, build, read_parquet
from vitral.errors import DataError, first_line, missing_package


def open_hub(words: str, *, labelled: bool = True) -> DatasetIndex:
    """``owner/name``; ``owner/name@revision``; ``owner/name/folder`` where a repository holds several datasets."""
    address, _, revision = words.partition("@")
    owner, name, folder = (*address.split("/", 2), "", "")[:3]
    if not owner or not name:
        raise DataError(f"hf:{words} is no dataset of the hub.", hint="It should be hf:owner/name.")
    files = fetch(f"{owner}/{name}", revision or None, folder)
    rows: list[Row] = []
    classes: list[str] | None = None
    for place, local in files.items():
        found, told = read_parquet(local, find_split(place), key=place.removesuffix(".parquet"), labelled=labelled)
        rows += found
        classes = classes or told
    return build(folder.rpartition("/")[2] or name, rows, classes)


def fetch(repository: str, revision: str | None, folder: str) -> dict[str, Path]:
    """The Parquet files of a dataset: place in the repository and local path, in the order of their names."""
    try:
        from huggingface_hub import constants, errors, hf_hub_download, try_to_load_from_cache
    except ImportError:
        raise missing_package("huggingface_hub", "hub", f"hf:{repository}") from None
    try:
        sizes = _list_files(repository, revision)
    except (OSError, errors.HTTPError) as error:  # pyright: ignore[reportPrivateImportUsage]
        return _from_cache(repository, revision, folder, error)
    chosen = choose_files(repository, sizes, folder)
    cached = {place: try_to_load_from_cache(repository, place, None, revision, "dataset") for place in chosen}
    if missing := [place for place, path in cached.items() if not isinstance(path, str)]:
        size = sum(sizes[place] for place in missing) / 1e6
        words = f"{len(missing)} files" if len(missing) > 1 else missing[0]
        line = f"hf:{repository}: downloading {words} ({size:,.1f} MB) to {constants.HF_HUB_CACHE}"
        print(line, file=sys.stderr, flush=True)
    try:
        return {
            place: Path(hf_hub_download(repository, place, revision=revision, repo_type="dataset")) for place in chosen
        }
    except (OSError, errors.HTTPError) as error:  # pyright: ignore[reportPrivateImportUsage]
        raise DataError(
            f"hf:{repository} could not be downloaded: {first_line(error)}.",
            hint="What came is kept: try again. A gated dataset needs `hf auth login`.",
        ) from error


def _list_files(repository: str, revision: str | None) -> dict[str, int]:
    """Every file and its size."""
    from huggingface_hub import HfApi, errors

    try:
        info = HfApi().dataset_info(repository, revision=revision, files_metadata=True)
    except errors.RevisionNotFoundError as error:
        raise DataError(f"The dataset {repository} has no revision {revision}.") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise DataError(
            f"There is no public dataset {repository} on the Hugging Face hub.",
            hint="Check the name; a private or gated one needs `hf auth login`.",
        ) from error
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _from_cache(repository: str, revision: str | None, folder: str, error: Exception) -> dict[str, Path]:
    from huggingface_hub import constants, snapshot_download

    try:
        home = Path(
            snapshot_download(
                repository,
                repo_type="dataset",
                revision=revision,
                local_files_only=True,
                cache_dir=constants.HF_HUB_CACHE,
            )
        )
    except Exception:  # it is not there, which the hub says in several ways
        raise DataError(
            f"hf:{repository} is not in the cache, and the hub cannot be reached: {first_line(error)}.",
            hint="Connect and try again, or give a folder.",
        ) from error
    there = [path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()]
    chosen = choose_files(repository, there, folder)
    if missing := missing_shards(chosen):
        raise DataError(
            f"Only a part of hf:{repository} is in the cache ({missing[0]} is not), and the hub cannot be reached: "
            f"{first_line(error)}.",
            hint="Connect and try again.",
        ) from error
    return {place: home / place for place in chosen}


def choose_files(repository: str, places: Iterable[str], folder: str = "") -> list[str]:
    """The Parquet files of one dataset, in the order of their names."""
    found = sorted(place for place in places if place.endswith(".parquet"))
    inside = [place for place in found if place.startswith(f"{folder}/")] if folder else found
    if not inside:
        what = f"no Parquet files in {folder}/" if found else "no Parquet files"
        raise DataError(f"hf:{repository} holds {what}.", hint="Download it and give its folder.")
    homes = sorted({_home(place) for place in inside})
    if len(homes) > 1:
        raise DataError(
            f"hf:{repository} holds several datasets: {', '.join(home or 'the one at the top' for home in homes[:8])}.",
            hint=f"Choose one: hf:{repository}/{homes[-1]}",
        )
    return inside


def _home(place: str) -> str:
    """The folder of a file, without folders that are a split."""
    return "/".join(part for part in PurePosixPath(place).parent.parts if part.lower() not in SPLITS)


def find_split(place: str) -> str:
    """train-00000-of-00002.parquet, test/0000.parquet: by a word of its name, else of the nearest folder with one."""
    return next((split for part in reversed(PurePosixPath(place).parts) if (split := named_split(part))), "train")


def missing_shards(places: Iterable[str]) -> list[str]:
    """Of files that are numbered as 00000-of-00004, those that are not there."""
    places, expected = set(places), set()
    for place in places:
        if number := re.search(r"-(\d+)-of-(\d+)(?=\.)", place):
            digits, count = len(number[1]), int(number[2])
            head, tail = place[: number.start()], place[number.end() :]
            expected |= {f"{head}-{index:0{digits}d}-of-{number[2]}{tail}" for index in range(min(count, 100_000))}
    return sorted(expected - places)
