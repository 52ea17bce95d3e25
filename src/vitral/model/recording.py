"""Record the attention weights of chosen layers, while every other layer keeps its fused kernel."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import cast

import torch
from torch import Tensor, nn

from vitral.errors import ConfigError
from vitral.model.attention import Attention
from vitral.model.features import ByLayer, choose_layers
from vitral.model.packing import Packing

Observer = Callable[[int, list[Tensor], Packing], None]
"""Called with a layer, the attention weights (images, heads, N, N) of each group of images, and their packing."""


class AttentionMaps(ByLayer[Tensor | list[Tensor]]):
    """Attention weights of the last forward pass by layer: (B, heads, N, N), or a list of them for a list of images."""

    def __init__(self, depth: int):
        super().__init__({}, depth=depth)

    def record(self, layer: int, weights: list[Tensor], packing: Packing) -> None:
        """Store the weights of a layer."""
        self.values_by_layer[layer] = weights[0] if packing.order is None else packing.per_image(weights)


@contextmanager
def record_attention(model: nn.Module, layers: int | Iterable[int] | None = None) -> Generator[AttentionMaps]:
    """Record the attention weights of some layers (all by default) in every forward pass inside the context.

    `maps[layer]` is (B, heads, N, N) with queries as rows; for a list of images it is a list of (1, heads, N, N) in
    list order. Axial layers have zeros where they do not attend. Each forward pass replaces the previous weights.
    """
    maps = AttentionMaps(depth=len(_attention_modules(model)))
    with observe_attention(model, maps.record, layers):
        yield maps


@contextmanager
def observe_attention(
    model: nn.Module, observe: Observer, layers: int | Iterable[int] | None = None
) -> Generator[None]:
    """Call `observe` with the attention weights of some layers (all by default), one layer after the other.

    What it does not keep is freed before the next layer runs. Forward passes of other threads are not observed.
    """
    modules, thread = _attention_modules(model), get_ident()
    chosen = list(range(len(modules))) if layers is None else choose_layers(layers, len(modules))

    def observe_here(layer: int, weights: list[Tensor], packing: Packing) -> None:
        if torch.compiler.is_compiling() or get_ident() == thread:
            observe(layer, weights, packing)

    recorders = {layer: partial(observe_here, layer) for layer in chosen}
    try:
        for layer, recorder in recorders.items():
            modules[layer].recorders += (recorder,)
        yield
    finally:
        for layer, recorder in recorders.items():
            modules[layer].recorders = tuple(other for other in modules[layer].recorders if other is not recorder)


def _attention_modules(model: nn.Module) -> list[Attention]:
    """Return the attention of every block. Raise ConfigError for a model without any."""
    submodules = model.modules() if isinstance(cast("object", model), nn.Module) else ()
    modules = [module for module in submodules if isinstance(module, Attention)]
    if not modules:
        raise ConfigError(f"A {type(model).__name__} has no attention to record.", hint="Pass a ViT.")
    return modules
