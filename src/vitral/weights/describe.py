"""A ViTConfig as plain JSON values, and back."""

from dataclasses import asdict
from typing import Any

from vitral.model.config import ConvStem, ResNetStem, ViTConfig, check_field_names

_STEMS = {"resnet": ResNetStem, "convolutions": ConvStem}


def config_as_dict(config: ViTConfig) -> dict[str, Any]:
    fields = asdict(config)
    for kind, stem in _STEMS.items():
        if isinstance(config.stem, stem):
            fields["stem"] = {"kind": kind, **fields["stem"]}
    return fields


def config_from(fields: dict[str, Any]) -> ViTConfig:
    check_field_names(fields)
    stem = fields.get("stem")
    if stem is not None:
        stem = _STEMS[stem["kind"]](**{name: value for name, value in stem.items() if name != "kind"})
    return ViTConfig(**{**fields, "stem": stem})
