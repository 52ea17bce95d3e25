"""The plan for a file that a dialect reads, and the content of a file that it writes.

A dialect makes the plan from names and shapes alone, before any tensor is read.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vitral.errors import WeightsError
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.preprocess import IMAGENET_MEAN, IMAGENET_STD, Interpolation, Preprocess
from vitral.weights.dialects.rules import Rule
from vitral.weights.formats.tensor_file import TensorFile

Config = ViTConfig | BiTConfig
Overrides = Mapping[str, Any]
"""Config fields that the caller of ``vitral.load`` sets."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The model in a checkpoint, without its tensors."""

    config: Config
    preprocess: Preprocess
    labels: tuple[str, ...] | None = None
    multi_label: bool = False
    assumed: Mapping[str, str] = field(default_factory=dict)
    """Choices that the file does not state: the config field, or "preprocess", and a sentence."""

    @property
    def vit(self) -> ViTConfig:
        """Return the config of a ViT, the only network that most dialects contain."""
        if not isinstance(self.config, ViTConfig):
            raise WeightsError("The metadata of this file describe a BiT, but its tensors are those of a ViT.")
        return self.config


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """A checkpoint as its dialect understands it."""

    dialect: str
    file: TensorFile
    """The tensors, without the prefix that the dialect removed."""
    spec: ModelSpec
    rules: Sequence[Rule]
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Tensors that the model does not need, with the reason."""
    warnings: tuple[str, ...] = ()
    keeps_dtype: bool = False


PLAIN: dict[str, tuple[Any, ...]] = dict(registers=(0,), layer_scale=(None,), norm_after_pool=(False,))
"""Values for ``check_supported`` of a dialect without the extras of timm."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """A model and everything that a file may store with it."""

    dialect: str
    network: Config
    state: Mapping[str, Tensor]
    preprocess: Preprocess
    labels: tuple[str, ...] | None = None
    multi_label: bool = False
    position_table: Tensor | None = None
    """The table that fixed or factorized positions amount to, for dialects with learned tables only."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    """Assumptions made when the model was loaded, which the next reader inherits."""

    @property
    def config(self) -> ViTConfig:
        """Return the config of a ViT, or raise WeightsError for a BiT."""
        if isinstance(self.network, BiTConfig):
            problem = f"The {self.dialect} dialect stores ViTs, and this model is a BiT."
            raise WeightsError(problem, hint="Use dialect='bit' or dialect='native'.")
        return self.network

    def with_learned_positions(self) -> "Content":
        """Return the same network with its positions as one learned table, for dialects without other kinds.

        Fixed waves and row and column tables become the table that they amount to, missing positions become zeros.
        """
        config = self.config
        if config.position == "learned" and config.position_at == "stem":
            return self
        if config.position == "relative" or config.position_at != "stem":
            value = f"position={config.position!r}, position_at={config.position_at!r}"
            raise self.unsupported(f"{value} (expected one table, added at the stem)")
        state = {name: tensor for name, tensor in self.state.items() if not name.startswith("positions.")}
        rows, columns = config.table_grid
        table = torch.zeros(config.has_class_token + rows * columns, config.width)
        state["positions.0.table"] = table if self.position_table is None else self.position_table
        return replace(self, network=replace(config, position="learned"), state=state)

    def check_supported(self, **supported: tuple[Any, ...]) -> None:
        """Raise WeightsError if a config field has a value that the dialect cannot store."""
        for name, allowed in supported.items():
            value = self.config.has_class_token if name == "class_token" else getattr(self.config, name)
            if value not in allowed:
                choices = " or ".join(repr(choice) for choice in allowed)
                raise self.unsupported(f"{name}={value!r} (expected {choices})")

    def unsupported(self, value: str) -> WeightsError:
        """Return the error for a value that the dialect cannot store."""
        return WeightsError(f"The {self.dialect} dialect cannot store {value}.", hint="Use dialect='native'.")

    def renamed(self, rules: Iterable[Rule]) -> dict[str, Tensor]:
        """Return the tensors under the names of the dialect."""
        theirs: dict[str, Tensor] = {}
        for rule in rules:
            tensors = rule.write(tuple(self.state[name].detach().cpu() for name in rule.ours))
            theirs |= {name: tensor.contiguous() for name, tensor in zip(rule.theirs, tensors, strict=True)}
        return theirs


def unsupported(dialect: str, reason: str) -> WeightsError:
    """Return the error for a checkpoint that no config of ours describes."""
    return WeightsError(f"vitral does not support this {dialect} checkpoint: {reason}.")


def google_preprocess(size: tuple[int, int]) -> Preprocess:
    """Return the preprocessing of vit_jax: squash with TensorFlow's bilinear resize, pixels from -1 to 1."""
    return Preprocess(size=size, resize="squash", interpolation="bilinear", antialias=False)


def imagenet_preprocess(size: tuple[int, int], interpolation: Interpolation) -> Preprocess:
    """Return the preprocessing of torchvision, DeiT, MAE and DINOv2: center crop, ImageNet's mean and std."""
    return Preprocess(
        size=size, resize="crop", crop_fraction=0.875, interpolation=interpolation, mean=IMAGENET_MEAN, std=IMAGENET_STD
    )
