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
        return _tuple(self.layout.read(*tensors))

    def write(self, tensors: Tensors) -> Tensors:
        """Return their tensors for ours."""
        return _tuple(self.layout.write(*tensors))


def rule(ours: str | tuple[str, ...], theirs: str | tuple[str, ...], layout: Layout | None = None) -> Rule:
    """Return a rule between names; without a layout the tensors are identical."""
    return Rule(ours=_names(ours), theirs=_names(theirs), layout=SAME if layout is None else layout)


def pair(ours: str, theirs: str, weight: Layout | None = None) -> Iterator[Rule]:
    """Yield the rules for weight and bias of a layer."""
    yield rule(f"{ours}.weight", f"{theirs}.weight", weight)
    yield rule(f"{ours}.bias", f"{theirs}.bias")


def pairs(ours: str, theirs: str, names: Mapping[str, str]) -> Iterator[Rule]:
    """Yield the rules for weights and biases of several layers below one name."""
    for our, their in names.items():
        yield from pair(f"{ours}.{our}", f"{theirs}.{their}")


def stacked_pair(ours: str, theirs: tuple[str, ...]) -> Iterator[Rule]:
    """Yield the rules for weights and biases of several of their layers that are concatenated in one of ours."""
    for kind in ("weight", "bias"):
        yield rule(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), stacked(len(theirs)))


def _names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _tuple(tensors: Tensor | Iterable[Tensor]) -> Tensors:
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


# ---- layouts ----

SAME = Layout(read=lambda x: x, write=lambda x: x)
TRANSPOSED = Layout(read=lambda x: x.transpose(0, 1), write=lambda x: x.transpose(0, 1))
"""Matrices (inputs, outputs), as in JAX."""
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


def zeros(length: int) -> Layout:
    """Return the layout of a bias that their network does not have."""
    return Layout(read=lambda: torch.zeros(length), write=lambda bias: ())


def heads_last(heads: int, parts: int = 1) -> Layout:
    """Return the layout of projections (D, heads, head_dim), which we concatenate to one (parts * D, D)."""
    return Layout(
        read=lambda *x: torch.cat([kernel.flatten(1).mT for kernel in x]),
        write=lambda x: [chunk.mT.unflatten(1, (heads, -1)) for chunk in x.chunk(parts)],
    )


def heads_bias(heads: int, parts: int = 1) -> Layout:
    """Return the layout of their biases (heads, head_dim)."""
    return Layout(
        read=lambda *x: torch.cat([bias.flatten() for bias in x]),
        write=lambda x: [chunk.unflatten(0, (heads, -1)) for chunk in x.chunk(parts)],
    )


def heads_first(heads: int) -> Layout:
    """Return the layout of the output projection of attention, (heads, head_dim, D)."""
    return Layout(read=lambda x: x.flatten(0, 1).mT, write=lambda x: x.mT.unflatten(0, (heads, -1)))
