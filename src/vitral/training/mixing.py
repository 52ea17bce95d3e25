"""Mixup and CutMix: pictures of a batch mixed with each other, and their labels with them."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.training.config import Mix

Generator = np.random.Generator


def mix_batch(images: Tensor, targets: Tensor, mix: Mix, random: Generator) -> tuple[Tensor, Tensor]:
    """(B, C, H, W) and (B, K): one of the two that are on, with the partner one place further, as the paper's code."""
    chosen = [kind for kind, alpha in (("mixup", mix.mixup), ("cutmix", mix.cutmix)) if alpha > 0]
    if not chosen or len(images) < 2:
        return images, targets
    kind = chosen[int(random.integers(len(chosen)))]
    return mixup(images, targets, mix.mixup, random) if kind == "mixup" else cutmix(images, targets, mix.cutmix, random)


def mixup(images: Tensor, targets: Tensor, alpha: float, random: Generator) -> tuple[Tensor, Tensor]:
    """ "mixup" (Zhang et al. 2017): one weight of at least a half for the whole batch."""
    weight = float(random.beta(alpha, alpha))
    weight = max(weight, 1 - weight)
    return images.lerp(images.roll(1, 0), 1 - weight), targets.lerp(targets.roll(1, 0), 1 - weight)


def cutmix(images: Tensor, targets: Tensor, alpha: float, random: Generator) -> tuple[Tensor, Tensor]:
    """ "CutMix" (Yun et al. 2019): a rectangle of the partner; labels by the area that is left."""
    height, width = images.shape[-2:]
    part = np.sqrt(1 - float(random.beta(alpha, alpha)))
    h, w = round(height * part), round(width * part)
    y, x = int(random.integers(height)), int(random.integers(width))
    top, bottom = max(0, y - h // 2), min(height, y + h - h // 2)
    left, right = max(0, x - w // 2), min(width, x + w - w // 2)
    mixed = images.clone()
    mixed[..., top:bottom, left:right] = images.roll(1, 0)[..., top:bottom, left:right]
    covered = (bottom - top) * (right - left) / (height * width)
    return mixed, targets.lerp(targets.roll(1, 0), covered)


def as_targets(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """(B, K) of what each logit should say: one-hot, or the labels of multi-label data, smoothed."""
    targets = F.one_hot(labels, classes).float() if labels.ndim == 1 else labels.float()
    return targets if not smoothing else targets * (1 - smoothing) + smoothing / classes


def soft_loss(
    logits: Tensor, targets: Tensor, kind: str, weights: Tensor | None, whole: Tensor | None = None
) -> Tensor:
    """softmax: cross-entropy; sigmoid: the sum over classes of binary ones. Mean over the pictures; with class weights
    the weighted mean, or the weight of a yes against a no. ``whole`` are the targets of the batch that these are a part
    of: parts add up to its loss."""
    logits = logits.float()
    whole = targets if whole is None else whole
    if kind == "softmax":
        each = -(targets * (weights if weights is not None else 1.0) * logits.log_softmax(dim=1)).sum(dim=1)
        return each.sum() / (len(whole) if weights is None else (whole * weights).sum())
    each = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights, reduction="none")
    return each.sum() / len(whole)


def balanced_weights(counts: list[int]) -> Tensor:
    """Inverse to how common a class is, with mean 1 over the pictures."""
    numbers = torch.tensor(counts, dtype=torch.float64)
    present = numbers > 0
    weights = torch.where(present, numbers.sum() / (present.sum() * numbers.clamp(min=1)), 0.0)
    return weights.float()
