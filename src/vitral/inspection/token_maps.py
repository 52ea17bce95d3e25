"""The patch tokens of images: their length and similarity after each layer, and their features as colors."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitral.inspection.traversal import Images, Maps, check_vit, run_images
from vitral.model.features import Features
from vitral.model.vit import ViT

COLOR_RANGE = (0.02, 0.98)
"""Quantiles of each principal component that become the darkest and the brightest color."""


@torch.no_grad()
def token_norms(model: nn.Module, images: Images) -> Maps:
    """Return the length of every patch token after each layer: (B, layers, rows, columns); a list for a list.

    A few tokens that are much longer than the rest are artifacts: the model uses patches without content as memory
    ("Vision Transformers Need Registers", Darcet et al. 2023).
    """
    return _per_layer(check_vit(model), images, lambda tokens: tokens.norm(dim=-1))


@torch.no_grad()
def token_similarity(model: nn.Module, images: Images) -> Float[Tensor, "B layers"]:
    """Return the mean cosine similarity of pairs of patch tokens after each layer; 1 means that all point one way."""

    def compare(tokens: Tensor) -> Tensor:
        units = F.normalize(tokens, dim=-1).flatten(1, 2)  # (layers, N, D)
        count = units.shape[1]
        total = units.sum(dim=1).square().sum(dim=-1)
        return (total - count) / (count * (count - 1)) if count > 1 else torch.ones_like(total)

    return torch.stack(list(_per_layer(check_vit(model), images, compare)))


@torch.no_grad()
def feature_pca(model: nn.Module, images: Images) -> Maps:
    """Return the patch features as colors from 0 to 1: (B, rows, columns, 3); a list for a list of images.

    The colors are the first three principal components over the patches of all images together, so that similar
    patches of different images have similar colors.
    """
    vit = check_vit(model)

    def compute(batch: Images) -> list[Tensor]:
        return [features.patches[0].float().unflatten(0, features.grid) for features in _features(vit, batch, [])]

    maps = list(run_images(vit, images, compute))
    rows = torch.cat([tokens.flatten(0, 1) for tokens in maps]).double()
    mean = rows.mean(dim=0)
    _, vectors = torch.linalg.eigh((rows - mean).T @ (rows - mean))
    vectors = vectors.flip(1)[:, :3]
    vectors = vectors * (rows - mean).matmul(vectors).pow(3).sum(dim=0).sign()  # the sign is arbitrary
    scores = (rows - mean) @ vectors
    low, high = torch.quantile(scores[:: max(1, len(scores) // 100_000)], scores.new_tensor(COLOR_RANGE), dim=0)
    span = (high - low).clamp(min=1e-12)
    colors = [(((tokens.double() - mean) @ vectors - low) / span).clamp(0, 1).float() for tokens in maps]
    return torch.stack(colors) if isinstance(images, Tensor) else colors


def _per_layer(model: ViT, images: Images, compute_layers: Callable[[Tensor], Tensor]) -> Maps:
    """Return `compute_layers` of the (layers, rows, columns, D) tokens of each image."""
    depth = model.config.blocks

    def compute(batch: Images) -> list[Tensor]:
        results: list[Tensor] = []
        for features in _features(model, batch, range(depth)):
            tokens = torch.stack([features.layers[layer].patches[0].float() for layer in range(depth)])
            results.append(compute_layers(tokens.unflatten(1, features.grid)))
        return results

    return run_images(model, images, compute, layers=max(1, depth // 4))


def _features(model: ViT, images: Images, layers: "range | list[int]") -> list[Features]:
    """Return the features of each image, with a batch axis of one."""
    return model.features(list(images), layers=layers)
