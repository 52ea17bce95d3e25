"""Leave listed images out of training (--drop), such as images whose label looks wrong."""

from dataclasses import replace
from pathlib import Path
from posixpath import normpath

from vitral.data.dataset import DatasetIndex
from vitral.data.sources.table import open_csv
from vitral.data.splits import own_test_split
from vitral.errors import DataError

_COLUMN = "file"


def drop_images(data: DatasetIndex, file: str | Path | None) -> DatasetIndex:
    """Return the dataset with the images that a CSV file lists marked as dropped.

    The file names them as the dataset does, in its column `file` or else in its first column.
    """
    if file is None:
        return data
    keys = {item.key for items in data.splits.values() for item in items}
    names = read_names(Path(file).expanduser())
    if not names:  # as a run without suspects writes it
        return replace(data, notes=(*data.notes, f"{file} lists no images, so none is dropped."))
    listed = [name if name in keys else normpath(name) for name in names]
    dropped = frozenset(listed) & keys
    if not dropped:
        example = next(iter(sorted(keys)), "none")
        raise DataError(
            f"None of the {len(listed):,} images in {file} is in {data.name} (got {listed[0]}; expected names such as "
            f"{example}).",
            hint="List the images as the dataset names them.",
        )
    unknown = [name for name in listed if name not in keys]
    notes = (
        [f"Images in {file} that are not in {data.name}: {len(unknown):,}, such as {unknown[0]}."] if unknown else []
    )
    return replace(data, dropped=dropped, notes=(*data.notes, *notes))


def without_dropped(data: DatasetIndex) -> DatasetIndex:
    """Return the dataset without the images that it drops; its own test split keeps them."""
    splits = {
        split: tuple(item for item in items if item.key not in data.dropped or split == own_test_split(data))
        for split, items in data.splits.items()
    }
    return replace(data, splits=splits, dropped=frozenset())


def read_names(path: Path) -> list[str]:
    """Return the names of images in a CSV file with a header, each once; none if only the header is there."""
    if not path.is_file():
        raise DataError(f"{path} not found.", hint="Pass a CSV file with a column of image names to --drop.")
    header, lines = open_csv(path)
    columns = [name.strip().lower() for name in header]
    column = columns.index(_COLUMN) if _COLUMN in columns else 0
    rows = [line for _, line in lines]
    names = (line[column].strip() for line in rows if len(line) > column)
    unique = list(dict.fromkeys(name for name in names if name))
    if not unique and (rows or _COLUMN not in columns):
        raise DataError(f"{path} lists no images.", hint=f"Write a header and one image per line: {_COLUMN},label.")
    return unique
