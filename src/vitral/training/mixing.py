"""Mixup and CutMix within a batch, soft targets, and the losses on them."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.collectives import current_world, gather
from vitral.training.config import LossKind, Mix

Generator = np.random.Generator


def mix_batch(
    images: Tensor, targets: Tensor, mix: Mix, random: Generator, previous: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(B, C, H, W) and (B, K): apply mixup or CutMix with the next image of the batch, as in the paper's code.

    Of a batch that several processes share, `images` are those of this process, `previous` has the image before each
    of them, and the targets are those of the whole batch.
    """
    mixers = [(mixer, alpha) for mixer, alpha in ((mixup, mix.mixup), (cutmix, mix.cutmix)) if alpha > 0]
    if not mixers or len(targets) < 2:
        return images, targets
    mixer, alpha = mixers[int(random.integers(len(mixers)))]
    return mixer(images, targets, alpha, random, previous)


def previous_images(images: Tensor) -> Tensor:
    """Return the image before each of a batch that several processes share: the first follows that of another."""
    world = current_world()
    last = gather(images[-1:].cpu())
    before = next(image for rank in range(1, world.size + 1) if len(image := last[world.rank - rank]))
    return torch.cat([before.to(images.device), images[:-1]]) if len(images) else images


def mixup(
    images: Tensor, targets: Tensor, alpha: float, random: Generator, previous: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Blend each image with the next ("mixup", Zhang et al. 2017), with one weight of at least 0.5 per batch."""
    previous = images.roll(1, 0) if previous is None else previous
    weight = float(random.beta(alpha, alpha))
    weight = max(weight, 1 - weight)
    return images.lerp(previous, 1 - weight), targets.lerp(targets.roll(1, 0), 1 - weight)


def cutmix(
    images: Tensor, targets: Tensor, alpha: float, random: Generator, previous: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Paste a rectangle of the next image ("CutMix", Yun et al. 2019) and weight the labels by the area."""
    previous = images.roll(1, 0) if previous is None else previous
    height, width = images.shape[-2:]
    side = np.sqrt(1 - float(random.beta(alpha, alpha)))
    h, w = round(height * side), round(width * side)
    y, x = int(random.integers(height)), int(random.integers(width))
    top, bottom = max(0, y - h // 2), min(height, y + h - h // 2)
    left, right = max(0, x - w // 2), min(width, x + w - w // 2)
    mixed = images.clone()
    mixed[..., top:bottom, left:right] = previous[..., top:bottom, left:right]
    covered = (bottom - top) * (right - left) / (height * width)
    return mixed, targets.lerp(targets.roll(1, 0), covered)


def soft_targets(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """Return (B, K) targets: one-hot, or the labels of multi-label data, smoothed."""
    targets = F.one_hot(labels, classes).float() if labels.ndim == 1 else labels.float()
    return targets if not smoothing else targets * (1 - smoothing) + smoothing / classes


def soft_loss(
    logits: Tensor, targets: Tensor, kind: LossKind, weights: Tensor | None, batch: Tensor | None = None
) -> Tensor:
    """Return the mean loss over the images: cross-entropy, or the sum of binary cross-entropies over the classes.

    Class weights make it a weighted mean, or weight the positives. `batch` has the targets of the whole batch: the
    losses of its parts add up to its loss.
    """
    logits = logits.float()
    batch = targets if batch is None else batch
    if kind == "softmax":
        losses = -(targets * (weights if weights is not None else 1.0) * logits.log_softmax(dim=1)).sum(dim=1)
        return losses.sum() / (len(batch) if weights is None else (batch * weights).sum())
    losses = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights, reduction="none")
    return losses.sum() / len(batch)


def balanced_weights(counts: list[int]) -> Tensor:
    """Return a weight per class, inverse to its number of images, with mean 1 over the images."""
    images = torch.tensor(counts, dtype=torch.float64)
    is_present = images > 0
    weights = torch.where(is_present, images.sum() / (is_present.sum() * images.clamp(min=1)), 0.0)
    return weights.float()
