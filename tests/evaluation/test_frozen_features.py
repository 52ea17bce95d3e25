"""Few-shot regression and nearest neighbors against plain numpy in float64."""

import numpy as np
import pytest
import torch

import vitral
from vitral.evaluation.frozen_features import (
    choose_shots,
    few_shot_accuracy,
    fit_ridge,
    knn_accuracy,
    one_hot_targets,
    whiten,
)


def features(images: int, width: int, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(seed)
    labels = np.arange(images) % classes
    centers = np.random.default_rng(99).normal(size=(classes, width))
    rows = centers[labels] + random.normal(size=(images, width)) * 1.8
    return torch.tensor(rows, dtype=torch.float32), torch.tensor(labels)


@pytest.mark.parametrize(("shots", "width"), [(1, 16), (5, 16), (25, 16), (2, 64)])
def test_few_shot_is_the_papers_ridge_regression(shots: int, width: int) -> None:
    train, labels = features(200, width, 6, seed=0)
    test, truth = features(120, width, 6, seed=1)
    few = torch.cat([torch.arange(0, 200, 6)[: max(1, shots // 2)], (labels > 0).nonzero()[:, 0]])
    train, labels = train[few], labels[few]  # class 0 has fewer images, so that the bias matters
    train[:, 0] *= 1e-5  # one feature hardly varies, so that epsilon matters
    test[:, 0] *= 1e-5
    chosen = choose_shots(labels, shots, 2).numpy()
    accuracy = few_shot_accuracy(train[chosen], labels[chosen], test, truth, classes=6)
    x, y = train.double().numpy()[chosen], labels.numpy()[chosen]
    assert np.bincount(y).tolist() == [max(1, shots // 2), *[shots] * 5]
    mean, std = x.mean(0), x.std(0) + 1e-5

    def with_bias(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([(rows - mean) / std, np.full((len(rows), 1), 100.0)], axis=1)

    a, targets = with_bias(x), 2.0 * np.eye(6)[y] - 1.0
    weights = np.linalg.solve(a.T @ a + 1024 * np.eye(width + 1), a.T @ targets)
    expected = (with_bias(test.double().numpy()) @ weights).argmax(1)
    assert accuracy == pytest.approx((expected == truth.numpy()).mean())
    assert 0.2 < accuracy <= 1.0
    fitted = fit_ridge(whiten(train[chosen], train[chosen]), one_hot_targets(labels[chosen], 6))
    np.testing.assert_allclose(fitted.numpy(), weights, atol=1e-9)


@pytest.mark.parametrize("rows", [5, 40])
def test_the_ridge_is_the_same_through_either_gram_matrix(rows: int) -> None:
    x, y = torch.randn(rows, 12, dtype=torch.double), torch.randn(rows, 3, dtype=torch.double)
    expected = torch.linalg.solve(x.T @ x + 1024 * torch.eye(12, dtype=torch.double), x.T @ y)
    torch.testing.assert_close(fit_ridge(x, y), expected, atol=1e-12, rtol=1e-9)


def test_other_seeds_choose_other_images_and_small_classes_are_used_whole() -> None:
    labels = torch.tensor([0] * 30 + [1] * 30 + [2] * 3)
    first, second = choose_shots(labels, 5, 0), choose_shots(labels, 5, 1)
    assert torch.equal(first, choose_shots(labels, 5, 0))
    assert not torch.equal(first, second)
    assert torch.bincount(labels[first]).tolist() == [5, 5, 3]


@pytest.mark.parametrize("k", [1, 5, 10])
def test_neighbors_vote_by_cosine(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitral.evaluation.frozen_features.MAX_SIMILARITIES", 150 * 300)
    train, labels = features(150, 12, 5, seed=0)
    test, truth = features(1100, 12, 5, seed=1)  # four chunks
    accuracy = knn_accuracy(train, labels, test, truth, k=k, classes=5)
    a, b = (rows.double().numpy() for rows in (train, test))
    a, b = a / np.linalg.norm(a, axis=1, keepdims=True), b / np.linalg.norm(b, axis=1, keepdims=True)
    correct = 0
    for row, label in zip(b @ a.T, truth.numpy(), strict=True):
        nearest = np.argsort(-row)[:k]
        votes, sums = np.zeros(5), np.zeros(5)
        for index in nearest:
            votes[labels[index]] += 1
            sums[labels[index]] += row[index]
        correct += max(range(5), key=lambda c: (votes[c], sums[c] if votes[c] else -9)) == label
    assert accuracy == pytest.approx(correct / len(truth))


def test_more_neighbors_than_training_images_are_refused() -> None:
    train, labels = features(10, 4, 2, seed=0)
    with pytest.raises(vitral.ConfigError, match="knn.*from 1 to 10.*got 11"):
        knn_accuracy(train, labels, train, labels, k=11, classes=2)
