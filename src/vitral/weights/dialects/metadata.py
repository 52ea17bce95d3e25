"""What other people's layouts have no place for, kept in a safetensors' metadata: their readers pass over it, ours does
not have to guess."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.errors import ConfigError, WeightsError
from vitral.files import atomic_path
from vitral.preprocess import Preprocess
from vitral.weights.dialects.config_json import config_as_dict, config_from
from vitral.weights.dialects.content import Content
from vitral.weights.dialects.draft import Told
from vitral.weights.formats.tensor_file import TensorFile

KEY = "vitral.hints"


def describe(content: Content) -> dict[str, Any]:
    return {
        "config": config_as_dict(content.network),
        "preprocess": content.preprocess.as_dict(),
        "labels": content.labels,
        "multi_label": content.multi_label,
        "assumed": list(content.assumed),
    }


def parse(told: Any, file: TensorFile) -> Told:
    """What ``describe`` wrote; WeightsError when it is damaged."""
    try:
        labels = told.get("labels")
        if labels is not None and not isinstance(labels, list):
            raise ConfigError("labels are no list")
        config = config_from(told["config"], len(file.shapes))
        if labels is not None and (len(labels) != config.num_classes or not all(isinstance(x, str) for x in labels)):
            raise ConfigError(f"{len(labels)} labels, each of which should be a word, for {config.num_classes} classes")
        assumed = [str(sentence) for sentence in told.get("assumed") or ()]
        return Told(
            config=config,
            preprocess=Preprocess(**told["preprocess"]),
            labels=None if labels is None else tuple(labels),
            multi_label=told.get("multi_label") is True,
            assumed={topic(sentence): sentence for sentence in assumed},
        )
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, ConfigError) as error:
        raise WeightsError(f"{file.path}: its description of the model is damaged: {error}.") from error


def topic(sentence: str) -> str:
    """What an assumption is about: heads=3: ... -> heads."""
    word = sentence.split(":")[0].split("=")[0].strip()
    return "preprocess" if word == "preprocessing" else word


def read_hints(file: TensorFile) -> Told | None:
    if KEY not in file.metadata:
        return None
    try:
        told = json.loads(file.metadata[KEY])
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file.path}: its metadata {KEY!r} are damaged: {error}.") from error
    return parse(told, file)


def write_state(content: Content, tensors: Mapping[str, Tensor], path: Path) -> None:
    """A bare state dict, by the suffix as safetensors with hints, or as torch.save writes it."""
    if path.suffix != ".safetensors":
        with atomic_path(path) as aside:
            torch.save(dict(tensors), aside)
        return
    from safetensors.torch import save_file

    metadata = {"format": "pt", KEY: json.dumps(describe(content), ensure_ascii=False)}
    with atomic_path(path) as aside:
        save_file(dict(tensors), aside, metadata=metadata)
