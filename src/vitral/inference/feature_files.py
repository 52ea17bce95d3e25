"""Embeddings on disk, with the names of their files."""

from pathlib import Path

import numpy as np

from vitral.data.parquet import import_pyarrow
from vitral.errors import ConfigError
from vitral.files import atomic_path


def check_target(path: Path) -> None:
    """ConfigError before the work, not after it."""
    if path.suffix.lower() not in (".npz", ".parquet"):
        raise ConfigError(f"--out {path} must end in .npz or .parquet.")
    if path.exists():
        raise ConfigError(f"{path} is there already.", hint="Give another name.")
    if not path.parent.is_dir():
        raise ConfigError(f"There is no folder {path.parent} for --out.")
    if path.suffix.lower() == ".parquet":
        import_pyarrow()


def write_features(path: Path, names: list[str], rows: list[np.ndarray], width: int) -> None:
    """As npz: arrays ``files`` and ``features``; as Parquet: columns ``file`` and ``features``. Whole or not at all."""
    table = np.stack(rows) if rows else np.empty((0, width), np.float32)
    with atomic_path(path) as aside:
        if path.suffix.lower() == ".parquet":
            parquet = import_pyarrow()
            import pyarrow

            columns = {
                "file": pyarrow.array(names, pyarrow.string()),
                "features": pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(table.ravel()), width),
            }
            parquet.write_table(pyarrow.table(columns), aside)
        else:
            with aside.open("wb") as stream:
                np.savez(stream, files=np.array(names, dtype=str), features=table)
