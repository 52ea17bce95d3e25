"""Label errors: planted ones are found, and images without evidence are left alone."""

import pytest
import torch
from torch import Tensor

from tests.evaluation.test_linear_probe import clusters
from vitral.errors import ConfigError
from vitral.evaluation.label_errors import find_label_errors
from vitral.evaluation.linear_probe import choose_folds, cross_validate


def predict_flipped(images: int, classes: int, *, flipped: int, distance: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return out-of-fold logits, labels of which the first `flipped` are wrong, and the true labels."""
    features, truth = clusters(images, 30, classes, distance=distance)
    labels = truth.clone()
    labels[:flipped] = (labels[:flipped] + 1) % classes
    probe = cross_validate(features, labels, classes=classes, folds=choose_folds(labels)).fit()
    return probe.out_of_fold, labels, truth


@pytest.mark.parametrize(("images", "classes"), [(400, 4), (100, 10)])  # 100 and 10 images per class
def test_flipped_labels_are_found_and_corrected(images: int, classes: int) -> None:
    flipped = images // 20
    logits, labels, truth = predict_flipped(images, classes, flipped=flipped, distance=1.5)
    errors = find_label_errors(logits, labels)
    found = {error.index for error in errors}
    assert len(found & set(range(flipped))) >= 0.8 * flipped
    assert len(found) <= 2 * flipped
    right = [error.suggested == truth[error.index] for error in errors if error.index < flipped]
    assert sum(right) >= 0.8 * len(right)
    assert all(error.label == labels[error.index] != error.suggested for error in errors)
    assert [error.score for error in errors] == sorted((error.score for error in errors), reverse=True)
    assert all(0.5 < error.score <= 1 for error in errors)


def test_correct_labels_of_separate_classes_are_not_suspects() -> None:
    logits, labels, _ = predict_flipped(80, 4, flipped=0, distance=3.0)
    assert find_label_errors(logits, labels) == []


def test_the_count_follows_the_definition_of_confident_learning() -> None:
    """With many images per class the thresholds are the plain means, and the count is their off-diagonal joint."""
    logits, labels, _ = predict_flipped(8000, 2, flipped=400, distance=0.3)
    probabilities = logits.double().softmax(1)
    means = torch.stack([probabilities[labels == k, k].mean() for k in range(2)])
    confident = torch.where(probabilities >= means, probabilities, -1.0)
    expected = int(((confident.max(1).values > 0) & (confident.argmax(1) != labels)).sum())
    assert len(find_label_errors(logits, labels)) == pytest.approx(expected, rel=0.05)  # the prior is 50 of 4,000


def test_classes_that_were_never_seen_are_not_suspects() -> None:
    logits = torch.full((12, 3), -9.0)
    logits[:, 0] = 9.0  # every image looks like class 0
    labels = torch.tensor([0] * 9 + [1, 1, 2])
    folds = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 0])
    assert {error.index for error in find_label_errors(logits, labels, folds=folds)} == {9, 10}
    folds[10] = 0  # both images of class 1 are in fold 0, as near-duplicates are
    assert find_label_errors(logits, labels, folds=folds) == []
    assert {error.index for error in find_label_errors(logits, labels)} == {9, 10}


def test_probabilities_of_zero_have_a_finite_score() -> None:
    logits = torch.tensor([[800.0, -800.0]] * 4 + [[-800.0, 800.0]] * 4)
    (error,) = find_label_errors(logits, torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]))
    assert (error.index, error.label, error.suggested, error.score) == (3, 1, 0, 1.0)


def test_no_images_and_multi_label() -> None:
    assert find_label_errors(torch.empty(0, 3), torch.empty(0, dtype=torch.long)) == []
    with pytest.raises(ConfigError, match="multi-label"):
        find_label_errors(torch.zeros(2, 3), torch.zeros(2, 3))
