"""Our own format: one safetensors whose metadata says everything else: config, preprocessing, labels, provenance.

The metadata has one key, ``vitral``, which holds JSON. ``sha256`` is over names, dtypes, shapes and numbers.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral import __version__
from vitral.errors import WeightsError
from vitral.files import atomic_path
from vitral.weights.dialects.content import Content
from vitral.weights.dialects.draft import Asked, Draft
from vitral.weights.dialects.metadata import describe, parse
from vitral.weights.dialects.rules import rule
from vitral.weights.formats.tensor_file import TensorFile

KEY, FORMAT = "vitral", 1


def recognise(file: TensorFile) -> bool:
    return KEY in file.metadata


def read(file: TensorFile, asked: Asked) -> Draft:
    told = parse(read_metadata(file), file)
    rules = [rule(name, name) for name in file.shapes]
    return Draft(dialect="native", file=file, rules=rules, keeps_dtype=True, **vars(told))


def read_metadata(file: TensorFile) -> dict[str, Any]:
    try:
        told = json.loads(file.metadata[KEY])
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file.path}: its metadata are no valid JSON: {error}.") from error
    if not isinstance(told, dict) or type(told.get("format")) is not int or told["format"] < 1:
        raise WeightsError(f"{file.path}: its metadata name no format version.")
    if told["format"] > FORMAT:
        raise WeightsError(
            f"{file.path} has format version {told['format']}, and this vitral reads up to {FORMAT}.",
            hint="pip install --upgrade vitral",
        )
    return told


def write(content: Content, path: Path) -> list[str]:
    from safetensors.torch import save_file

    state = {name: tensor.detach().cpu().contiguous() for name, tensor in content.state.items()}
    described = {
        "format": FORMAT,
        **describe(content),
        "provenance": {"vitral": __version__, "torch": torch.__version__, **content.provenance},
        "sha256": checksum(state),
    }
    with atomic_path(path) as aside:
        save_file(state, aside, metadata={KEY: json.dumps(described, ensure_ascii=False)})
    return []


def checksum(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over every tensor in the order of names: name, dtype, shape, numbers."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def verify(file: TensorFile) -> bool:
    """Whether the numbers are those that were written."""
    return checksum({name: file.read(name) for name in file.shapes}) == read_metadata(file).get("sha256")
