"""Features: the tokens of images by their names, so that nobody slices by number."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxtyping import Float
from torch import Tensor

from vitral.model.config import ViTConfig
from vitral.model.layers import ByLayer
from vitral.model.packing import Packing


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Tokens:
    """What one layer made of the images."""

    cls: Float[Tensor, "B D"] | None
    """The class token; None for a model without one."""
    registers: Float[Tensor, "B R D"]
    """The registers; R is 0 for a model without any."""
    patches: Float[Tensor, "B N D"]
    """One vector a patch, in reading order; ``maps`` gives them as a picture."""
    grid: tuple[int, int]
    """(rows, columns) of patches."""

    def __repr__(self) -> str:
        """Shapes instead of numbers."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = (f"{name}={tuple(v.shape) if isinstance(v, Tensor) else v!r}" for name, v in values.items())
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def maps(self) -> Float[Tensor, "B D rows columns"]:
        return self.patches.transpose(1, 2).unflatten(2, self.grid)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Features(Tokens):
    """The tokens as they go into the pooling (after the final norm, unless norm_after_pool), and what comes out."""

    pooled: Float[Tensor, "B D"] | Float[Tensor, "B tokens D"]
    """One vector an image, as the head (or its representation layer) sees it; all tokens with pool 'none'."""
    layers: ByLayer[Tokens]
    """The tokens behind each layer that was asked for, before the final norm."""


def name_features(
    x: Tensor, kept: Mapping[int, Tensor], pooled: Tensor, packing: Packing, config: ViTConfig
) -> Features | list[Features]:
    """Tokens of a batch -> Features; of a packed list -> one Features an image, each with a batch axis of one."""

    def build(x: Tensor, kept: Mapping[int, Tensor], pooled: Tensor, grid: tuple[int, int]) -> Features:
        layers = {index: Tokens(**name_tokens(layer, grid, config)) for index, layer in kept.items()}
        by_layer = ByLayer(layers, depth=config.blocks)
        return Features(**name_tokens(x, grid, config), pooled=pooled, layers=by_layer)

    if packing.order is None:
        return build(x, kept, pooled, packing.groups[0].grid)
    tokens = packing.per_image(packing.split(x))
    layers = {index: packing.per_image(packing.split(layer)) for index, layer in kept.items()}
    vectors = tokens if config.pool == "none" else pooled.split(1)
    return [
        build(tokens[i], {index: layer[i] for index, layer in layers.items()}, vectors[i], grid)
        for i, grid in enumerate(packing.grids)
    ]


def name_tokens(x: Float[Tensor, "B N D"], grid: tuple[int, int], config: ViTConfig) -> dict[str, Any]:
    """(B, N, D) -> the fields of Tokens."""
    first = int(config.has_class_token)
    return dict(
        cls=x[:, 0] if first else None,
        registers=x[:, first : config.extra_tokens],
        patches=x[:, config.extra_tokens :],
        grid=grid,
    )
