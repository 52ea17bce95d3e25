"""`vitral data`: check a dataset before training on it."""

import sys
from pathlib import Path
from typing import Annotated

from vitral.cli.parameters import File, Format, Switch, Text, option
from vitral.console.output import show_as
from vitral.console.progress import progress_bar
from vitral.console.results import show_scan
from vitral.errors import ConfigError, DataError
from vitral.files import atomic_path, printable


def data(
    data: str,
    /,
    *,
    sheet: Annotated[File, option("Write a contact sheet to FILE (.png).")] = None,
    group_by: Annotated[
        Text, option("Check groups: a column, or a regular expression on the names of images.", "COLUMN|PATTERN")
    ] = None,
    drop: Annotated[File, option("Leave out the images that a CSV file lists, except test images.")] = None,
    headers_only: Annotated[Switch, option("Skip decoding: faster, but misses damaged pixels.")] = False,
    format: Annotated[Format, option("human, json or quiet (problems only).")] = "human",
) -> None:
    """Check a dataset before training on it.

    Reports classes, image sizes, unreadable files, duplicates and leaks between splits. Exits with code 2 if training
    on the dataset would fail.

    Parameters
    ----------
    data
        A folder of class folders, a CSV or Parquet table, tar shards, hf:OWNER/NAME, or builtin:digits.

    Examples
    --------
    vitral data photos/
    vitral data builtin:digits --sheet digits.png
    vitral data photos/ --group-by '([^/]+)_[0-9]+.jpg'
    vitral data "shards/train-{000..009}.tar" --headers-only --format json
    """
    from vitral.data.contact_sheet import contact_sheet
    from vitral.data.scan import scan
    from vitral.data.sources import open_dataset

    if sheet is not None:
        _check_free(sheet)
    dataset = open_dataset(data)
    with progress_bar("Reading images", quiet=format != "human") as move:
        result = scan(
            dataset,
            headers_only=headers_only,
            group_by=group_by,
            drop=drop,
            on_progress=lambda event: move(event.done, event.total),
        )
    if sheet is not None:
        with atomic_path(sheet, DataError) as temporary:
            contact_sheet(dataset.splits.get("train", ()), dataset.classes).save(temporary, "PNG")
    problems = map(printable, result.problems)
    show_as(format, json=result.as_dict(), quiet=problems, human=lambda: show_scan(result, sheet))
    if not result.can_train:
        sys.exit(2)


def _check_free(sheet: Path) -> None:
    """Raise ConfigError before the scan, which may take long, if the contact sheet cannot be written."""
    if sheet.suffix.lower() != ".png":
        raise ConfigError(f"--sheet {sheet} does not end in .png.", hint="Pass a .png file.")
    if not sheet.parent.is_dir():
        raise ConfigError(f"--sheet {sheet}: the folder {sheet.parent} does not exist.", hint="Create it first.")
    if sheet.exists():
        raise ConfigError(f"--sheet {sheet} already exists.", hint="Pass another name, or delete it.")
