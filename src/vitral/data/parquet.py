"""Read cells of Parquet files by their row groups, and cache the groups that were used last.

Whole files of images would not fit into memory, and single cells cannot be read.
"""

import os
from bisect import bisect_right
from collections import OrderedDict
from functools import lru_cache
from itertools import accumulate
from types import ModuleType
from typing import Any

from vitral.errors import missing_package

CACHE_BYTES = 2**29


def import_pyarrow() -> ModuleType:
    """Return pyarrow.parquet, or raise MissingError that names the extra."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_package("pyarrow", "tables", "A Parquet table") from None
    return pyarrow.parquet


class RowGroups:
    """Cache columns of row groups: at most `max_bytes` of them, and at least the last one."""

    def __init__(self, max_bytes: int):
        self.max_bytes, self.bytes = max_bytes, 0
        self.cached: OrderedDict[tuple[str, str, int], Any] = OrderedDict()

    def read_cell(self, path: str, column: str, row: int) -> object:
        """Return the value of one cell as a Python object."""
        file, starts = _open(path, os.getpid())
        group = bisect_right(starts, row) - 1
        key = (path, column, group)
        if key not in self.cached:
            self.cached[key] = file.read_row_group(group, columns=[column])[column]
            self.bytes += self.cached[key].nbytes
            while self.bytes > self.max_bytes and len(self.cached) > 1:
                self.bytes -= self.cached.popitem(last=False)[1].nbytes
        self.cached.move_to_end(key)
        return self.cached[key][row - starts[group]].as_py()


GROUPS = RowGroups(CACHE_BYTES)


@lru_cache(maxsize=64)
def _open(path: str, process: int) -> tuple[Any, list[int]]:
    """Open a file once per process. Return it with the first row of each of its groups."""
    file = import_pyarrow().ParquetFile(path, memory_map=True)
    sizes = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
    return file, list(accumulate(sizes, initial=0))
