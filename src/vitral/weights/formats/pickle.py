"""Open files written by torch.save. A pickle is a program, so it is checked before torch runs it.

The check compares every global that the pickle names with those that a state dict needs, and the sizes that it
declares with the size of the file. Only then torch.load reads it, with weights_only.
"""

import pickletools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch import Tensor

from vitral.errors import WeightsError, first_line
from vitral.weights.formats.tensor_file import SAFE_FORMATS, TensorFile

_TENSOR_BUILDERS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_parameter_with_state")
_ITEM_TYPES = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_ALLOWED = {
    *("collections OrderedDict", "collections defaultdict", "builtins dict", "__builtin__ dict"),
    *("torch.storage UntypedStorage", "torch.storage TypedStorage"),
    *(f"torch._utils {name}" for name in _TENSOR_BUILDERS),
    *(f"torch {name}Storage" for name in _ITEM_TYPES),
}
# Keys under which training scripts store the weights: averaged ones first, as in timm.
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "teacher", "student", "module", "params")


def open_pickle(path: Path) -> TensorFile:
    """Return the tensors of a state dict written by torch.save, or raise WeightsError."""
    is_archive = _check_pickle(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except Exception as error:  # the unpickler raises almost anything
        raise WeightsError(f"Cannot read {path} as a state dict: {first_line(error)}.") from error
    tensors, ignored, notes = _find_tensors(path, content)
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
            claim = f"tensor {name!r} claims shape {tuple(tensor.shape)}"
            raise WeightsError(f"{path}: {claim}, which is more than it stores.")
    return TensorFile(
        path=path,
        format="torch",
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        read=lambda name: tensors[name].detach(),
        ignored=ignored,
        notes=notes,
    )


def _check_pickle(path: Path) -> bool:
    """Raise WeightsError unless the file is a plain state dict; return whether it has the zip format of torch 1.6."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        is_archive = stream.read(2) == b"PK"
        stream.seek(0)
        try:
            if is_archive:
                with ZipFile(path) as archive:
                    members = archive.infolist()
                    if packed := [info.filename for info in members if info.compress_type != ZIP_STORED]:
                        raise WeightsError(f"{path}: member {packed[0]!r} is compressed; torch.save never compresses.")
                    if sum(info.file_size for info in members) > size:
                        raise WeightsError(f"{path} claims to contain more than its {size:,} bytes.")
                    (program,) = (info for info in members if info.filename.endswith("data.pkl"))
                    with archive.open(program) as opened:
                        _check_program(path, opened, size)
            else:
                for _ in range(5):  # magic number, version, system, the state dict, the keys of the storages
                    _check_program(path, stream, size)
        except (ValueError, BadZipFile, EOFError, KeyError, UnicodeDecodeError, NotImplementedError) as error:
            raise WeightsError(f"{path} is truncated, damaged or not a state dict: {error}.") from error
    return is_archive


def _check_program(path: Path, stream: IO[bytes], size: int) -> None:
    declared: dict[object, int] = {}
    for opcode, argument, recent in _operations(stream):
        if opcode in ("GLOBAL", "INST"):
            if argument not in _ALLOWED:
                raise WeightsError(
                    f"{path} uses {str(argument).replace(' ', '.')}, which a state dict does not need and "
                    "which could run code. vitral did not open it.",
                    hint=f"Save only the state dict. vitral reads {SAFE_FORMATS}.",
                )
        elif opcode in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            hint = f"Save the state dict with torch.save's default protocol. vitral reads {SAFE_FORMATS}."
            raise WeightsError(f"{path} uses {opcode} of a newer pickle protocol. vitral did not open it.", hint=hint)
        elif opcode == "BINPERSID":  # a storage: ..., key, device, number of items
            key, _, items = recent[-3:]
            declared[key] = items if isinstance(items, int) else size + 1
    if sum(declared.values()) > size:
        raise WeightsError(f"{path} declares {sum(declared.values()):,} numbers but has only {size:,} bytes.")


def _operations(stream: IO[bytes]) -> Iterator[tuple[str, Any, list[object]]]:
    """Yield each operation with its argument, and the last three values that were pushed on the stack."""
    recent: list[object] = [None] * 3
    remembered: dict[object, object] = {}
    for operation, argument, _ in pickletools.genops(stream):
        name = operation.name
        yield name, argument, recent
        if name.endswith("PUT"):
            remembered[argument] = recent[-1]
        elif name.endswith("GET"):
            recent = [*recent[-2:], remembered.get(argument)]
        elif isinstance(argument, str | int):
            recent = [*recent[-2:], argument]


def _find_tensors(path: Path, content: object) -> tuple[dict[str, Tensor], dict[str, str], tuple[str, ...]]:
    """Return tensors, ignored content and notes of a state dict, unwrapped from what a training script saved."""
    ignored: dict[str, str] = {}
    notes: list[str] = []
    for _ in range(4):
        wrapped = content if isinstance(content, Mapping) else {}
        key = next((key for key in _WRAPPERS if isinstance(wrapped.get(key), Mapping)), None)
        if key is None:
            break
        ignored |= {str(other): f"the weights are under {key!r}" for other in wrapped if other != key}
        notes += [f"Loaded the weights under {key!r}."] if len(wrapped) > 1 else []
        content = wrapped[key]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        keys = f"keys {', '.join(map(str, list(content)[:6]))}" if isinstance(content, Mapping) else type(content)
        raise WeightsError(f"{path} does not contain a state dict of tensors (got {str(keys)[:200]}).")
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    ignored |= {str(name): "not a tensor" for name, value in content.items() if not isinstance(value, Tensor)}
    return tensors, ignored, tuple(notes)
