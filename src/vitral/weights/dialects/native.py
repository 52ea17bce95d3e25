"""Our own format: one safetensors file whose metadata store config, preprocessing, labels and provenance.

The metadata have one key, ``vitral``, which holds JSON. Its ``sha256`` covers names, dtypes, shapes and values of all
tensors.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral import __version__
from vitral.errors import WeightsError, short_repr
from vitral.preprocess import Preprocess
from vitral.weights.dialects.content import Content
from vitral.weights.dialects.metadata import spec_as_dict, spec_from_dict
from vitral.weights.dialects.plan import Config, LoadPlan, ModelSpec, Overrides
from vitral.weights.dialects.rules import rule
from vitral.weights.formats.safetensors import write_safetensors
from vitral.weights.formats.tensor_file import TensorFile, parse_json

KEY = "vitral"
CUSTOM_KEY = "vitral.custom"
"""Metadata of a training run with a network class of the caller's own: the name of the class."""
FORMAT_VERSION = 1
PREPROCESS = "preprocessing: mean and std 0.5, squash to the size; a state dict does not state it"


def recognizes(file: TensorFile) -> bool:
    """Return whether the metadata are ours."""
    return KEY in file.metadata


def plan(file: TensorFile, overrides: Overrides) -> LoadPlan:
    """Return the plan that the metadata describe."""
    spec = spec_from_dict(read_metadata(file), file)
    rules = [rule(name, name) for name in file.shapes]
    return LoadPlan(dialect="native", file=file, spec=spec, rules=rules, keeps_dtype=True)


def has_our_names(file: TensorFile) -> bool:
    """Return whether a state dict without metadata has the tensor names of our networks."""
    return "norm.weight" in file.shapes and ("patches.project.weight" in file.shapes or "root.weight" in file.shapes)


def plan_state_dict(file: TensorFile, config: Config) -> LoadPlan:
    """Return the plan for a state dict of our own names, whose config the caller passed."""
    preprocess = Preprocess(size=config.image_hw).with_channels(config.channels)
    spec = ModelSpec(config=config, preprocess=preprocess, assumed={"preprocess": PREPROCESS})
    rules = [rule(name, name) for name in file.shapes]
    return LoadPlan(dialect="native", file=file, spec=spec, rules=rules, keeps_dtype=True)


def read_metadata(file: TensorFile) -> dict[str, Any]:
    """Return our metadata, or raise WeightsError if they are damaged or of a later version."""
    metadata = parse_json(file.metadata[KEY], f"{file.name}: its metadata {KEY!r}")
    version = metadata.get("format")
    if type(version) is not int or version < 1:
        raise WeightsError(f"{file.name}: its metadata have no format version (got {short_repr(version)}).")
    if version > FORMAT_VERSION:
        raise WeightsError(
            f"{file.name} has format version {version}; this vitral reads up to {FORMAT_VERSION}.",
            hint="Run: pip install --upgrade vitral",
        )
    return metadata


def write(content: Content, path: Path) -> list[str]:
    """Write our own format."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in content.state.items()}
    metadata = {
        "format": FORMAT_VERSION,
        **spec_as_dict(content),
        "provenance": {"vitral": __version__, "torch": torch.__version__, **content.provenance},
        "sha256": checksum(state),
    }
    write_safetensors(path, state, {KEY: json.dumps(metadata, ensure_ascii=False)})
    return []


def checksum(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of all tensors in the order of names: name, dtype, shape, values."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def has_valid_checksum(file: TensorFile) -> bool:
    """Return whether the tensors match the checksum that was written with them."""
    return checksum({name: file.read(name) for name in file.shapes}) == read_metadata(file).get("sha256")
