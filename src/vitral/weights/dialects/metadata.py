"""Model descriptions as JSON in the metadata of a safetensors file.

Our own format stores them under "vitral". In other dialects "vitral.hints" stores what their layout has no room for:
other readers skip it, and ours does not have to guess.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.errors import ConfigError, WeightsError, check_field_names, short_repr
from vitral.files import atomic_path
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ConvStem, ResNetStem, Stem, ViTConfig
from vitral.preprocess import Preprocess
from vitral.weights.dialects.content import Content
from vitral.weights.dialects.plan import Config, ModelSpec
from vitral.weights.formats.safetensors import write_safetensors
from vitral.weights.formats.tensor_file import TensorFile, parse_json

KEY = "vitral.hints"
_STEMS = {"resnet": ResNetStem, "convolutions": ConvStem}


def config_as_dict(config: Config) -> dict[str, Any]:
    """Return a config as plain JSON values."""
    fields = asdict(config)
    if isinstance(config, BiTConfig):
        return {"family": "bit", **fields}
    for kind, stem in _STEMS.items():
        if isinstance(config.stem, stem):
            fields["stem"] = {"kind": kind, **fields["stem"]}
    return fields


def config_from_dict(fields: dict[str, Any], tensors: int) -> Config:
    """Return the config that ``config_as_dict`` wrote; raise ConfigError if it needs more than so many tensors."""
    if fields.get("family") == "bit":
        fields = {name: value for name, value in fields.items() if name != "family"}
        check_field_names(fields, of=BiTConfig)
        config: Config = BiTConfig(**fields)
        layers = config.blocks
    else:
        check_field_names(fields, of=ViTConfig)
        if fields.get("position") in ("none", "relative"):  # older files may have a value that has no effect
            fields = {name: value for name, value in fields.items() if name != "position_resample"}
        stem = fields.get("stem")
        config = ViTConfig(**{**fields, "stem": None if stem is None else stem_from_dict(stem)})
        layers = config.blocks + (sum(config.stem.stages) if isinstance(config.stem, ResNetStem) else 0)
    if layers > tensors:
        raise ConfigError(f"its config has {layers:,} layers, but the file has {tensors} tensors")
    return config


def stem_from_dict(fields: dict[str, Any]) -> Stem:
    """Return the stem that ``config_as_dict`` wrote."""
    return _STEMS[fields["kind"]](**{name: value for name, value in fields.items() if name != "kind"})


def spec_as_dict(content: Content) -> dict[str, Any]:
    """Return everything but the tensors as plain JSON values."""
    return {
        "config": config_as_dict(content.network),
        "preprocess": content.preprocess.as_dict(),
        "labels": content.labels,
        "multi_label": content.multi_label,
        "assumed": list(content.assumed),
    }


def spec_from_dict(fields: dict[str, Any], file: TensorFile) -> ModelSpec:
    """Return the description that ``spec_as_dict`` wrote, or raise WeightsError if it is damaged."""
    try:
        config = config_from_dict(fields["config"], len(file.shapes))
        labels = fields.get("labels")
        if labels is not None:
            _check_labels(labels, config.num_classes)
        assumed = [str(sentence) for sentence in fields.get("assumed") or ()]
        return ModelSpec(
            config=config,
            preprocess=Preprocess(**fields["preprocess"]),
            labels=None if labels is None else tuple(labels),
            multi_label=fields.get("multi_label") is True,
            assumed={_topic(sentence): sentence for sentence in assumed},
        )
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, ConfigError) as error:
        reason = str(error)[:300].rstrip(".")
        raise WeightsError(f"{file.name}: the model description in its metadata is damaged: {reason}.") from error


def _check_labels(labels: object, classes: int) -> None:
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise ConfigError(f"labels must be a list of strings (got {short_repr(labels)})")
    if len(labels) != classes:
        raise ConfigError(f"it has {len(labels)} labels for {classes} classes")


def _topic(sentence: str) -> str:
    """Return the field that an assumption is about: heads for "heads=3: ..."."""
    word = sentence.split(":")[0].split("=")[0].strip()
    return "preprocess" if word == "preprocessing" else word


def read_hints(file: TensorFile) -> ModelSpec | None:
    """Return the description in the metadata of another dialect, or None."""
    if KEY not in file.metadata:
        return None
    return spec_from_dict(parse_json(file.metadata[KEY], f"{file.name}: its metadata {KEY!r}"), file)


def write_state(content: Content, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a state dict: as safetensors with hints, or with torch.save for another suffix."""
    if path.suffix == ".safetensors":
        hints = json.dumps(spec_as_dict(content), ensure_ascii=False)
        write_safetensors(path, tensors, {"format": "pt", KEY: hints})
        return
    with atomic_path(path) as temporary:
        torch.save(dict(tensors), temporary)
