"""Class-specific relevance: which patches speak for a class (Chefer et al. 2021)."""

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitral.errors import DataError
from vitral.inspection.traversal import Images, Maps, check_classifier, check_unmerged, frozen, per_image, run_images
from vitral.model.packing import Packing
from vitral.model.pool import MapPool, pool_groups
from vitral.model.recording import observe_attention
from vitral.model.vit import ViT


def relevance(model: nn.Module, images: Images, labels: Tensor | Sequence[int] | int | None = None) -> Maps:
    """Return how much each patch speaks for a class: (B, rows, columns), at least 0; a list for a list of images.

    `labels` are the indices of the classes, one per image or one for all; by default the predicted classes.

    Each layer contributes the identity and the mean over heads of attention times its gradient, without negative values
    (gradient-weighted rollout: "Generic Attention-model Explainability", Chefer et al. 2021). The product of all layers
    is read from the tokens that the head receives: the class token; patches, each by its contribution to the logit; or,
    with attention pooling, the gradient-weighted attention of the probe. The attention of all layers is in memory at
    the same time, its gradients one layer after the other: `relevance_bytes` returns how much that takes.
    """
    vit = check_unmerged(check_classifier(model, "Relevance"))
    targets = _check_labels(labels, len(images), vit.config.num_classes)
    position = 0

    def compute(batch: Images) -> list[Tensor]:
        nonlocal position
        chosen = None if targets is None else targets[position : position + len(batch)]
        position += len(batch)
        return _relevance(vit, batch, chosen)

    with torch.inference_mode(False), torch.enable_grad(), frozen(vit):
        return run_images(vit, images, compute, layers=2 * vit.config.blocks)  # about half for the activations


def _relevance(model: ViT, images: Images, labels: Tensor | None) -> list[Tensor]:
    """Return the relevance of images that fit into memory together."""
    attention: dict[tuple[int, int], Tensor] = {}  # by layer and group, until its gradient is there
    steps: dict[tuple[int, int], Tensor] = {}

    def observe(layer: int, weights: list[Tensor], packing: Packing) -> None:
        for index, group in enumerate(weights):
            attention[layer, index] = group
            group.register_hook(partial(reduce, (layer, index)))

    @torch.no_grad()
    def reduce(position: tuple[int, int], gradients: Tensor) -> None:
        step = positive_mean(attention.pop(position), gradients)
        step.diagonal(dim1=1, dim2=2).add_(1.0)
        steps[position] = step

    try:
        with torch.no_grad():
            x, packing = model.embed(images)
        embedded = x.clone().requires_grad_()
        with observe_attention(model, observe):
            x, _ = model.encode(embedded, packing)
        groups = [tokens.contiguous() for tokens in packing.split(x)]
        logits, probes = _classify(model, groups, packing)
        labels = logits.argmax(dim=1) if labels is None else labels.to(logits.device)
        chosen = logits.gather(1, labels[:, None]).sum()  # images are independent
        gradients = torch.autograd.grad(chosen, [*groups, *probes, embedded])  # the hooks run
    finally:
        attention.clear()  # the hooks of a failed backward pass would keep it
    with torch.no_grad():
        by_group: list[Tensor] = []
        for index, group in enumerate(packing.groups):
            flow = steps[0, index]
            for layer in range(1, model.config.blocks):
                flow = steps[layer, index] @ flow
            probe = positive_mean(probes[index], gradients[len(groups) + index])[:, 0] if probes else None
            row = _output_row(model, groups[index], gradients[index], probe, group.extras)
            by_group.append((row[:, None] @ flow)[:, 0, group.extras :].unflatten(1, group.grid))
    return per_image(by_group, packing)


def positive_mean(weights: Float[Tensor, "B H ..."], gradients: Float[Tensor, "B H ..."]) -> Tensor:
    """Return the mean over heads of attention times gradient, without negative values."""
    return (weights * gradients).clamp(min=0).float().mean(dim=1)


def _classify(model: ViT, groups: list[Tensor], packing: Packing) -> tuple[Tensor, list[Tensor]]:
    """Return the logits in the order of the images, and the attention of the probe of each group, if there is one."""
    probes: list[Tensor] = []

    def pool(tokens: Tensor, extras: int) -> Tensor:
        pooled, weights = cast("MapPool", model.pool).attend_with_weights(tokens, extras)
        probes.append(weights)
        return pooled

    x = groups[0] if len(groups) == 1 else torch.cat([tokens.flatten(0, 1) for tokens in groups])[None]
    if model.config.pool == "map":
        pooled = pool_groups(x, packing, pool)
        pooled = model.norm(pooled) if model.config.norm_after_pool else pooled
    else:
        pooled = model.pool_tokens(x, packing)
    return model.head(model.representation(pooled)), probes


def _output_row(
    model: ViT, tokens: Float[Tensor, "B N D"], gradients: Float[Tensor, "B N D"], probe: Tensor | None, extras: int
) -> Float[Tensor, "B N"]:
    """Return the share of each token in the logit. Rows sum to 1, except those of attention pooling."""
    row = tokens.new_zeros(tokens.shape[:2], dtype=torch.float32)
    if probe is not None:
        row[:, extras:] = probe
        return row
    if model.config.pool == "token":
        row[:, 0] = 1.0
        return row
    contributions = (tokens * gradients).sum(dim=-1).clamp(min=0).float()
    first = 0 if model.config.pool == "token+mean" else extras
    row[:, first:1] = contributions[:, first:1]
    row[:, extras:] = contributions[:, extras:]
    return row / row.sum(dim=1, keepdim=True).clamp(min=1e-12)


def _check_labels(labels: Tensor | Sequence[int] | int | None, count: int, classes: int) -> Tensor | None:
    """Return one class index per image, or raise DataError."""
    if labels is None:
        return None
    indices = torch.as_tensor(labels)
    indices = indices.expand(count) if indices.ndim == 0 else indices
    is_integer = not indices.is_floating_point() and indices.dtype != torch.bool
    if not is_integer or tuple(indices.shape) != (count,) or indices.min() < 0 or indices.max() >= classes:
        problem = f"labels must be {count} class indices from 0 to {classes - 1}"
        raise DataError(f"{problem} (got {indices.dtype} of shape {tuple(indices.shape)}).")
    return indices.long()
