"""A ViTConfig as plain JSON values, and back."""

from dataclasses import asdict
from typing import Any

from vitral.errors import ConfigError
from vitral.model.config import ConvStem, ResNetStem, ViTConfig, check_field_names

MOST_PATCHES = 10**8
_STEMS = {"resnet": ResNetStem, "convolutions": ConvStem}


def config_as_dict(config: ViTConfig) -> dict[str, Any]:
    fields = asdict(config)
    for kind, stem in _STEMS.items():
        if isinstance(config.stem, stem):
            fields["stem"] = {"kind": kind, **fields["stem"]}
    return fields


def config_from(fields: dict[str, Any], tensors: int) -> ViTConfig:
    """``tensors`` is how many the file holds: one that describes more layers than that lies."""
    check_field_names(fields)
    stem = fields.get("stem")
    if stem is not None:
        stem = _STEMS[stem["kind"]](**{name: value for name, value in stem.items() if name != "kind"})
    config = ViTConfig(**{**fields, "stem": stem})
    layers = config.blocks + (sum(stem.stages) if isinstance(stem, ResNetStem) else 0)
    if layers > tensors or config.table_grid[0] * config.table_grid[1] > MOST_PATCHES:
        grid = " x ".join(map(str, config.table_grid))
        raise ConfigError(f"{layers:,} layers and a grid of {grid} are described, and {tensors} tensors are there.")
    return config
