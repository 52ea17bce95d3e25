"""Open and write safetensors files. Tensors stay in the memory map until they are used."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitral.errors import WeightsError
from vitral.files import atomic_path
from vitral.weights.formats.tensor_file import TensorFile


def open_safetensors(path: Path) -> TensorFile:
    """Return the tensors of a safetensors file, or raise WeightsError if its header is damaged."""
    try:
        handle = safe_open(path, framework="pt", device="cpu")
        shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    except SafetensorError as error:
        problem = f"{path} is a damaged or truncated safetensors file: {error}."
        raise WeightsError(problem, hint="Download or copy it again.") from error

    def read(name: str) -> Tensor:
        try:
            return handle.get_tensor(name)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise WeightsError(f"{path}: cannot read tensor {name!r}: {error}.") from error

    return TensorFile(path=path, format="safetensors", shapes=shapes, read=read, metadata=dict(handle.metadata() or {}))


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file atomically."""
    with atomic_path(path) as temporary:
        save_file(dict(tensors), temporary, metadata=metadata)
