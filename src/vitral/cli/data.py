"""`vitral data`: check a dataset before training on it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from vitral.cli.parameters import Device, File, Format, ImageSize, Switch, Text, option
from vitral.console.output import show_as
from vitral.console.progress import progress_bar, with_progress
from vitral.console.results import show_scan
from vitral.console.suspects import show_suspects
from vitral.errors import ConfigError, DataError
from vitral.files import atomic_path, printable

if TYPE_CHECKING:
    from vitral.data.dataset import DatasetIndex
    from vitral.data.scan import Scan
    from vitral.evaluation.suspects import Suspects
    from vitral.inference.loaded_model import LoadedModel


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
    from_: Annotated[
        Text, option("Find likely label errors and near-duplicates by the features of MODEL.", "MODEL", name="--from")
    ] = None,
    out: Annotated[
        Path | None, option("Write label-errors.csv and near-duplicates.csv to the folder DIR (with --from).", "DIR")
    ] = None,
    image_size: Annotated[ImageSize, option("The input size of MODEL.", show_default="at most 224")] = None,
    device: Annotated[Device, option("Where MODEL runs: cpu, cuda, cuda:1 or mps.")] = "auto",
    format: Annotated[Format, option("human, json or quiet (problems only).")] = "human",
) -> None:
    """Check a dataset before training on it.

    Reports classes, image sizes, unreadable files, duplicates and leaks between splits. With --from, also lists images
    whose label is probably wrong and images that are nearly equal. Exits with code 2 if training on the dataset would
    fail.

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
    vitral data photos/ --from vit-cifar10 --out suspects
    """
    from vitral.data.sources import open_dataset

    if sheet is not None:
        _check_free(sheet)
    dataset, is_quiet = open_dataset(data), format != "human"
    model = load_suspect_model(from_, out=out, image_size=image_size, device=device)
    result = _scan(dataset, headers_only=headers_only, group_by=group_by, drop=drop, quiet=is_quiet)
    if sheet is not None:
        _write_sheet(dataset, sheet)
    suspects, files = None, list[Path]()
    if model is not None:
        suspects, files = search_suspects(model, dataset, out, quiet=is_quiet)
    _show(result, sheet, suspects, files, format)
    if not result.can_train:
        sys.exit(2)


def _scan(
    dataset: "DatasetIndex", *, headers_only: bool, group_by: str | None, drop: Path | None, quiet: bool
) -> "Scan":
    from vitral.data.scan import scan

    with progress_bar("Reading images", quiet=quiet) as move:
        return scan(
            dataset,
            headers_only=headers_only,
            group_by=group_by,
            drop=drop,
            on_progress=lambda event: move(event.done, event.total),
        )


def _write_sheet(dataset: "DatasetIndex", sheet: Path) -> None:
    from vitral.data.contact_sheet import contact_sheet

    with atomic_path(sheet, DataError) as temporary:
        contact_sheet(dataset.splits.get("train", ()), dataset.classes).save(temporary, "PNG")


def _show(result: "Scan", sheet: Path | None, suspects: "Suspects | None", files: list[Path], format: Format) -> None:
    def show() -> None:
        show_scan(result, sheet)
        if suspects is not None:
            show_suspects(suspects, files)

    extra = {} if suspects is None else {"suspects": {**suspects.as_dict(), "files": [str(path) for path in files]}}
    show_as(format, json=result.as_dict() | extra, quiet=map(printable, result.problems), human=show)


def load_suspect_model(
    model: str | None, *, out: Path | None, image_size: tuple[int, int] | None, device: str
) -> "LoadedModel | None":
    """Return the model of --from, if any. Raise ConfigError if its options cannot be used."""
    from vitral.evaluation.suspects import check_suspect_target, load_for_features

    for name, is_passed in (("--out", out), ("--image-size", image_size), ("--device", device != "auto")):
        if model is None and is_passed:
            raise ConfigError(f"{name} applies to the features of a model only.", hint="Pass --from MODEL.")
    if out is not None:
        check_suspect_target(out)
    return None if model is None else load_for_features(model, image_size=image_size, device=device)


def search_suspects(
    model: "LoadedModel", dataset: "DatasetIndex", out: Path | None, *, quiet: bool
) -> "tuple[Suspects, list[Path]]":
    """Return the suspects of a dataset, and the files that they were written to."""
    from vitral.evaluation.suspects import Suspects, find_suspects, write_suspects

    suspects = with_progress(find_suspects(model, dataset), "Computing features", quiet=quiet)
    assert isinstance(suspects, Suspects)
    return suspects, [] if out is None else write_suspects(suspects, out)


def _check_free(sheet: Path) -> None:
    """Raise ConfigError before the scan, which may take long, if the contact sheet cannot be written."""
    if sheet.suffix.lower() != ".png":
        raise ConfigError(f"--sheet {sheet} does not end in .png.", hint="Pass a .png file.")
    if not sheet.parent.is_dir():
        raise ConfigError(f"--sheet {sheet}: the folder {sheet.parent} does not exist.", hint="Create it first.")
    if sheet.exists():
        raise ConfigError(f"--sheet {sheet} already exists.", hint="Pass another name, or delete it.")
