"""Dropout and stochastic depth whose random numbers belong to an image, in whichever batch it is.

Training names the images of each batch by a key. Each layer draws the noise of an image from its key and the layer's
own number. Without keys, noise comes from the global generator, as elsewhere in torch.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MASK = 2**64 - 1
_current: list[Sequence[int]] = []
"""The keys of the innermost `noise_of`. Not a context variable: autograd repeats blocks in threads of its own."""


@contextmanager
def noise_of(keys: Sequence[int]) -> Generator[None]:
    """Draw the noise of a batch from the keys of its images inside the context, which includes the backward pass."""
    _current.append(keys)
    try:
        yield
    finally:
        _current.pop()


def mix(*numbers: int) -> int:
    """Return 64 bits that look random but depend on these numbers only (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def _find_keys(images: int) -> Sequence[int] | None:
    return _current[-1] if _current and len(_current[-1]) == images else None


class Noisy:
    """A layer that draws random numbers in training."""

    layer = 0
    """Its own number in the network."""


class Dropout(Noisy, nn.Dropout):
    """Dropout with a mask per image. The images of a packed list share one, from the global generator."""

    def forward(self, input: Tensor) -> Tensor:
        keys = _find_keys(len(input)) if self.training else None
        if keys is None:
            return F.dropout(input, self.p, self.training)
        kept, generator = torch.empty_like(input, dtype=torch.bool), torch.Generator(input.device)
        for row, key in zip(kept, keys, strict=True):
            row.bernoulli_(1 - self.p, generator=generator.manual_seed(mix(key, self.layer) >> 1))
        return input * kept * (1 / (1 - self.p))


def draw_kept_images(keep: float, like: Tensor, layer: int, images: int, order: Sequence[int] | None) -> Tensor:
    """Draw which images keep a branch: (images,) of ones and zeros. `order` has the list index of each packed image."""
    keys = _find_keys(images)
    if keys is None:
        return like.new_empty(images).bernoulli_(keep)
    return like.new_tensor([mix(keys[index], layer) < keep * 2**64 for index in order or range(images)])


def number_layers(model: nn.Module) -> None:
    """Give each layer with noise a number of its own."""
    for number, module in enumerate(model.modules()):
        if isinstance(module, Noisy):
            module.layer = number
