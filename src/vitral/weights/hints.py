"""What other people's layouts have no place for, kept in a safetensors' metadata: their readers pass over it, ours does
not have to guess."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.errors import ConfigError, WeightsError
from vitral.model.config import ViTConfig
from vitral.preprocess import Preprocess
from vitral.weights.content import Content
from vitral.weights.describe import config_as_dict, config_from
from vitral.weights.files import TensorFile, written_aside

KEY = "vitral.hints"


def read_hints(file: TensorFile) -> tuple[ViTConfig, Preprocess, tuple[str, ...] | None] | None:
    if KEY not in file.metadata:
        return None
    try:
        told = json.loads(file.metadata[KEY])
        labels = told.get("labels")
        return (
            config_from(told["config"], len(file.shapes)),
            Preprocess(**told["preprocess"]),
            None if labels is None else tuple(map(str, labels)),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        raise WeightsError(f"{file.path}: its metadata {KEY!r} are damaged: {error}.") from error


def write_state(
    content: Content, tensors: Mapping[str, Tensor], path: Path, implied: Mapping[str, Any], *, hints: bool = True
) -> None:
    """A bare state dict, as safetensors or, by the suffix, as torch.save writes it.

    Only safetensors has room for hints, so what the layout does not imply is refused elsewhere."""
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        told = {
            "config": config_as_dict(content.config),
            "preprocess": content.preprocess.as_dict(),
            "labels": content.labels,
        }
        metadata = {"format": "pt"} | ({KEY: json.dumps(told, ensure_ascii=False)} if hints else {})
        with written_aside(path) as aside:
            save_file(dict(tensors), aside, metadata=metadata)
        return
    if path.suffix not in (".pth", ".pt", ".bin"):
        raise WeightsError(
            f"{path} names no format that {content.dialect} checkpoints come in.",
            hint="Let it end in .safetensors or .pth.",
        )
    for name, value in implied.items():
        if (seen := getattr(content.config, name)) != value:
            raise WeightsError(
                f"A {path.suffix} file cannot say {name}={seen!r}, and {content.dialect} means {value!r}.",
                hint="Write .safetensors, whose metadata can.",
            )
    with written_aside(path) as aside:
        torch.save(dict(tensors), aside)
