"""Draft: a checkpoint as its dialect understands it, before any number is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitral.errors import WeightsError
from vitral.model.config import ViTConfig
from vitral.preprocess import Preprocess
from vitral.weights.files import TensorFile
from vitral.weights.rules import Rule

Asked = dict[str, Any]
"""The fields of ViTConfig that the caller set."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    dialect: str
    file: TensorFile
    """Without the prefixes that the dialect took off."""
    config: ViTConfig
    """The network that the file holds."""
    rules: Sequence[Rule]
    preprocess: Preprocess
    labels: tuple[str, ...] | None = None
    multi_label: bool = False
    ignored: Mapping[str, str] = field(default_factory=dict)
    assumed: Mapping[str, str] = field(default_factory=dict)
    """What the file does not tell: the field, or "preprocess", and a sentence."""
    keeps_dtype: bool = False


def refuse(dialect: str, reason: str) -> WeightsError:
    return WeightsError(f"This {dialect} checkpoint cannot be represented: {reason}.")


def check_holds(config: ViTConfig, dialect: str, **holds: tuple[Any, ...]) -> None:
    """Refuses to write what a dialect has no place for; ``holds`` gives the values it can hold of each field."""
    for name, allowed in holds.items():
        value = config.has_class_token if name == "class_token" else getattr(config, name)
        if value not in allowed:
            choices = " or ".join(repr(choice) for choice in allowed)
            raise WeightsError(
                f"The {dialect} layout cannot hold {name}={value!r}; it has {choices}.",
                hint="Our own format holds everything.",
            )
