"""Rules between two namings of the same tensors. A dialect is a list of rules, each of which works both ways."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Convert their arrays to ours, and back."""

    read: Callable[..., Any]
    write: Callable[..., Any]

    def then(self, other: "Layout") -> "Layout":
        """Return the layout that applies this one to their arrays and then the other."""
        return Layout(read=lambda *x: other.read(self.read(*x)), write=lambda *x: self.write(other.write(*x)))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Names of our tensors and of theirs that store the same values."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    layout: Layout

    def read(self, tensors: Tensors) -> Tensors:
        """Return our tensors for theirs."""
        return _as_tuple(self.layout.read(*tensors), Tensor)

    def write(self, tensors: Tensors) -> Tensors:
        """Return their tensors for ours."""
        return _as_tuple(self.layout.write(*tensors), Tensor)


def rule(ours: str | tuple[str, ...], theirs: str | tuple[str, ...], layout: Layout | None = None) -> Rule:
    """Return a rule between names; without a layout the tensors are identical."""
    return Rule(ours=_as_tuple(ours, str), theirs=_as_tuple(theirs, str), layout=SAME if layout is None else layout)


def pair(ours: str, theirs: str, weight: Layout | None = None) -> Iterator[Rule]:
    """Yield the rules for weight and bias of a layer."""
    yield rule(f"{ours}.weight", f"{theirs}.weight", weight)
    yield rule(f"{ours}.bias", f"{theirs}.bias")


def pairs(ours: str, theirs: str, names: Mapping[str, str | tuple[str, ...]]) -> Iterator[Rule]:
    """Yield the rules for weights and biases of several layers; those in a tuple are concatenated in one of ours."""
    for our, their in names.items():
        layers: tuple[str, ...] = _as_tuple(their, str)
        for kind in ("weight", "bias"):
            layout = SAME if len(layers) == 1 else stacked(len(layers))
            yield rule(f"{ours}.{our}.{kind}", tuple(f"{theirs}.{layer}.{kind}" for layer in layers), layout)


def token_rules(names: Mapping[str, str], token_rows: int) -> Iterator[Rule]:
    """Yield the rules of class token, registers and position table, in this order.

    ``token_rows`` of their table belong to tokens. If that is not the class token alone, as in ours, one joint rule
    adds rows to the tokens that they belong to, which is equivalent.
    """
    class_rows = int("class_token" in names)
    if "positions.0.table" not in names or token_rows == class_rows:
        for ours, theirs in names.items():
            yield rule(ours, theirs, ROWS)
        return

    def read(*theirs: Tensor) -> list[Tensor]:
        *tokens, table = (ROWS.read(tensor) for tensor in theirs)
        rows, patch_rows = table[:token_rows], table[token_rows:]
        if token_rows > class_rows:
            tokens[-1] = tokens[-1] + rows[class_rows:]
        class_row = rows[:class_rows] if token_rows else table.new_zeros(class_rows, table.shape[1])
        return [*tokens, torch.cat([class_row, patch_rows])]

    def write(*ours: Tensor) -> list[Tensor]:
        if token_rows == 0 and class_rows:
            token, *registers, table = ours
            ours = token + table[:1], *registers, table[1:]
        return [tensor[None] for tensor in ours]

    yield rule(tuple(names), tuple(names.values()), Layout(read=read, write=write))


def without_qkv_bias(rules: Iterable[Rule], width: int) -> Iterator[Rule]:
    """Yield the rules for a file whose queries, keys and values have no bias: ours is zero."""
    zeros = Layout(read=lambda: torch.zeros(3 * width), write=lambda bias: ())
    for each in rules:
        yield rule(each.ours, (), zeros) if each.ours[0].endswith("to_qkv.bias") else each


def _as_tuple(values: Any, kind: type) -> tuple[Any, ...]:  # noqa: ANN401 (one or several strings or tensors)
    return (values,) if isinstance(values, kind) else tuple(values)


# ---- layouts ----

SAME = Layout(read=lambda x: x, write=lambda x: x)
VECTOR = Layout(read=lambda x: x.reshape(-1), write=lambda x: x)
"""Vectors that old files store as (1, 1, 1, C)."""
ROWS = Layout(read=lambda x: x.reshape(x.shape[-2:]), write=lambda x: x[None])
"""Tokens and tables with a batch axis: (1, N, D)."""
HEIGHT_WIDTH_IN_OUT = Layout(read=lambda x: x.permute(3, 2, 0, 1), write=lambda x: x.permute(2, 3, 1, 0))
"""Convolution kernels of JAX."""


def patches(channels: int, patch: tuple[int, int]) -> Layout:
    """Return the layout of a convolution (D, C, height, width), which we store as a matrix over flattened patches."""
    return Layout(read=lambda x: x.flatten(1), write=lambda x: x.unflatten(1, (channels, *patch)))


def stacked(parts: int) -> Layout:
    """Return the layout of tensors that we store concatenated."""
    return Layout(read=lambda *x: torch.cat(x), write=lambda x: x.chunk(parts))
