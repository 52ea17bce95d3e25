"""Attention as maps over the image: rollout, and the distance that each head looks."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitral.inspection.traversal import Images, Maps, check_unmerged, patch_pixels, per_image, pooled_rows, run_images
from vitral.model.packing import Group, Packing
from vitral.model.recording import observe_attention


@torch.no_grad()
def rollout(model: nn.Module, images: Images) -> Maps:
    """Return the attention rollout of each image (figure 6 of the paper): (B, rows, columns), each map sums to 1.

    Every layer contributes the mean of its heads and, for the residual connection, the identity, half each. The product
    of all layers traces the pooled vector back to the patches: from the class token, from the mean of all patches, or
    from the probe of attention pooling. The share of class token and registers is left out. A list of images gives a
    list of (rows, columns). The attention of one layer is in memory at a time.
    """
    vit = check_unmerged(model)

    def compute(batch: Images) -> list[Tensor]:
        flows: list[Tensor] = []

        def observe(layer: int, weights: list[Tensor], packing: Packing) -> None:
            steps = [residual_attention(weight) for weight in weights]
            flows[:] = [step @ flow for step, flow in zip(steps, flows, strict=True)] if flows else steps

        x, packing = vit.embed(batch)
        with observe_attention(vit, observe):
            x, _ = vit.encode(x, packing)
        rows = zip(pooled_rows(vit, x, packing), flows, packing.groups, strict=True)
        return per_image([patch_map((row[:, None] @ flow)[:, 0], group) for row, flow, group in rows], packing)

    return run_images(vit, images, compute)


def residual_attention(weights: Float[Tensor, "B H N N"]) -> Float[Tensor, "B N N"]:
    """Return the mean of the heads and the identity, half each."""
    mixed = weights.float().mean(dim=1).mul_(0.5)
    mixed.diagonal(dim1=1, dim2=2).add_(0.5)
    return mixed


def patch_map(row: Float[Tensor, "B N"], group: Group) -> Float[Tensor, "B rows columns"]:
    """Return the patches of a row over all tokens as a map that sums to 1."""
    patches = row[:, group.extras :]
    return (patches / patches.sum(dim=1, keepdim=True)).unflatten(1, group.grid)


@torch.no_grad()
def attention_distance(model: nn.Module, images: Images) -> Float[Tensor, "layers heads"]:
    """Return the mean attention distance of every head in pixels (figure 7 right of the paper), over all images.

    It is the distance between the centers of the query patch and the patches it attends to, weighted by attention,
    averaged over queries and images. Attention to class token and registers does not count. An axial layer has two
    rows. The attention of one layer is in memory at a time.
    """
    vit = check_unmerged(model)
    pixels = patch_pixels(vit.config)

    def compute(batch: Images) -> list[Tensor]:
        by_layer: list[list[Tensor]] = []

        def observe(layer: int, weights: list[Tensor], packing: Packing) -> None:
            groups = zip(weights, packing.groups, strict=True)
            by_layer.append([mean_distance(weight, group, pixels) for weight, group in groups])

        x, packing = vit.embed(batch)
        with observe_attention(vit, observe):
            vit.encode(x, packing)
        return per_image([torch.stack(layers, dim=1) for layers in zip(*by_layer, strict=True)], packing)

    return torch.stack(list(run_images(vit, images, compute))).mean(dim=0)


def mean_distance(weights: Float[Tensor, "B H N N"], group: Group, pixels: tuple[int, int]) -> Float[Tensor, "B H"]:
    """Return the distance in pixels that each head looks, from attention weights with queries as rows."""
    patches = weights[:, :, group.extras :, group.extras :].float()
    distances = patch_distances(group.grid, pixels, weights.device)
    weighted = torch.einsum("bhqk,qk->bhq", patches, distances)
    return (weighted / patches.sum(dim=-1).clamp(min=1e-12)).mean(dim=-1)


def patch_distances(grid: tuple[int, int], pixels: tuple[int, int], device: torch.device) -> Float[Tensor, "P P"]:
    """Return the distance in pixels between the centers of all pairs of patches."""
    y, x = (torch.arange(count, device=device) * side for count, side in zip(grid, pixels, strict=True))
    centers = torch.cartesian_prod(y, x).float()
    return (centers[:, None] - centers).square().sum(dim=-1).sqrt()  # cdist is less exact
