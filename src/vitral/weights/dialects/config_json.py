"""The description of a network as plain JSON values, and back."""

from dataclasses import asdict
from typing import Any

from vitral.errors import ConfigError
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ConvStem, ResNetStem, Stem, ViTConfig, check_field_names

MOST_PATCHES = 10**8
_STEMS = {"resnet": ResNetStem, "convolutions": ConvStem}


def config_as_dict(config: ViTConfig | BiTConfig) -> dict[str, Any]:
    fields = asdict(config)
    if isinstance(config, BiTConfig):
        return {"family": "bit", **fields}
    for kind, stem in _STEMS.items():
        if isinstance(config.stem, stem):
            fields["stem"] = {"kind": kind, **fields["stem"]}
    return fields


def config_from(fields: dict[str, Any], tensors: int) -> ViTConfig | BiTConfig:
    """``tensors`` is how many the file holds: one that describes more layers than that lies."""
    if fields.get("family") == "bit":
        return _baseline_from({name: value for name, value in fields.items() if name != "family"}, tensors)
    check_field_names(fields)
    stem = fields.get("stem")
    if stem is not None:
        stem = stem_from(stem)
    config = ViTConfig(**{**fields, "stem": stem})
    layers = config.blocks + (sum(stem.stages) if isinstance(stem, ResNetStem) else 0)
    if layers > tensors or config.table_grid[0] * config.table_grid[1] > MOST_PATCHES:
        grid = " x ".join(map(str, config.table_grid))
        raise ConfigError(f"{layers:,} layers and a grid of {grid} are described, and {tensors} tensors are there.")
    return config


def stem_from(fields: dict[str, Any]) -> Stem:
    return _STEMS[fields["kind"]](**{name: value for name, value in fields.items() if name != "kind"})


def _baseline_from(fields: dict[str, Any], tensors: int) -> BiTConfig:
    check_field_names(fields, of=BiTConfig)
    config = BiTConfig(**fields)
    if config.blocks > tensors:
        raise ConfigError(f"{config.blocks:,} units are described, and {tensors} tensors are there.")
    return config
