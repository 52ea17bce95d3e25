"""Faithfulness: delete the patches that a map ranks highest, and see how fast the prediction fades."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitral.errors import DataError, check_int
from vitral.inspection.traversal import Images, check_classifier, evaluating, patch_pixels
from vitral.model.vit import ViT

STEPS, RANDOM_ORDERS = 10, 4
MIN_IMAGES = 10
"""Fewer images have no interval: resamples of a few differ too little, even for random maps."""
BOOTSTRAP = 2000
"""Resamples of the images for the interval."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Faithfulness:
    """How much faster a prediction fades when patches are deleted in the order of a map instead of at random."""

    fractions: tuple[float, ...]
    """Fractions of the patches that are deleted, from 0 to 1."""
    curve: tuple[float, ...]
    """Mean probability of the class, with the highest patches deleted first."""
    random_curve: tuple[float, ...]
    """The same, with patches deleted in random order."""
    score: float
    """The area between both curves, averaged over images; above 0: the map ranks better than chance."""
    low: float
    high: float
    """95% interval of the score (bootstrap over images); NaN for fewer than 10 images."""
    images: int

    @property
    def is_clear(self) -> bool:
        """Return whether the interval is above 0."""
        return self.low > 0


def faithfulness(
    model: nn.Module,
    images: Images,
    maps: Tensor | Sequence[Tensor],
    labels: Tensor | Sequence[int] | None = None,
    *,
    steps: int = STEPS,
    random_orders: int = RANDOM_ORDERS,
    multi_label: bool = False,
    seed: int = 0,
) -> Faithfulness:
    """Return how fast the probability of a class fades as patches are deleted, compared with random orders.

    Deleted patches become the mean color (0 in normalized images). `maps` has one (rows, columns) per image, as
    `rollout` and `relevance` return them. `labels` are class indices; by default the predicted classes.
    """
    check_int("steps", steps, minimum=1)
    check_int("random_orders", random_orders, minimum=1)
    if not len(images) or len(maps) != len(images):
        raise DataError(f"Expected one map per image (got {len(maps)} maps for {len(images)} images).")
    random = torch.Generator().manual_seed(seed)
    curves = delete_patches(
        model,
        images,
        maps,
        labels,
        random=random,
        steps=steps,
        random_orders=random_orders,
        multi_label=multi_label,
    )
    return score_curves(curves, seed=seed)


@torch.no_grad()
def delete_patches(
    model: nn.Module,
    images: Images,
    maps: Tensor | Sequence[Tensor],
    labels: Tensor | Sequence[int] | None = None,
    *,
    random: torch.Generator,
    steps: int = STEPS,
    random_orders: int = RANDOM_ORDERS,
    multi_label: bool = False,
) -> list[Tensor]:
    """Return the probability of the class of each image after each step: (1 + random orders, steps + 1).

    The first order is that of the map."""
    vit, curves = check_classifier(model, "Faithfulness"), list[Tensor]()
    with evaluating(vit):
        for index, image in enumerate(images):
            ranking = maps[index].flatten().float().cpu()
            orders = [ranking.argsort(descending=True, stable=True)]
            orders += [torch.randperm(len(ranking), generator=random) for _ in range(random_orders)]
            label = None if labels is None else int(labels[index])
            curves.append(_deletion_curves(vit, image, torch.stack(orders), steps, label, multi_label))
    return curves


def score_curves(curves: Sequence[Tensor], *, seed: int = 0) -> Faithfulness:
    """Return the faithfulness of the curves of `delete_patches`."""
    by_image, steps = torch.stack(list(curves)).double().numpy(), curves[0].shape[1] - 1
    ranked, chance = by_image[:, 0], by_image[:, 1:].mean(axis=1)
    areas = np.trapezoid(chance - ranked, dx=1 / steps, axis=1)
    low, high = _interval(areas, seed)
    return Faithfulness(
        fractions=tuple(step / steps for step in range(steps + 1)),
        curve=tuple(ranked.mean(axis=0).tolist()),
        random_curve=tuple(chance.mean(axis=0).tolist()),
        score=float(areas.mean()),
        low=low,
        high=high,
        images=len(areas),
    )


def _deletion_curves(
    model: ViT, image: Tensor, orders: Tensor, steps: int, label: int | None, multi_label: bool
) -> Tensor:
    """Return the probability of the class after each step of each order: (orders, steps + 1)."""
    grid, (height, width) = model.config.grid(image.shape[1], image.shape[2]), patch_pixels(model.config)
    ranks = orders.argsort(dim=1)  # the position of each patch in its order
    rows: list[Tensor] = []
    for step in range(steps + 1):
        kept = (ranks >= round(step / steps * ranks.shape[1])).unflatten(1, grid)
        pixels = kept.repeat_interleave(height, dim=1).repeat_interleave(width, dim=2)
        pixels = pixels[:, None, : image.shape[1], : image.shape[2]]  # the last cells of a stem may be cut off
        logits = model((image * pixels.to(image)).contiguous())
        assert isinstance(logits, Tensor)
        rows.append((logits.sigmoid() if multi_label else logits.softmax(dim=1)).float().cpu())
    label = int(rows[0][0].argmax()) if label is None else label
    return torch.stack([probabilities[:, label] for probabilities in rows], dim=1)


def _interval(values: np.ndarray, seed: int) -> tuple[float, float]:
    """Return the 95% interval of the mean, by resampling images; NaN if they are too few."""
    if len(values) < MIN_IMAGES:
        return float("nan"), float("nan")
    indices = np.random.default_rng(seed).integers(0, len(values), (BOOTSTRAP, len(values)))
    low, high = np.quantile(values[indices].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)
