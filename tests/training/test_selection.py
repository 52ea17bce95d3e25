"""BestEpoch decides which model is kept and when training stops early."""

from math import nan

from vitral.evaluation.metrics import Scores
from vitral.training.selection import BestEpoch


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
