"""Write features of images to .npz and Parquet files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitral.collectives import current_world
from vitral.data.dataset import import_pyarrow
from vitral.data.scan import Progress
from vitral.errors import ConfigError
from vitral.files import as_text, atomic_path
from vitral.inference.prediction import Failure
from vitral.inference.writers import share_images

if TYPE_CHECKING:
    from vitral.inference.predictor import Predictor


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureFile:
    """The result of `features_to_file`."""

    path: Path
    images: int
    width: int
    failures: tuple[tuple[str, str], ...]
    """Unusable images, which are left out, each with the reason."""
    engine: str = "torch float32"
    """The engine and the precision that computed the features."""


def features_to_file(predictor: "Predictor", files: Sequence[str], out: Path) -> Iterator[Progress | FeatureFile]:
    """Write the embedding of each image to a new file; yield progress, then the result.

    An .npz file has the arrays ``files`` and ``features``, a Parquet file the columns ``file`` and ``features``. In
    several processes that share the images, the first one writes.
    """
    is_first = current_world().is_first
    if is_first:
        check_feature_target(out)
    names, rows, failures = list[str](), list[np.ndarray](), list[tuple[str, str]]()
    yield Progress(done=0, total=len(files))
    rows_of_all = share_images(files, predictor.batch_size, predictor.features)
    for number, (file, features) in enumerate(rows_of_all, 1):
        if isinstance(features, Failure):
            failures.append((file, features.reason))
        elif is_first:
            names.append(as_text(file))
            rows.append(features)
        yield Progress(done=number, total=len(files))
    width = predictor.feature_width
    if is_first:
        _write_features(out, names, np.stack(rows) if rows else np.empty((0, width), np.float32))
    images = len(files) - len(failures)
    yield FeatureFile(path=out, images=images, width=width, failures=tuple(failures), engine=predictor.engine)


def check_feature_target(out: Path) -> None:
    """Raise ConfigError if features cannot be written to this path."""
    if out.suffix.lower() not in (".npz", ".parquet"):
        raise ConfigError(f"--out must end in .npz or .parquet (got {out}).")
    if out.exists():
        raise ConfigError(f"{out} already exists.", hint="Pass another --out.")
    if not out.parent.is_dir():
        raise ConfigError(f"The folder of --out was not found: {out.parent}.")
    if out.suffix.lower() == ".parquet":
        import_pyarrow()


def _write_features(path: Path, names: list[str], table: np.ndarray) -> None:
    with atomic_path(path) as temporary:
        if path.suffix.lower() == ".parquet":
            parquet, pyarrow = import_pyarrow(), import_module("pyarrow")
            rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(table.ravel()), table.shape[1])
            columns = {"file": pyarrow.array(names, pyarrow.string()), "features": rows}
            parquet.write_table(pyarrow.table(columns), temporary)
        else:
            with temporary.open("wb") as stream:
                np.savez(stream, files=np.array(names, dtype=str), features=table)
