"""Which epoch is kept, when training stops early, and which of several models is the best."""

from math import nan

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitral.evaluation.metrics import Scores
from vitral.inference.pipeline import ModelOutputs
from vitral.training.selection import BestEpoch, choose_model


def test_the_best_epoch_is_by_accuracy_and_by_loss_if_accuracies_are_close() -> None:
    def is_better(top1: float, loss: float, images: int, best: float, best_loss: float) -> bool:
        scores = Scores(images=images, loss=loss, top1=top1, top5=1.0)
        return BestEpoch(top1=best, loss=best_loss).update(scores, step=1, epoch=1)

    assert is_better(0.5, 9.0, 100, -1.0, float("inf"))
    assert is_better(0.90, 0.30, 10_000, 0.80, 0.20)  # clearly better at any loss
    assert not is_better(0.80, 0.10, 10_000, 0.90, 0.20)  # clearly worse
    assert is_better(0.975, 0.10, 100, 0.985, 0.12)  # one image of a hundred is within the noise, so the loss decides
    assert not is_better(0.985, 0.13, 100, 0.975, 0.12)


def test_a_loss_that_creeps_down_is_no_progress() -> None:
    scores = Scores(images=100, loss=0.99995, top1=0.5, top5=1.0)
    assert not BestEpoch(top1=0.5, loss=1.0).update(scores, step=1, epoch=1)


def test_patience_counts_from_the_epoch_that_is_kept() -> None:
    """Predicted pixels have no accuracy, so the loss alone decides."""
    best = BestEpoch()
    for epoch, loss in enumerate((0.9, 0.8, 0.7, 0.75, 0.76)):
        is_kept = best.update(Scores(images=10, loss=loss, top1=nan, top5=nan), step=epoch + 1, epoch=epoch)
        assert is_kept == (epoch <= 2)
        assert best.should_stop(epoch, patience=2) == (epoch == 4)
    assert (best.step, best.epoch, best.loss) == (3, 2, 0.7)
    assert not best.should_stop(100, patience=0)
    assert not BestEpoch().should_stop(100, patience=1)


# ---- several models ----


def outputs_of(logits: torch.Tensor, labels: torch.Tensor) -> ModelOutputs:
    return ModelOutputs(items=(), outputs=logits, labels=labels, indices=torch.arange(len(labels)), unreadable=())


@given(
    seed=st.integers(0, 2**31),
    images=st.integers(1, 60),
    classes=st.integers(2, 6),
    models=st.integers(1, 5),
    is_multi_label=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_the_chosen_model_is_never_worse_than_the_probe(
    seed: int, images: int, classes: int, models: int, is_multi_label: bool
) -> None:
    random = torch.Generator().manual_seed(seed)
    shape = (images, classes) if is_multi_label else (images,)
    labels = torch.randint(2 if is_multi_label else classes, shape, generator=random)
    signal = labels if is_multi_label else torch.nn.functional.one_hot(labels, classes)
    compared = [
        outputs_of(torch.randn(images, classes, generator=random) + strength * signal, labels)
        for strength in torch.rand(models, generator=random) * 3
    ]
    best, reason = choose_model(compared)
    right = [int(outputs.correct.sum()) for outputs in compared]
    assert right[best] >= right[0]
    assert reason


def test_a_tie_keeps_the_simpler_model() -> None:
    labels = torch.tensor([0, 1, 0, 1])
    logits = torch.nn.functional.one_hot(labels, 2) * 2.0
    assert choose_model([outputs_of(logits, labels)] * 3)[0] == 0
    sharper = outputs_of(logits * 2, labels)  # the same after calibration
    assert choose_model([outputs_of(logits, labels), sharper])[0] == 0
    wrong = outputs_of(-logits, labels)
    assert choose_model([sharper, wrong])[0] == 0
    best, reason = choose_model([wrong, sharper])
    assert best == 1
    assert "gains 4 of 4" in reason


def test_loss_decides_between_models_of_nearly_equal_accuracy() -> None:
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (60,), generator=random)
    signal = torch.nn.functional.one_hot(labels, 3).float()
    noisy = torch.randn(60, 3, generator=random)
    weak, strong = outputs_of(noisy + 1.5 * signal, labels), outputs_of(noisy / 3 + 1.5 * signal, labels)
    wrong = strong.outputs.clone()
    wrong[strong.correct.nonzero()[:1].flatten()] *= -1  # one correct image fewer, at a higher loss
    assert choose_model([weak, strong])[0] == 1
    same = outputs_of(3 * weak.outputs + 3 * signal * weak.correct[:, None], labels)  # the same mistakes, a lower loss
    assert choose_model([weak, same]) == (
        1,
        "its loss is lower; it gains 0 of 60 validation images on the linear probe and loses 0",
    )
    assert choose_model([weak, strong, outputs_of(wrong, labels)])[0] == 1
    assert choose_model([weak, outputs_of(wrong, labels), strong])[0] == 2


def test_the_losses_of_very_few_images_do_not_replace_the_probe() -> None:
    for images in (3, 9, 10):
        labels = torch.arange(images) % 2
        probe = torch.nn.functional.one_hot(labels, 2) * torch.linspace(0.5, 2, images)[:, None]
        probe[0] *= -1  # the same mistake in both
        better = probe.clone()
        better[1:] *= 10
        assert choose_model([outputs_of(probe, labels), outputs_of(better, labels)])[0] == (images >= 10)
