"""Open and write NumPy's npz files: zip archives that can lie about sizes, repeat names and contain pickles.

Everything that a file declares is checked before any array is read.
"""

import zlib
from collections.abc import Mapping
from math import prod
from pathlib import Path
from zipfile import BadZipFile, ZipFile, ZipInfo

import numpy as np
import torch
from torch import Tensor

from vitral.errors import WeightsError
from vitral.files import atomic_path
from vitral.weights.formats.tensor_file import SAFE_FORMATS, Shape, TensorFile

MAX_MEMBERS = 100_000
MAX_NAME_LENGTH = 500
MAX_INFLATION = 20
"""Weights hardly compress; a decompression bomb inflates a thousandfold."""
_ALWAYS_ALLOWED_BYTES = 64 * 2**20
_HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def open_npz(path: Path) -> TensorFile:
    """Return the arrays of an npz file as tensors, or raise WeightsError if the file is damaged or hostile."""
    with ZipFile(path) as archive:
        members = archive.infolist()
        _check_members(path, members)
        arrays = {info.filename.removesuffix(".npy"): (info, *_read_header(path, archive, info)) for info in members}

    def read(name: str) -> Tensor:
        info, shape, dtype, is_fortran, start = arrays[name]
        try:
            with ZipFile(path) as archive, archive.open(info) as stream:
                stream.read(start)
                content = bytearray(stream.read())
        except (BadZipFile, OSError, EOFError, ValueError, zlib.error) as error:
            raise WeightsError(f"{path}: array {name!r} is damaged: {error}.") from error
        if len(content) != prod(shape) * dtype.itemsize:
            raise WeightsError(f"{path}: array {name!r} is truncated.")
        return _as_tensor(content, shape, dtype, is_fortran)

    return TensorFile(path=path, format="npz", shapes={name: entry[1] for name, entry in arrays.items()}, read=read)


def _check_members(path: Path, members: list[ZipInfo]) -> None:
    names = [info.filename for info in members]
    size = path.stat().st_size
    if len(names) > MAX_MEMBERS:
        raise WeightsError(f"{path} contains {len(names):,} arrays (expected at most {MAX_MEMBERS:,}).")
    for name in names:
        parts = name.replace("\\", "/").split("/")
        if ".." in parts or name.startswith(("/", "\\")) or ":" in parts[0] or len(name) > MAX_NAME_LENGTH:
            raise WeightsError(f"{path} contains a member named {name[:80]!r}, which points outside the file.")
        if not name.endswith(".npy"):
            hint = f"vitral reads {SAFE_FORMATS}."
            raise WeightsError(f"{path} contains {name!r}, which is not an array.", hint=hint)
    if len(set(names)) != len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise WeightsError(f"{path} contains {duplicate!r} twice.")
    if any(info.flag_bits & 1 for info in members):
        raise WeightsError(f"{path} is encrypted.")
    inflated = sum(info.file_size for info in members)
    is_bomb = inflated > max(_ALWAYS_ALLOWED_BYTES, MAX_INFLATION * size)
    if is_bomb or sum(info.compress_size for info in members) > size:
        raise WeightsError(
            f"{path} has {size:,} bytes but claims to contain {inflated:,}: it is a decompression bomb, or damaged."
        )


def _read_header(path: Path, archive: ZipFile, info: ZipInfo) -> tuple[Shape, np.dtype, bool, int]:
    """Return shape, dtype, whether the order is Fortran's, and the offset of the data."""
    try:
        with archive.open(info) as stream:
            version = np.lib.format.read_magic(stream)
            if version not in _HEADER_READERS:
                raise ValueError(f"format version {version} is not supported")
            shape, is_fortran, dtype = _HEADER_READERS[version](stream)
            start = stream.tell()
    except Exception as error:  # headers are Python literals, and hostile ones raise almost anything
        raise WeightsError(f"{path}: {info.filename!r} is not a NumPy array: {str(error)[:200]}.") from error
    if dtype.hasobject:
        problem = f"{path}: {info.filename!r} contains pickled Python objects, which can run code."
        raise WeightsError(problem, hint=f"vitral reads {SAFE_FORMATS}.")
    if (dtype.kind not in "fiub" or dtype.itemsize > 8) and dtype.str != "|V2":
        raise WeightsError(f"{path}: {info.filename!r} has dtype {dtype}; expected numbers.")
    if any(side < 0 for side in shape) or prod(shape) * dtype.itemsize != info.file_size - start:
        raise WeightsError(
            f"{path}: {info.filename!r} declares shape {shape} of {dtype}, but has {info.file_size - start:,} bytes."
        )
    return shape, dtype, is_fortran, start


def _as_tensor(content: bytearray, shape: Shape, dtype: np.dtype, is_fortran: bool) -> Tensor:
    is_bfloat16 = dtype.str == "|V2"  # JAX writes bfloat16, which NumPy does not have, as two opaque bytes
    array = np.frombuffer(content, dtype=np.int16 if is_bfloat16 else dtype)
    array = array.astype(array.dtype.newbyteorder("="), copy=False).reshape(shape, order="F" if is_fortran else "C")
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor


def write_npz(tensors: Mapping[str, Tensor], path: Path, prefix: str = "") -> None:
    """Write an uncompressed npz file atomically, as NumPy's savez does."""
    with atomic_path(path) as temporary, ZipFile(temporary, "w") as archive:
        for name, tensor in tensors.items():
            is_bfloat16 = tensor.dtype == torch.bfloat16
            array = tensor.view(torch.int16).numpy().view("V2") if is_bfloat16 else tensor.numpy()
            with archive.open(f"{prefix}{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, array, allow_pickle=False)
