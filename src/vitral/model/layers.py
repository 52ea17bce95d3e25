"""Layers that several parts of a network share, each with the initial values of the reference implementation."""

from collections.abc import Callable
from functools import partial
from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitral.model.noise import Dropout

Initializer = Callable[[Tensor], object]


def initialize(tensor: Tensor, initializer: Initializer) -> None:
    """Set initial values. Skips the meta device, for which torch would first load a compiler."""
    if not tensor.is_meta:
        initializer(tensor)


def lecun_normal_(weight: Tensor) -> None:
    """Fill with a normal distribution of variance 1 / fan_in, truncated at two sigma.

    Truncation lowers the standard deviation; dividing by 0.8796 restores it."""
    sigma = sqrt(1 / weight[0].numel()) / 0.87962566
    nn.init.trunc_normal_(weight, std=sigma, a=-2 * sigma, b=2 * sigma)


def xavier_uniform_each_(weight: Tensor, projections: int) -> None:
    """Fill several projections in one matrix; Xavier of the whole would be too small."""
    for projection in weight.chunk(projections):
        nn.init.xavier_uniform_(projection)


def normal_(std: float) -> Initializer:
    return partial(nn.init.normal_, std=std)


class Linear(nn.Linear):
    """A linear layer with explicit initializers."""

    def __init__(self, inputs: int, outputs: int, *, weight: Initializer, bias: Initializer = nn.init.zeros_):
        self._initializers = weight, bias  # before super().__init__, which calls reset_parameters
        super().__init__(inputs, outputs)  # pyright: ignore[reportUnknownMemberType]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for parameter, initializer in zip((self.weight, self.bias), self._initializers, strict=True):
            initialize(parameter, initializer)


class Conv(nn.Conv2d):
    """A convolution without bias."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0):
        args = inputs, outputs, kernel, stride, padding
        super().__init__(*args, bias=False)  # pyright: ignore[reportUnknownMemberType]

    def reset_parameters(self) -> None:
        initialize(self.weight, lecun_normal_)


class MLP(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, width: int, hidden: int, *, activation: str, dropout: float):
        super().__init__()
        linear = partial(Linear, weight=nn.init.xavier_uniform_, bias=normal_(std=1e-6))
        self.expand = linear(width, hidden)
        self.activate = build_activation(activation)
        self.dropout = build_dropout(dropout)
        self.contract = linear(hidden, width)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return self.contract(self.dropout(self.activate(self.expand(x))))


def build_activation(name: str) -> nn.Module:
    """Return the activation of that name in ViTConfig."""
    if name == "gelu-tanh":
        return nn.GELU(approximate="tanh")
    return {"gelu": nn.GELU, "relu": nn.ReLU, "tanh": nn.Tanh}[name]()


def build_dropout(rate: float) -> nn.Module:
    return Dropout(rate) if rate else nn.Identity()
