"""Opens any checkpoint, by its content and never by its suffix, and lets nothing in it run.

safetensors    memory-mapped
npz            npz.py: NumPy arrays, checked member by member
torch.save     pickled.py: only tensors, by weights_only and a list of what may be named
folder         the checkpoint in it, with config.json and preprocessor_config.json beside it
"""

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitral.errors import WeightsError
from vitral.weights.formats.npz import open_npz
from vitral.weights.formats.pickle import open_pickled
from vitral.weights.formats.tensor_file import SAFE_FORMATS, TensorFile, read_json

_SIDECARS = ("config.json", "preprocessor_config.json")


def open_tensors(path: Path) -> TensorFile:
    """The tensors of a file or of the checkpoint in a folder; WeightsError says why not."""
    try:
        if path.is_dir():
            return _open_folder(path)
        if not path.is_file():
            raise WeightsError(f"There is no file {path}." if not path.exists() else f"{path} is not a regular file.")
        with path.open("rb") as stream:
            start = stream.read(16)
        opened = _open_by_content(path, start)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}.") from error
    is_native = "vitral" in opened.metadata
    return opened if is_native or path.suffix == ".npz" else replace(opened, beside=_sidecars(path.parent))


def _open_by_content(path: Path, start: bytes) -> TensorFile:
    if start[:4] == b"PK\x03\x04":
        return _open_archive(path)
    if len(start) > 8 and start[8:9] == b"{":
        return _open_safetensors(path)
    if start[:1] == b"\x80":
        return open_pickled(path)
    seen = "is empty" if not start else _foreign(start)
    raise WeightsError(f"{path} {seen}.", hint=f"vitral reads {SAFE_FORMATS}.")


def _foreign(start: bytes) -> str:
    known = {
        b"\x93NUMPY": "is a single NumPy array, not a checkpoint",
        b"\x89HDF": "is an HDF5 file, as Keras writes it",
        b"GGUF": "is a GGUF file",
        b"\x08": "seems to be an ONNX model, whose weights have lost their names",
        b"version https://": "is a Git LFS pointer: the weights themselves were not downloaded",
        b"<": "is a web page: the download gave an error page",
    }
    for magic, what in known.items():
        if start.startswith(magic):
            return what
    return "is no checkpoint that vitral knows, or it is cut off at the start"


def _open_archive(path: Path) -> TensorFile:
    try:
        with ZipFile(path) as archive:
            names = [info.filename for info in archive.infolist()]
    except (BadZipFile, struct.error, NotImplementedError, ValueError) as error:
        raise WeightsError(f"{path} is cut off or damaged: {error}.", hint="Download or copy it again.") from error
    if any(name.endswith(("models/model.json", "archive_format")) for name in names):
        raise WeightsError(
            f"{path} is an exported program (.pt2), and opening one can run code that is in it.",
            hint=f"Ask for its weights as {SAFE_FORMATS}.",
        )
    if any(name.endswith("constants.pkl") or "/code/" in name for name in names):
        raise WeightsError(
            f"{path} is a TorchScript program, which carries code.", hint=f"Ask for its weights as {SAFE_FORMATS}."
        )
    if any(name.endswith("data.pkl") for name in names):
        return open_pickled(path)
    return open_npz(path)


def _open_safetensors(path: Path) -> TensorFile:
    try:
        handle = safe_open(path, framework="pt", device="cpu")
        shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise WeightsError(
            f"{path} is no whole safetensors file: {error}.", hint="Download or copy it again."
        ) from error

    def read(name: str) -> Tensor:
        try:
            return handle.get_tensor(name)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise WeightsError(f"{path}: tensor {name!r} cannot be read: {error}.") from error

    return TensorFile(path=path, format="safetensors", shapes=shapes, read=read, metadata=dict(handle.metadata() or {}))


def _open_folder(folder: Path) -> TensorFile:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return open_tensors(folder / name)
        if (folder / f"{name}.index.json").is_file():
            return _open_shards(folder, name)
    candidates = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".npz", ".pth", ".pt"))
    if len(candidates) == 1:
        return open_tensors(candidates[0])
    found = f"several: {', '.join(path.name for path in candidates[:5])}" if candidates else "none"
    raise WeightsError(
        f"The folder {folder} should hold model.safetensors or one checkpoint, and holds {found}.",
        hint="Name the file itself." if candidates else None,
    )


def _open_shards(folder: Path, name: str) -> TensorFile:
    """A checkpoint in several files, as Hugging Face cuts large ones."""
    index = read_json(folder / f"{name}.index.json").get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(part, str) for part in index.values()):
        raise WeightsError(f"{folder / name}.index.json has no weight_map from tensors to files.")
    if outside := [part for part in index.values() if Path(part).name != part]:
        raise WeightsError(f"{folder / name}.index.json names a file outside its folder: {outside[0]!r}.")
    parts = {part: open_tensors(folder / part) for part in sorted(set(index.values()))}
    for tensor, part in index.items():
        if tensor not in parts[part].shapes:
            raise WeightsError(f"{folder / part} lacks tensor {tensor!r}, which the index says is there.")
    return TensorFile(
        path=folder,
        format=next(iter(parts.values())).format,
        shapes={tensor: parts[part].shapes[tensor] for tensor, part in index.items()},
        read=lambda tensor: parts[index[tensor]].read(tensor),
        beside=_sidecars(folder),
    )


def _sidecars(folder: Path) -> dict[str, dict[str, Any]]:
    return {name: read_json(folder / name) for name in _SIDECARS if (folder / name).is_file()}
