"""Open and write safetensors files. Tensors stay in the memory map until they are used."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitral.errors import WeightsError
from vitral.files import atomic_path
from vitral.weights.formats.tensor_file import TensorFile

_MAPPED_BYTES = 2**24
"""Bytes that are read through one memory map. A caller that keeps parts of the tensors has no more of it in memory."""


def open_safetensors(path: Path) -> TensorFile:
    """Return the tensors of a safetensors file, or raise WeightsError if its header is damaged."""
    try:
        handle, size = safe_open(path, framework="pt", device="cpu"), 0
        shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    except SafetensorError as error:
        problem = f"{path} is a damaged or truncated safetensors file: {error}."
        raise WeightsError(problem, hint="Download or copy it again.") from error

    def read(name: str) -> Tensor:
        nonlocal handle, size
        try:
            if size > _MAPPED_BYTES:
                handle, size = safe_open(path, framework="pt", device="cpu"), 0
            tensor = handle.get_tensor(name)
            size += tensor.nbytes
            return tensor
        except (SafetensorError, RuntimeError, OSError) as error:
            raise WeightsError(f"{path}: cannot read tensor {name!r}: {error}.") from error

    return TensorFile(path=path, format="safetensors", shapes=shapes, read=read, metadata=dict(handle.metadata() or {}))


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file atomically."""
    with atomic_path(path) as temporary:
        save_file(dict(tensors), temporary, metadata=metadata)


_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
}  # fmt: skip


def stream_safetensors(
    path: Path,
    layout: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    metadata: Callable[[], dict[str, str]],
) -> None:
    """Write a safetensors file atomically, tensor by tensor, so that no more than one is ever in memory.

    ``layout`` has tensors of the same names, dtypes and shapes, such as those on the meta device. ``metadata`` is
    called before and after the tensors are written and returns texts of the same length, such as a checksum.
    """
    order = sorted(layout, key=lambda name: (-layout[name].element_size(), name))  # aligned, as the library sorts them
    starts, end = {}, 0
    for name in order:
        starts[name], end = end, end + layout[name].numel() * layout[name].element_size()

    def header() -> bytes:
        entries = {
            name: {
                "dtype": _DTYPES[layout[name].dtype],
                "shape": list(layout[name].shape),
                "data_offsets": [
                    starts[name],
                    starts[name] + layout[name].numel() * layout[name].element_size(),
                ],
            }
            for name in order
        }
        text = json.dumps({"__metadata__": metadata(), **entries}).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    with atomic_path(path) as temporary, temporary.open("wb") as stream:
        first = len(header())
        stream.truncate(first + end)
        for name, tensor in tensors:
            stream.seek(first + starts[name])
            stream.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        stream.seek(0)
        stream.write(header())
