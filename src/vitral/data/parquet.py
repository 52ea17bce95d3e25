"""Cells of Parquet files. A file is read by its row groups, and those used last are kept: whole files of pictures would
not fit into memory, and single cells cannot be read."""

import os
from bisect import bisect_right
from collections import OrderedDict
from functools import lru_cache
from itertools import accumulate
from typing import Any

from vitral.errors import missing_package

KEPT_BYTES = 2**29


def import_pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_package("pyarrow", "tables", "A Parquet table") from None
    return pyarrow.parquet


class Groups:
    """Columns of row groups, at most so many bytes of them, and at least the last one."""

    def __init__(self, most_bytes: int):
        self.most_bytes, self.bytes = most_bytes, 0
        self.kept: OrderedDict[tuple[str, str, int], Any] = OrderedDict()

    def read_cell(self, path: str, column: str, row: int) -> Any:
        file, starts = _open(path, os.getpid())
        group = bisect_right(starts, row) - 1
        place = (path, column, group)
        if place not in self.kept:
            self.keep(place, file.read_row_group(group, columns=[column])[column])
        self.kept.move_to_end(place)
        return self.kept[place][row - starts[group]].as_py()

    def keep(self, place: tuple[str, str, int], found: Any) -> None:
        self.kept[place] = found
        self.bytes += found.nbytes
        while self.bytes > self.most_bytes and len(self.kept) > 1:
            self.bytes -= self.kept.popitem(last=False)[1].nbytes


GROUPS = Groups(KEPT_BYTES)


@lru_cache(maxsize=64)
def _open(path: str, process: int) -> tuple[Any, list[int]]:
    """A file, once in each process, and the first row of each of its groups."""
    file = import_pyarrow().ParquetFile(path, memory_map=True)
    sizes = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
    return file, list(accumulate(sizes, initial=0))
