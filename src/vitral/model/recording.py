"""Looking inside: the attention of chosen layers, while every other layer keeps its fused kernel.

The context manager hangs a recorder on the attention of those layers and takes it off again; outside of it nothing
is kept and nothing is slower.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident

import torch
from torch import Tensor, nn

from vitral.errors import ConfigError
from vitral.model.attention import Attention
from vitral.model.layers import ByLayer, chosen_layers
from vitral.model.packing import Packing


class AttentionMaps(ByLayer[Tensor | list[Tensor]]):
    """Layer -> attention weights of the last forward pass: (B, heads, N, N), or a list of such for a list of images."""

    def __init__(self, depth: int):
        super().__init__({}, depth=depth)
        self.thread = get_ident()

    def keep(self, layer: int, weights: list[Tensor], packing: Packing) -> None:
        # A model may serve several threads; each sees its own.
        if torch.compiler.is_compiling() or get_ident() == self.thread:
            self.values_by_layer[layer] = weights[0] if packing.order is None else packing.per_image(weights)


@contextmanager
def record_attention(model: nn.Module, layers: int | Iterable[int] | None = None) -> Iterator[AttentionMaps]:
    """Records the attention weights of some layers (all by default) for every forward pass inside the context.

    ``maps[layer]`` is (B, heads, N, N), rows are queries; for a list of images it is a list of (1, heads, N, N), in
    their order. Axial layers fill in zeros where they do not look. Each forward pass replaces what the one before left.
    """
    parts = model.modules() if isinstance(model, nn.Module) else ()
    modules = [part for part in parts if isinstance(part, Attention)]
    if not modules:
        raise ConfigError(f"A {type(model).__name__} has no attention to record.")
    chosen = list(range(len(modules))) if layers is None else chosen_layers(layers, len(modules))
    maps = AttentionMaps(depth=len(modules))
    hung = {layer: partial(maps.keep, layer) for layer in chosen}
    try:
        for layer, recorder in hung.items():
            modules[layer].recorders += (recorder,)
        yield maps
    finally:
        for layer, recorder in hung.items():
            modules[layer].recorders = tuple(other for other in modules[layer].recorders if other is not recorder)
