"""Metrics as pure functions of logits and labels."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Of one split. Fractions from 0 to 1; top5 is top min(5, K)."""

    images: int
    loss: float
    top1: float
    top5: float

    def as_dict(self) -> dict[str, float]:
        return {"top1": self.top1, "top5": self.top5, "images": self.images, "loss": self.loss}


def score(logits: Tensor, labels: Tensor) -> Scores:
    """Single-label: (N, K) logits and (N,) classes; multi-label: (N, K) labels of 0 and 1, where the largest logit
    counts as right when it is one of the true classes."""
    images, classes = logits.shape
    if not images:
        return Scores(images=0, loss=float("nan"), top1=float("nan"), top5=float("nan"))
    order = logits.topk(min(5, classes), dim=1).indices
    if labels.ndim == 1:
        hits = order == labels[:, None]
        loss = F.cross_entropy(logits.double(), labels)
    else:
        hits = labels.gather(1, order) > 0
        loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double()) * classes
    return Scores(
        images=images,
        loss=loss.item(),
        top1=hits[:, 0].double().mean().item(),
        top5=hits.any(dim=1).double().mean().item(),
    )


def stack(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, 1)
