"""Rules between two namings of the same numbers. A dialect is a list of them, and each works in both directions."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How numbers lie elsewhere: from their arrays to ours, and back."""

    read: Callable[..., Any]
    write: Callable[..., Any]

    def then(self, other: "Layout") -> "Layout":
        """This one on their side, the other one on ours."""
        return Layout(read=lambda *x: other.read(self.read(*x)), write=lambda *x: self.write(other.write(*x)))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Some of our tensors and some of theirs that hold the same numbers."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    layout: Layout

    def read(self, tensors: Tensors) -> Tensors:
        return _tuple(self.layout.read(*tensors))

    def write(self, tensors: Tensors) -> Tensors:
        return _tuple(self.layout.write(*tensors))


def rule(ours: str | tuple[str, ...], theirs: str | tuple[str, ...], layout: Layout | None = None) -> Rule:
    return Rule(ours=_names(ours), theirs=_names(theirs), layout=SAME if layout is None else layout)


def pair(ours: str, theirs: str, weight: Layout | None = None) -> Iterator[Rule]:
    """Weight and bias of a layer, for dialects that call them so."""
    yield rule(f"{ours}.weight", f"{theirs}.weight", weight)
    yield rule(f"{ours}.bias", f"{theirs}.bias")


def pairs(ours: str, theirs: str, names: Mapping[str, str]) -> Iterator[Rule]:
    """Weights and biases of several layers below one name: ours and theirs of each."""
    for our, their in names.items():
        yield from pair(f"{ours}.{our}", f"{theirs}.{their}")


def stacked_pair(ours: str, theirs: tuple[str, ...]) -> Iterator[Rule]:
    """Weights and biases of several layers of theirs that lie behind each other in one of ours."""
    for kind in ("weight", "bias"):
        yield rule(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), stacked(len(theirs)))


def _names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _tuple(tensors: Any) -> Tensors:
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


# ---- layouts ----

SAME = Layout(read=lambda x: x, write=lambda x: x)
TRANSPOSED = Layout(read=lambda x: x.transpose(0, 1), write=lambda x: x.transpose(0, 1))
"""(inputs, outputs), as JAX has it."""
VECTOR = Layout(read=lambda x: x.reshape(-1), write=lambda x: x)
"""A vector that old files keep as (1, 1, 1, C)."""
ROWS = Layout(read=lambda x: x.reshape(x.shape[-2:]), write=lambda x: x[None])
"""(1, N, D): tokens and tables with a batch axis."""
HEIGHT_WIDTH_IN_OUT = Layout(read=lambda x: x.permute(3, 2, 0, 1), write=lambda x: x.permute(2, 3, 1, 0))
"""Convolutions of JAX."""


def patches(channels: int, patch: tuple[int, int]) -> Layout:
    """A convolution (D, C, height, width) where we have a matrix of flattened patches."""
    return Layout(read=lambda x: x.flatten(1), write=lambda x: x.unflatten(1, (channels, *patch)))


def stacked(parts: int) -> Layout:
    return Layout(read=lambda *x: torch.cat(x), write=lambda x: x.chunk(parts))


def zeros(length: int) -> Layout:
    """A bias that their network does not have."""
    return Layout(read=lambda: torch.zeros(length), write=lambda bias: ())


def heads_last(heads: int, parts: int = 1) -> Layout:
    """Kernels (D, heads, head_dim) of ``parts`` projections, which we keep as one (parts * D, D)."""
    return Layout(
        read=lambda *x: torch.cat([kernel.flatten(1).mT for kernel in x]),
        write=lambda x: [part.mT.unflatten(1, (heads, -1)) for part in x.chunk(parts)],
    )


def heads_bias(heads: int, parts: int = 1) -> Layout:
    """Biases (heads, head_dim) of the same."""
    return Layout(
        read=lambda *x: torch.cat([bias.flatten() for bias in x]),
        write=lambda x: [part.unflatten(0, (heads, -1)) for part in x.chunk(parts)],
    )


def heads_first(heads: int) -> Layout:
    """A kernel (heads, head_dim, D): the output of attention."""
    return Layout(read=lambda x: x.flatten(0, 1).mT, write=lambda x: x.mT.unflatten(0, (heads, -1)))
