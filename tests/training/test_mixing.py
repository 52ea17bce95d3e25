"""Mixup, CutMix, soft targets and losses against values computed by hand."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitral.training.config import LossKind, Mix
from vitral.training.mixing import balanced_weights, cutmix, mix_batch, mixup, soft_loss, soft_targets


def test_mixup_and_cutmix_mix_images_and_labels_alike() -> None:
    images, targets = torch.arange(4.0)[:, None, None, None].expand(4, 3, 8, 8).clone(), torch.eye(4)
    mixed, labels = mixup(images, targets, 0.5, np.random.default_rng(0))
    weight = np.random.default_rng(0).beta(0.5, 0.5)
    weight = max(weight, 1 - weight)
    assert labels[1].tolist() == pytest.approx([1 - weight, weight, 0, 0])
    assert mixed[1, 0, 0, 0].item() == pytest.approx(weight * 1 + (1 - weight) * 0)
    for seed in range(20):
        mixed, labels = cutmix(images, targets, 1.0, np.random.default_rng(seed))
        covered = (mixed[1] == 0).float().mean().item()
        assert labels[1].tolist() == pytest.approx([covered, 1 - covered, 0, 0], abs=1e-6)


def test_mix_batch_uses_the_kinds_that_are_on() -> None:
    images, targets = torch.arange(4.0)[:, None, None, None].expand(4, 3, 8, 8).clone(), torch.eye(4)
    same, _ = mix_batch(images, targets, Mix(), np.random.default_rng(0))
    assert same is images
    alone, _ = mix_batch(images[:1], targets[:1], Mix(mixup=1.0), np.random.default_rng(0))
    assert torch.equal(alone, images[:1])  # a single image has no other to mix with
    is_blended: set[bool] = set()
    for seed in range(20):
        mixed, _ = mix_batch(images, targets, Mix(mixup=1.0, cutmix=1.0), np.random.default_rng(seed))
        is_blended.add(bool((mixed != mixed.round()).any()))  # CutMix keeps the values of pixels
    assert is_blended == {True, False}


def test_losses_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 0.5]])
    targets = soft_targets(torch.tensor([0, 2]), 3, 0.3)
    assert targets[0].tolist() == pytest.approx([0.8, 0.1, 0.1])
    log = logits.double().log_softmax(1)
    expected = -(targets * log).sum(1).mean()
    assert soft_loss(logits, targets, "softmax", None).item() == pytest.approx(expected.item(), abs=1e-6)
    probability = logits.double().sigmoid()
    each = -(targets * probability.log() + (1 - targets) * (1 - probability).log())
    assert soft_loss(logits, targets, "sigmoid", None).item() == pytest.approx(each.sum(1).mean().item(), abs=1e-6)
    weights = balanced_weights([30, 10, 0])
    assert weights.tolist() == pytest.approx([2 / 3, 2.0, 0.0])
    labels = torch.tensor([0, 1])
    weighted = F.cross_entropy(logits, labels, weight=weights)
    assert soft_loss(logits, soft_targets(labels, 3, 0), "softmax", weights).item() == pytest.approx(weighted.item())


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_parts_of_a_batch_add_up_to_its_loss_with_class_weights(kind: LossKind) -> None:
    logits, weights = torch.randn(12, 4), torch.tensor([0.2, 1.0, 3.0, 0.5])
    targets = soft_targets(torch.randint(0, 4, (12,)), 4, 0.1)
    whole = soft_loss(logits, targets, kind, weights)
    parts = [
        soft_loss(logits[start : start + 4], targets[start : start + 4], kind, weights, batch=targets)
        for start in (0, 4, 8)
    ]
    torch.testing.assert_close(sum(parts), whole)
    positive, negative = F.logsigmoid(logits), F.logsigmoid(-logits)
    by_hand = -(weights * targets * positive + (1 - targets) * negative).sum() / 12  # rare positives weigh more
    if kind == "sigmoid":
        torch.testing.assert_close(whole, by_hand)
