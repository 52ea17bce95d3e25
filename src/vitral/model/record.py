"""Looking inside: the attention of chosen layers, while every other layer keeps its fused kernel.

The context manager hangs a recorder on the attention of those layers and takes it off again; outside of it nothing
is kept and nothing is slower.
"""

from collections import UserDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from vitral.errors import ConfigError
from vitral.model.attention import Attention
from vitral.model.packing import Packing


class AttentionMaps(UserDict[int, Tensor | list[Tensor]]):
    """Layer -> attention weights of the last forward pass: (B, heads, N, N), or a list of such for a list of images.
    Negative layers count from the end."""

    def __init__(self, depth: int):
        super().__init__()
        self.depth = depth

    def __getitem__(self, layer: int) -> Tensor | list[Tensor]:
        if layer not in self:
            raise KeyError(f"no attention of layer {layer} was recorded: there is {sorted(self) or 'nothing yet'}")
        return self.data[layer % self.depth]

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and -self.depth <= layer < self.depth and layer % self.depth in self.data

    def keep(self, layer: int, weights: list[Tensor], packing: Packing) -> None:
        self[layer] = weights[0] if packing.order is None else packing.per_image(weights)


@contextmanager
def record_attention(model: nn.Module, layers: int | Iterable[int] | None = None) -> Iterator[AttentionMaps]:
    """Records the attention weights of some layers (all by default) for every forward pass inside the context.

    ``maps[layer]`` is (B, heads, N, N), rows are queries; for a list of images it is a list of (1, heads, N, N), in
    their order. Axial layers fill in zeros where they do not look. Each forward pass replaces what the one before left.
    """
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    if not modules:
        raise ConfigError(f"A {type(model).__name__} has no attention to record.")
    chosen = range(len(modules)) if layers is None else chosen_layers(layers, len(modules))
    maps = AttentionMaps(len(modules))
    before = {layer: modules[layer].record for layer in chosen}
    try:
        for layer in chosen:
            modules[layer].record = partial(maps.keep, layer)
        yield maps
    finally:
        for layer, record in before.items():
            modules[layer].record = record


def chosen_layers(layers: int | Iterable[int], depth: int) -> list[int]:
    """Layer numbers, counted from the end when negative -> from 0; ConfigError for what is not there."""
    chosen = [layers] if isinstance(layers, int) else list(layers)
    for layer in chosen:
        if not isinstance(layer, int) or not -depth <= layer < depth:
            raise ConfigError(f"layers={chosen}: there is no layer {layer!r}; this model has 0 to {depth - 1}.")
    return [layer % depth for layer in chosen]
