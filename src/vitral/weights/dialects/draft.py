"""Draft: a checkpoint as its dialect understands it, before any number is read. Told is the part of it that is not in
the tensors: the file says it, or it was found out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitral.errors import WeightsError
from vitral.model.config import ViTConfig
from vitral.model.network import Config
from vitral.preprocess import Preprocess
from vitral.weights.dialects.rules import Rule
from vitral.weights.formats.tensor_file import TensorFile

Asked = dict[str, Any]
"""The fields of ViTConfig that the caller set."""


@dataclass(frozen=True, kw_only=True)
class Told:
    config: Config
    """The network that the file holds."""
    preprocess: Preprocess
    labels: tuple[str, ...] | None = None
    multi_label: bool = False
    assumed: Mapping[str, str] = field(default_factory=dict)
    """What the file does not tell: the field, or "preprocess", and a sentence."""

    @property
    def vit(self) -> ViTConfig:
        """For the dialects that hold nothing else."""
        if not isinstance(self.config, ViTConfig):
            raise WeightsError("The description in this file is of a BiT, and its tensors are those of a ViT.")
        return self.config


@dataclass(frozen=True, kw_only=True)
class Draft(Told):
    dialect: str
    file: TensorFile
    """Without the prefixes that the dialect took off."""
    rules: Sequence[Rule]
    ignored: Mapping[str, str] = field(default_factory=dict)
    keeps_dtype: bool = False


def refuse(dialect: str, reason: str) -> WeightsError:
    return WeightsError(f"This {dialect} checkpoint cannot be represented: {reason}.")
