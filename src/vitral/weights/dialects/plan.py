"""Plan how to load a checkpoint: the model that it contains, and the rules that turn its tensors into ours.

A dialect makes the plan from names and shapes alone, before any tensor is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitral.errors import WeightsError
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.preprocess import IMAGENET_MEAN, IMAGENET_STD, Interpolation, Preprocess
from vitral.weights.dialects.rules import Rule
from vitral.weights.formats.tensor_file import TensorFile

Config = ViTConfig | BiTConfig
Overrides = Mapping[str, Any]
"""Config fields that the caller of ``vitral.load`` sets."""
Pair = tuple[int, int]
"""(height, width) or (rows, columns)."""


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


def unsupported(dialect: str, reason: str) -> WeightsError:
    """Return the error for a checkpoint that no config of ours describes."""
    return WeightsError(f"vitral does not support this {dialect} checkpoint: {reason}.")


def as_pair(size: object) -> Pair | None:
    """Return (height, width) of a size in a file, which is one integer or two; None for anything else."""
    if isinstance(size, int) and not isinstance(size, bool):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return size[0], size[1]
    return None


def as_size(pair: Pair) -> int | Pair:
    """Return a square's side, or the pair itself."""
    return pair[0] if pair[0] == pair[1] else pair


def google_preprocess(size: Pair) -> Preprocess:
    """Return the preprocessing of vit_jax: squash with TensorFlow's bilinear resize, pixels from -1 to 1."""
    return Preprocess(size=size, resize="squash", interpolation="bilinear", antialias=False)


def imagenet_preprocess(size: Pair, interpolation: Interpolation) -> Preprocess:
    """Return the preprocessing of torchvision, DeiT, MAE and DINOv2: center crop, ImageNet's mean and std."""
    return Preprocess(
        size=size, resize="crop", crop_fraction=0.875, interpolation=interpolation, mean=IMAGENET_MEAN, std=IMAGENET_STD
    )
