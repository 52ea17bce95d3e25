"""What torch.save writes, read without trust: a pickle is a program, so it is looked through before it runs.

First the list of everything the pickle names is compared with what a state dict needs, and what it declares with the
size of the file; only then torch.load reads it, with weights_only.
"""

import pickletools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch import Tensor

from vitral.errors import WeightsError, first_line
from vitral.weights.formats.tensor_file import SAFE_FORMATS, TensorFile

_ALLOWED = {"collections OrderedDict", "collections defaultdict", "builtins dict", "__builtin__ dict"} | {
    f"torch._utils {name}"
    for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_parameter_with_state")
}
_STORAGES = frozenset(
    f"torch {kind}Storage"
    for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
) | {"torch.storage UntypedStorage", "torch.storage TypedStorage"}
# Where training scripts put the weights, averaged ones first, as timm takes them.
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "teacher", "student", "module", "params")


def open_pickled(path: Path) -> TensorFile:
    is_archive = _look_through(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except Exception as error:  # of an unpickler that reads what it likes
        raise WeightsError(f"{path} cannot be read as a plain state dict: {first_line(error)}") from error
    tensors, ignored, notes = _find_tensors(path, content)
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise WeightsError(f"{path}: tensor {name!r} claims shape {tuple(tensor.shape)}, more than it stores.")
    return TensorFile(
        path=path,
        format="torch",
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        read=lambda name: tensors[name].detach(),
        ignored=ignored,
        notes=notes,
    )


def _look_through(path: Path) -> bool:
    """Refuses what is no plain state dict; True for the zip format of torch 1.6 and later."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        is_archive = stream.read(2) == b"PK"
        stream.seek(0)
        try:
            if is_archive:
                with ZipFile(path) as archive:
                    _check_stored(path, archive, size)
                    (program,) = (info for info in archive.infolist() if info.filename.endswith("data.pkl"))
                    with archive.open(program) as opened:
                        _check_program(path, opened, size)
            else:
                for _ in range(5):  # magic number, version, system, the state dict, the keys of the storages
                    _check_program(path, stream, size)
        except (ValueError, BadZipFile, EOFError, KeyError, UnicodeDecodeError, NotImplementedError) as error:
            raise WeightsError(f"{path} is cut off, damaged or no state dict: {error}.") from error
    return is_archive


def _check_stored(path: Path, archive: ZipFile, size: int) -> None:
    for info in archive.infolist():
        if info.compress_type != ZIP_STORED:
            raise WeightsError(f"{path}: member {info.filename!r} is compressed, which torch.save never does.")
    if sum(info.file_size for info in archive.infolist()) > size:
        raise WeightsError(f"{path} claims to hold more than its {size:,} bytes.")


def _check_program(path: Path, stream: BinaryIO | Any, size: int) -> None:
    declared: dict[object, int] = {}
    for opcode, argument, recent in _operations(stream):
        if opcode in ("GLOBAL", "INST"):
            if argument not in _ALLOWED and argument not in _STORAGES:
                raise WeightsError(
                    f"{path} asks for {str(argument).replace(' ', '.')}, which a state dict has no need of: it may run "
                    "code, and was not opened.",
                    hint=f"Save the state dict alone, or ask for {SAFE_FORMATS}.",
                )
        elif opcode in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            raise WeightsError(
                f"{path} uses {opcode} of a newer pickle protocol, and was not opened.",
                hint=f"Save the state dict with torch.save's default protocol, or ask for {SAFE_FORMATS}.",
            )
        elif opcode == "BINPERSID":  # a storage: ..., key, device, number of items
            key, _, items = recent[-3:]
            declared[key] = items if isinstance(items, int) else size + 1
    if sum(declared.values()) > size:
        raise WeightsError(f"{path} declares {sum(declared.values()):,} numbers and has only {size:,} bytes.")


def _operations(stream: BinaryIO) -> Iterator[tuple[str, Any, list[object]]]:
    """Each operation with its argument, and the words and numbers that were put on the stack last."""
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
    """The state dict itself or, where a training script wrapped it, the one inside."""
    ignored: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    for _ in range(4):
        if not isinstance(content, Mapping):
            break
        key = next((key for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if key is None:
            break
        ignored |= {str(other): f"beside {key!r}, which holds the weights" for other in content if other != key}
        notes = (*notes, f"The weights are those under {key!r}.") if len(content) > 1 else notes
        content = content[key]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        seen = f"keys {', '.join(map(str, list(content)[:6]))}" if isinstance(content, Mapping) else type(content)
        raise WeightsError(f"{path} holds no state dict of tensors, but {seen}.")
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    ignored |= {str(name): "no tensor" for name, value in content.items() if not isinstance(value, Tensor)}
    return tensors, ignored, notes
