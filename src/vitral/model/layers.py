"""Layers by their numbers: from 0, or from the end when negative, as in a Python list."""

from collections.abc import Iterable, Iterator, Mapping
from operator import index
from typing import Any, TypeVar

from vitral.errors import ConfigError

Value = TypeVar("Value")


class ByLayer(Mapping[int, Value]):
    """Something for some of a model's layers; negative numbers count from the end."""

    def __init__(self, values: dict[int, Value], *, depth: int):
        self.values_by_layer = values
        self.depth = depth

    def __getitem__(self, layer: int) -> Value:
        number = _from_the_start(layer, self.depth)
        if number not in self.values_by_layer:
            there = sorted(self.values_by_layer) or "nothing yet"
            raise KeyError(f"layer {layer} was not asked for, or nothing ran yet: there is {there}")
        return self.values_by_layer[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self.values_by_layer)

    def __len__(self) -> int:
        return len(self.values_by_layer)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({{{', '.join(f'{layer}: {_shape(value)}' for layer, value in self.items())}}})"


def chosen_layers(layers: int | Iterable[int], depth: int) -> list[int]:
    """Layer numbers, counted from the end when negative -> from 0; ConfigError for what is not there."""
    chosen: list[Any] = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else [layers]
    numbers = [_from_the_start(layer, depth) for layer in chosen]
    for layer, number in zip(chosen, numbers, strict=True):
        if number is None:
            raise ConfigError(f"layers={layers!r}: there is no layer {layer!r}; this model has 0 to {depth - 1}.")
    return [number for number in numbers if number is not None]


def _from_the_start(layer: Any, depth: int) -> int | None:
    """None for what is no layer."""
    if isinstance(layer, bool) or not hasattr(layer, "__index__"):
        return None
    return index(layer) % depth if -depth <= index(layer) < depth else None


def _shape(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shape, value))}]"
    return str(tuple(value.shape)) if hasattr(value, "shape") else repr(value)
