"""The tensors of a saved state in safetensors files: one file, or one per process of a sharded run.

    tensors.safetensors                   everything
    tensors-00000-of-00002.safetensors    the rows of the first of two processes, and everything that is not divided

Any number of processes reads either: a tensor is put together from the rows of all files, or just those of its rows
that a process needs. The SHA-256 of every file is in the manifest, and nothing is ever unpickled.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from torch.distributed.tensor import DTensor

from vitral.collectives import current_world, is_shared
from vitral.training.sharding import local, rows_of

TENSORS = "tensors.safetensors"
_SHARD = re.compile(r"tensors-([0-9]{5})-of-([0-9]{5})\.safetensors")
_ROWS = "rows"
"""Metadata of a shard: {name: [first row, rows of the whole tensor]} as JSON."""


class Piece(NamedTuple):
    """The rows of a tensor in one file."""

    first: int
    stop: int
    read: Callable[[int, int], Tensor]
    """Reads rows of the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """A tensor on disk."""

    shape: torch.Size
    dtype: torch.dtype
    read_all: Callable[[], Tensor] | None = None
    """Reads a tensor that one file has as a whole."""
    pieces: Sequence[Piece] = ()

    @classmethod
    def in_memory(cls, tensor: Tensor) -> "SavedTensor":
        return cls(shape=tensor.shape, dtype=tensor.dtype, read_all=lambda: tensor)

    def read(self, rows: slice | None = None) -> Tensor:
        """Return the tensor, or some of its rows."""
        if self.read_all is not None:
            tensor = self.read_all()
            return tensor if rows is None else tensor[rows]
        start, stop = (0, self.shape[0]) if rows is None else (rows.start, rows.stop)
        parts = [
            piece.read(max(start, piece.first) - piece.first, min(stop, piece.stop) - piece.first)
            for piece in self.pieces
            if max(start, piece.first) < min(stop, piece.stop)
        ]
        return torch.cat(parts) if parts else torch.empty(0, *self.shape[1:], dtype=self.dtype)


@torch.no_grad()
def read_into(targets: Mapping[str, Tensor], saved: Mapping[str, SavedTensor]) -> None:
    """Overwrite tensors, which may be sharded, with saved ones."""
    for name, target in targets.items():
        local(target).copy_(saved[name].read(rows_of(target)))


# ---- writing ----


def is_divided(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether other processes hold rows of these tensors."""
    return is_shared() and any(isinstance(tensor, DTensor) for tensor in tensors.values())


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write the tensors of this process and return the file."""
    if not is_divided(tensors):
        save_file({name: _on_cpu(tensor) for name, tensor in tensors.items()}, folder / TENSORS)
        return folder / TENSORS
    world, rows, mine = current_world(), dict[str, tuple[int, int]](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        part = rows_of(tensor)
        if part is None and world.is_first:
            mine[name] = _on_cpu(tensor)
        elif part is not None and part.start < part.stop:
            mine[name], rows[name] = _on_cpu(local(tensor)), (part.start, tensor.shape[0])
    path = folder / f"tensors-{world.rank:05d}-of-{world.size:05d}.safetensors"
    save_file(mine, path, metadata={_ROWS: json.dumps(rows)})
    return path


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


# ---- reading ----


def check_names(names: Sequence[str]) -> None:
    """Raise ValueError unless these are the names of the tensor files of one state."""
    shards = [match for match in map(_SHARD.fullmatch, names) if match]
    numbers = sorted(int(match[1]) for match in shards)
    if list(names) != [TENSORS] and (
        len(shards) != len(names) or not shards or any(numbers != list(range(int(match[2]))) for match in shards)
    ):
        raise ValueError("its manifest does not list the files of one state")


def open_tensors(folder: Path, names: Sequence[str]) -> dict[str, SavedTensor]:
    """Return the tensors of a state. ValueError if rows are missing."""
    wholes: dict[str, SavedTensor] = {}
    pieces: dict[str, list[tuple[Piece, int, torch.Size, torch.dtype]]] = {}
    for file_name in sorted(names):
        handle: Any = safe_open(folder / file_name, framework="pt", device="cpu")
        metadata: dict[str, str] = handle.metadata() or {}
        rows: dict[str, tuple[int, int]] = json.loads(metadata.get(_ROWS, "{}"))
        for name in handle.keys():  # noqa: SIM118 (not a mapping)
            part = handle.get_slice(name)
            shape, dtype = torch.Size(part.get_shape()), _DTYPES[part.get_dtype()]
            if name not in rows:
                wholes[name] = SavedTensor(shape=shape, dtype=dtype, read_all=partial(_read, folder / file_name, name))
                continue
            first, count = rows[name]
            whole_shape = torch.Size((count, *shape[1:]))
            piece = Piece(first, first + shape[0], partial(_read_rows, folder / file_name, name))
            pieces.setdefault(name, []).append((piece, count, whole_shape, dtype))
    return wholes | {name: _join(name, parts) for name, parts in pieces.items()}


def _read(path: Path, name: str) -> Tensor:
    """Return a tensor in a memory map of its own, so that the process has no more of the file in memory."""
    handle: Any = safe_open(path, framework="pt", device="cpu")
    return handle.get_tensor(name)


def _read_rows(path: Path, name: str, start: int, stop: int) -> Tensor:
    handle: Any = safe_open(path, framework="pt", device="cpu")
    return handle.get_slice(name)[start:stop]


def _join(name: str, parts: list[tuple[Piece, int, torch.Size, torch.dtype]]) -> SavedTensor:
    """Return a tensor of several files, whose rows follow each other without a gap."""
    parts.sort(key=lambda part: part[0].first)
    edges = [0, *(piece.stop for piece, *_ in parts)]
    starts = [*(piece.first for piece, *_ in parts), parts[0][1]]
    if edges != starts or len({part[1:] for part in parts}) > 1:
        raise ValueError(f"rows of {name} are missing")
    return SavedTensor(shape=parts[0][2], dtype=parts[0][3], pieces=[piece for piece, *_ in parts])


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
