"""Open any checkpoint by its content, never by its suffix. Nothing in a file is executed."""

import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from torch import Tensor

from vitral.errors import WeightsError, short_repr
from vitral.weights.formats.npz import open_npz
from vitral.weights.formats.pickle import open_pickle
from vitral.weights.formats.safetensors import open_safetensors
from vitral.weights.formats.tensor_file import SAFE_FORMATS, TensorFile, read_json

_SIDECARS = ("config.json", "preprocessor_config.json")
_FOREIGN = {
    b"\x93NUMPY": "is a single NumPy array, not a checkpoint",
    b"\x89HDF": "is an HDF5 file, as Keras writes it",
    b"GGUF": "is a GGUF file",
    b"\x08": "seems to be an ONNX model, which does not keep the names of its weights",
    b"version https://": "is a Git LFS pointer; the weights themselves were not downloaded",
    b"<": "is a web page; the download returned an error page",
}


def open_tensors(path: Path) -> TensorFile:
    """Return the tensors of a file or of the checkpoint in a folder, or raise WeightsError."""
    try:
        if path.is_dir():
            return _open_folder(path)
        if not path.is_file():
            raise WeightsError(f"{path} is not a regular file." if path.exists() else f"File not found: {path}.")
        file = _open_file(path)
    except OSError as error:
        raise WeightsError(f"Cannot read {path}: {error.strerror or error}.") from error
    is_native = "vitral" in file.metadata
    return file if is_native or path.suffix == ".npz" else replace(file, sidecars=_read_sidecars(path.parent))


def open_state_dict(state: Mapping[str, Tensor]) -> TensorFile:
    """Return the tensors of a state dict in memory; each is copied when it is read."""
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            entry = f"{short_repr(name)}: {type(tensor).__name__}"
            raise WeightsError(f"A state dict maps names to tensors (got {entry}).", hint="Pass model.state_dict().")
    return TensorFile(
        path=None,
        format="memory",
        shapes={name: tuple(tensor.shape) for name, tensor in state.items()},
        read=lambda name: state[name].detach().to("cpu", copy=True),
    )


def _open_file(path: Path) -> TensorFile:
    with path.open("rb") as stream:
        start = stream.read(16)
    if start[:4] == b"PK\x03\x04":
        return _open_archive(path)
    if len(start) > 8 and start[8:9] == b"{":
        return open_safetensors(path)
    if start[:1] == b"\x80":
        return open_pickle(path)
    problems = (words for magic, words in _FOREIGN.items() if start.startswith(magic))
    problem = next(problems, "is not a checkpoint format that vitral reads, or its start is missing")
    raise WeightsError(f"{path} {problem if start else 'is empty'}.", hint=f"vitral reads {SAFE_FORMATS}.")


def _open_archive(path: Path) -> TensorFile:
    try:
        with ZipFile(path) as archive:
            names = [info.filename for info in archive.infolist()]
    except (BadZipFile, struct.error, NotImplementedError, ValueError) as error:
        raise WeightsError(f"{path} is truncated or damaged: {error}.", hint="Download or copy it again.") from error
    hint = f"Use its weights instead: {SAFE_FORMATS}."
    if any(name.endswith(("models/model.json", "archive_format")) for name in names):
        raise WeightsError(f"{path} is an exported program (.pt2); opening one can run code.", hint=hint)
    if any(name.endswith("constants.pkl") or "/code/" in name for name in names):
        raise WeightsError(f"{path} is a TorchScript program, which contains code.", hint=hint)
    if any(name.endswith("data.pkl") for name in names):
        return open_pickle(path)
    return open_npz(path)


def _open_folder(folder: Path) -> TensorFile:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return open_tensors(folder / name)
        if (folder / f"{name}.index.json").is_file():
            return _open_shards(folder, name)
    candidates = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".npz", ".pth", ".pt"))
    if len(candidates) == 1:
        return open_tensors(candidates[0])
    if candidates:
        names = ", ".join(path.name for path in candidates[:5])
        raise WeightsError(f"{folder} contains several checkpoints: {names}.", hint="Pass the path of one of them.")
    raise WeightsError(f"{folder} contains no checkpoint (expected model.safetensors or one weights file).")


def _open_shards(folder: Path, name: str) -> TensorFile:
    """Return the tensors of a checkpoint that an index splits into several files, as on the Hugging Face hub."""
    index_path = folder / f"{name}.index.json"
    index = read_json(index_path).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(shard, str) for shard in index.values()):
        raise WeightsError(f"{index_path} has no weight_map from tensor names to file names.")
    if outside := [shard for shard in index.values() if Path(shard).name != shard]:
        raise WeightsError(f"{index_path} names a file outside its folder: {short_repr(outside[0])}.")
    shards = {shard: open_tensors(folder / shard) for shard in sorted(set(index.values()))}
    for tensor, shard in index.items():
        if tensor not in shards[shard].shapes:
            raise WeightsError(f"{folder / shard} has no tensor {tensor!r}, although {index_path.name} lists it.")
    return TensorFile(
        path=folder,
        format=next(iter(shards.values())).format,
        shapes={tensor: shards[shard].shapes[tensor] for tensor, shard in index.items()},
        read=lambda tensor: shards[index[tensor]].read(tensor),
        sidecars=_read_sidecars(folder),
    )


def _read_sidecars(folder: Path) -> dict[str, dict[str, Any]]:
    return {name: read_json(folder / name) for name in _SIDECARS if (folder / name).is_file()}
