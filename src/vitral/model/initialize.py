"""The initial values of the reference implementation, by name, and a linear layer that says which ones it uses."""

from collections.abc import Callable
from functools import partial
from math import sqrt

import torch
from torch import Tensor, nn

Initialiser = Callable[[Tensor], object]


def initialize(tensor: Tensor, how: Initialiser) -> None:
    """Sets initial values where there is memory for them: for the meta device torch would first load a compiler."""
    if not tensor.is_meta:
        how(tensor)


def lecun_normal_(weight: Tensor) -> None:
    """Variance 1 / fan_in from a normal cut at two sigma; the division mends the spread that the cut takes away."""
    sigma = sqrt(1 / weight[0].numel()) / 0.87962566
    nn.init.trunc_normal_(weight, std=sigma, a=-2 * sigma, b=2 * sigma)


def xavier_uniform_each_(parts: int) -> Initialiser:
    """Xavier for each of several projections that lie in one matrix: as a whole they would come out too small."""
    return partial(_xavier_uniform_each_, parts=parts)


def _xavier_uniform_each_(weight: Tensor, parts: int) -> None:
    for part in weight.chunk(parts):
        nn.init.xavier_uniform_(part)


def normal_(std: float) -> Initialiser:
    return partial(nn.init.normal_, std=std)


def constant_(value: float) -> Initialiser:
    return partial(nn.init.constant_, val=value)


class Linear(nn.Linear):
    """A linear layer whose initial values are named where it is built."""

    def __init__(self, inputs: int, outputs: int, *, weight: Initialiser, bias: Initialiser = nn.init.zeros_):
        self._initial = weight, bias  # before super: its constructor calls reset_parameters
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for value, how in zip((self.weight, self.bias), self._initial, strict=True):
                initialize(value, how)
