"""Features: the tokens of images by name, and values by layer."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from operator import index
from typing import Generic, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from vitral.errors import ConfigError
from vitral.model.config import ViTConfig
from vitral.model.packing import Packing

Value = TypeVar("Value")


class ByLayer(Mapping[int, Value], Generic[Value]):
    """A mapping from layers to values. Layers count from 0, or from the end if negative, as in a list."""

    def __init__(self, values: dict[int, Value], *, depth: int):
        self.values_by_layer = values
        self.depth = depth

    def __getitem__(self, layer: int) -> Value:
        number = _layer_number(layer, self.depth)
        if number is None or number not in self.values_by_layer:
            available = ", ".join(map(str, sorted(self.values_by_layer))) or "none yet"
            raise KeyError(f"layer {layer} was not requested or has not run (available: {available})")
        return self.values_by_layer[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self.values_by_layer)

    def __len__(self) -> int:
        return len(self.values_by_layer)

    def __repr__(self) -> str:
        values = (f"{layer}: {_shape(value)}" for layer, value in self.items())
        return f"{type(self).__name__}({{{', '.join(values)}}})"


def choose_layers(layers: int | Iterable[int], depth: int) -> list[int]:
    """Return layer numbers counted from 0; raise ConfigError for a layer that the model does not have."""
    requested = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else [layers]
    numbers: list[int] = []
    for layer in requested:
        if (number := _layer_number(layer, depth)) is None:
            raise ConfigError(f"layers={layers!r}: the model has no layer {layer!r} (expected 0 to {depth - 1}).")
        numbers.append(number)
    return numbers


def _layer_number(layer: object, depth: int) -> int | None:
    """Return the layer counted from 0, or None if there is no such layer."""
    if isinstance(layer, bool) or not hasattr(layer, "__index__"):
        return None
    number = index(cast("int", layer))
    return number % depth if -depth <= number < depth else None


def _shape(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shape, cast('list[object]', value)))}]"
    return str(tuple(value.shape)) if isinstance(value, Tensor) else repr(value)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Tokens:
    """The tokens after one layer."""

    cls: Float[Tensor, "B D"] | None
    """The class token; None for a model without one."""
    registers: Float[Tensor, "B R D"]
    """The registers; R is 0 for a model without any."""
    patches: Float[Tensor, "B N D"]
    """One vector per patch, row by row; `maps` has them as a feature map."""
    grid: tuple[int, int]
    """(rows, columns) of patches."""

    def __repr__(self) -> str:
        """Return shapes instead of numbers."""
        values = (f"{field.name}={_shape(getattr(self, field.name))}" for field in fields(self))
        return f"{type(self).__name__}({', '.join(values)})"

    @property
    def maps(self) -> Float[Tensor, "B D rows columns"]:
        """Return the patches as a feature map."""
        return torch.unflatten(self.patches.transpose(1, 2), 2, self.grid)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Features(Tokens):
    """The tokens that enter the pooling (after the final norm, unless norm_after_pool), and the pooled vector."""

    pooled: Float[Tensor, "B pooled"] | Float[Tensor, "B tokens D"]
    """One vector per image, as the head (or its hidden layer) receives it; all tokens with pool 'none'."""
    layers: ByLayer[Tokens]
    """The tokens after each requested layer, before the final norm."""


def build_features(
    x: Tensor, layers: Mapping[int, Tensor], pooled: Tensor, packing: Packing, config: ViTConfig
) -> Features | list[Features]:
    """Return the Features of a batch, or one Features per image of a packed list, each with a batch axis of one."""
    if packing.order is None:
        return _features(x, layers, pooled, packing.groups[0].grid, config)
    tokens = packing.per_image(packing.split(x))
    tokens_by_layer = {layer: packing.per_image(packing.split(tensor)) for layer, tensor in layers.items()}
    vectors = tokens if config.pool == "none" else torch.split(pooled, 1)
    return [
        _features(tokens[i], {layer: images[i] for layer, images in tokens_by_layer.items()}, vectors[i], grid, config)
        for i, grid in enumerate(packing.grids)
    ]


def _features(
    x: Tensor, layers: Mapping[int, Tensor], pooled: Tensor, grid: tuple[int, int], config: ViTConfig
) -> Features:
    by_layer = ByLayer({layer: _tokens(y, grid, config) for layer, y in layers.items()}, depth=config.blocks)
    return Features(**vars(_tokens(x, grid, config)), pooled=pooled, layers=by_layer)


def _tokens(x: Float[Tensor, "B N D"], grid: tuple[int, int], config: ViTConfig) -> Tokens:
    first, extras = int(config.has_class_token), config.extra_tokens
    cls = x[:, 0] if first else None
    return Tokens(cls=cls, registers=x[:, first:extras], patches=x[:, extras:], grid=grid)
