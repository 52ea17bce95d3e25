"""Compute what the weights alone show: the similarity of positions, and the filters of the patch projection."""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitral.errors import ConfigError
from vitral.inspection.traversal import check_vit
from vitral.model.layers import Conv
from vitral.model.positions import Positions


@torch.no_grad()
def position_similarity(model: nn.Module, *, block: int = 0) -> Float[Tensor, "rows columns rows columns"]:
    """Return the cosine similarity of the position embeddings of all pairs of patches (figure 7 center).

    `similarity[row, column]` is the map of one patch. `block` chooses the table of a model that has one per block.
    """
    vit = check_vit(model)
    if not len(vit.positions):
        kind = vit.config.position
        reason = "it uses relative offsets" if kind == "relative" else "it has no positions"
        raise ConfigError(f"This model has no position embedding per patch: {reason} (position={kind!r}).")
    index = 0 if len(vit.positions) == 1 else range(len(vit.positions))[block]
    positions = cast("Positions", vit.positions[index])
    rows = F.normalize(positions.patch_rows(like=vit.norm.weight).float(), dim=1)
    return (rows @ rows.T).unflatten(1, positions.grid).unflatten(0, positions.grid)


class Filters(NamedTuple):
    """Principal components of the filters that see the image."""

    components: Float[Tensor, "n C h w"]
    """Unit vectors in the order of their variance."""
    explained: Float[Tensor, " n"]
    """The fraction of the variance of all filters that each explains."""


@torch.no_grad()
def patch_filters(model: nn.Module, components: int = 28) -> Filters:
    """Return the principal components of the patch projection (figure 7 left), or of a stem's first convolution."""
    vit = check_vit(model)
    if vit.patches.stem is None:
        filters = vit.patches.project.weight.unflatten(1, (vit.config.channels, *vit.config.patch_hw))
    else:
        filters = next(module.weight for module in vit.patches.stem.modules() if isinstance(module, Conv))
    rows = filters.double().flatten(1)
    _, values, vectors = torch.linalg.svd(rows - rows.mean(dim=0), full_matrices=False)
    vectors = vectors * vectors.gather(1, vectors.abs().argmax(dim=1, keepdim=True)).sign()  # the sign is arbitrary
    variance = values.square()
    count = min(components, len(values))
    shape = tuple(filters.shape[1:])
    explained = variance / variance.sum().clamp(min=1e-30)
    return Filters(vectors[:count].unflatten(1, shape).float(), explained[:count].float())
