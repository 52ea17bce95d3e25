"""``vitral data``: look at a dataset before training on it."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitral.console.output import Format, show_json, show_lines
from vitral.errors import ConfigError


def data(
    data: str,
    /,
    *,
    sheet: Annotated[Path | None, Parameter(help="Write a contact sheet there, as PNG.")] = None,
    headers_only: Annotated[bool, Parameter(help="Do not decode: faster, finds less.", negative="")] = False,
    format: Annotated[Format, Parameter(help="human: a page; json: everything; quiet: problems only.")] = "human",
) -> None:
    """Look at a dataset: classes, sizes, unreadable files, duplicates, leaks. Exit code 2: training cannot go on.

    Parameters
    ----------
    data
        A folder of class folders, a CSV or Parquet table, tar shards, hf:owner/name, or builtin:digits.
    """
    from vitral.console.dataset import show_scan
    from vitral.console.progress import with_progress
    from vitral.data.contact_sheet import contact_sheet
    from vitral.data.scan import scan
    from vitral.data.sources import open_dataset
    from vitral.files import printable

    if sheet is not None:
        _check_free(sheet)
    dataset = open_dataset(data)
    found = with_progress(scan(dataset, decodes=not headers_only), "looking at pictures", quiet=format != "human")
    if sheet is not None:
        contact_sheet(dataset.splits.get("train", ()), dataset.classes).save(sheet)
    if format == "json":
        show_json(found.as_dict())
    elif format == "quiet":
        show_lines(map(printable, found.problems))
    else:
        show_scan(found, sheet)
    if not found.can_train:
        sys.exit(2)


def _check_free(sheet: Path) -> None:
    """ConfigError before the scan, which may take long; nothing is written over."""
    if sheet.suffix.lower() != ".png":
        raise ConfigError(f"--sheet {sheet} must end in .png.")
    if not sheet.parent.is_dir():
        raise ConfigError(f"--sheet {sheet} cannot be written: there is no folder {sheet.parent}.")
    if sheet.exists():
        raise ConfigError(f"--sheet {sheet} is there already.", hint="Give another name, or delete it.")
