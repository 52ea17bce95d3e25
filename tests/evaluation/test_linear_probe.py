"""Linear probes against scikit-learn, and the properties of their folds."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from vitral.evaluation.linear_probe import (
    SHRINKAGES,
    STRENGTHS,
    choose_folds,
    cross_validate,
    cross_validate_discriminant,
    refit_probe,
)
from vitral.evaluation.metrics import score


def clusters(images: int, width: int, classes: int, *, distance: float = 0.5, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % classes
    centers = distance * torch.randn(classes, width, generator=random)
    return centers[labels] + torch.randn(images, width, generator=random) + 3.0, labels


@pytest.mark.parametrize(("images", "width"), [(300, 20), (40, 100)])  # through both decompositions
def test_equal_to_scikit_learn(images: int, width: int) -> None:
    features, labels = clusters(images, width, 4)
    probe = cross_validate(features, labels, classes=4, folds=choose_folds(labels)).fit()
    centered = features - features.mean(0)
    scaled = centered / centered.square().mean().sqrt()
    reference = LogisticRegression(C=1 / (probe.strength * images), max_iter=10_000, tol=1e-8)
    reference.fit(scaled.numpy(), labels.numpy())
    expected = torch.from_numpy(reference.predict_proba(scaled.numpy())).float()
    # Both stop at a finite gradient; in float32 the probabilities agree to three digits.
    torch.testing.assert_close(probe(features).softmax(1), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize(("images", "width"), [(300, 20), (40, 100)])
@pytest.mark.parametrize("shrinkage", [0.1, 0.7])
def test_discriminant_is_that_of_scikit_learn(images: int, width: int, shrinkage: float) -> None:
    features, labels = clusters(images, width, 4)
    folds = choose_folds(labels)
    probe = cross_validate_discriminant(features, labels, classes=4, folds=folds, shrinkages=(shrinkage,)).fit()
    # The mean variance is over the dimensions that the images span, scikit-learn's over all of them.
    ratio = shrinkage / (1 - shrinkage) * width / min(images, width)
    reference = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=ratio / (1 + ratio))
    reference.fit(features.double().numpy(), labels.numpy())
    theirs = torch.from_numpy(reference.decision_function(features.double().numpy()))
    logits = [scores - scores.mean(1, keepdim=True) for scores in (probe(features).double(), theirs)]
    ours, theirs = (scores / scores.std() for scores in logits)  # up to the temperature
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_discriminant_knows_how_frequent_classes_are() -> None:
    features, labels = clusters(400, 8, 2, distance=0.3)
    kept = (labels == 0) | (torch.arange(400) < 120)
    features, labels = features[kept], labels[kept]
    settings: dict[str, Any] = {"classes": 2, "folds": choose_folds(labels)}
    frequent = cross_validate_discriminant(features, labels, **settings)
    equal = cross_validate_discriminant(features, labels, class_weights=torch.ones(2), **settings)
    assert frequent.strength in SHRINKAGES
    assert frequent.fit()(features).argmax(1).sum() < equal.fit()(features).argmax(1).sum()


def test_discriminant_is_better_with_few_images_per_class() -> None:
    features, labels = clusters(300, 100, 30, distance=0.7)
    held_out, truth = clusters(900, 100, 30, distance=0.7)
    held_out, truth = held_out[300:], truth[300:]
    folds, stretch = choose_folds(labels), torch.logspace(-1, 1, 100)  # what varies most says least
    accuracies = [
        score(function(features * stretch, labels, classes=30, folds=folds).fit()(held_out * stretch), truth).top1
        for function in (cross_validate_discriminant, cross_validate)
    ]
    assert accuracies[0] > accuracies[1]


def test_calibrated_logits_have_a_temperature_of_one() -> None:
    features, labels = clusters(200, 30, 4, distance=0.3)
    result = cross_validate(features, labels, classes=4, folds=choose_folds(labels))
    calibrated = result.calibrate()
    assert calibrated.calibrate().temperature == pytest.approx(calibrated.temperature, rel=1e-3)
    assert score(calibrated.out_of_fold, labels).loss <= score(result.out_of_fold, labels).loss + 1e-4
    ratio = result.fit().weight / calibrated.fit().weight
    torch.testing.assert_close(ratio, torch.full_like(ratio, calibrated.temperature), rtol=1e-3, atol=0)


@pytest.mark.parametrize("function", [cross_validate, cross_validate_discriminant])
def test_a_refit_to_the_same_images_is_the_probe(function: Any) -> None:
    features, labels = clusters(90, 12, 3)
    probe = function(features, labels, classes=3, folds=choose_folds(labels)).calibrate().fit()
    again = refit_probe(probe, features, labels)
    torch.testing.assert_close(again(features).softmax(1), probe(features).softmax(1), rtol=0, atol=2e-3)


def test_out_of_fold_predictions_do_not_see_their_fold() -> None:
    features, labels = clusters(200, 30, 2, distance=0.0)  # nothing to learn
    probe = cross_validate(features, labels, classes=2, folds=choose_folds(labels)).fit()
    assert 0.3 < score(probe.out_of_fold, labels).top1 < 0.7
    assert probe.strength >= STRENGTHS[4]  # strong, since everything else overfits


def test_strength_is_a_minimum_of_the_cross_validated_loss() -> None:
    features, labels = clusters(150, 40, 3)
    folds = choose_folds(labels)
    probe = cross_validate(features, labels, classes=3, folds=folds).fit()
    index = STRENGTHS.index(probe.strength)
    for other in (STRENGTHS[max(0, index - 1)], STRENGTHS[min(len(STRENGTHS) - 1, index + 1)]):
        logits = torch.zeros(len(labels), 3)
        for fold in range(5):
            train = folds != fold
            centered = features - features.mean(0)
            scaled = (centered / centered.square().mean().sqrt()).numpy()
            model = LogisticRegression(C=1 / (other * int(train.sum())), max_iter=10_000)
            model.fit(scaled[train], labels[train])
            logits[~train] = torch.from_numpy(model.decision_function(scaled[~train])).float()
        loss = F.cross_entropy(logits, labels).item()
        assert score(probe.out_of_fold, labels).loss <= loss + 0.01


def test_views_are_fitted_and_the_first_is_predicted() -> None:
    features, labels = clusters(60, 10, 3)
    folds = choose_folds(labels)
    once = cross_validate(features, labels, classes=3, folds=folds).fit()
    twice = cross_validate(features, labels, classes=3, folds=folds, extra_views=[features.clone()]).fit()
    assert twice.out_of_fold.shape == once.out_of_fold.shape == (60, 3)
    torch.testing.assert_close(twice(features).softmax(1), once(features).softmax(1), rtol=0, atol=0.01)


def test_multi_label_is_one_sigmoid_per_class() -> None:
    features, labels = clusters(120, 16, 2)
    both = torch.stack([labels, 1 - labels], dim=1)
    probe = cross_validate(features, both, classes=2, folds=choose_folds(both)).fit()
    logits = probe(features)
    torch.testing.assert_close(logits[:, 0], -logits[:, 1], rtol=0, atol=0.05)  # the classes are complements
    assert score(probe.out_of_fold, both).top1 > 0.8


def test_class_weights_balance_rare_classes() -> None:
    features, labels = clusters(400, 8, 2, distance=0.3)
    kept = (labels == 0) | (torch.arange(400) < 40)
    features, labels = features[kept], labels[kept]
    folds, weights = choose_folds(labels), torch.tensor([0.5, 5.0])
    plain = cross_validate(features, labels, classes=2, folds=folds).fit()(features).argmax(1)
    balanced = cross_validate(features, labels, classes=2, folds=folds, class_weights=weights).fit()(features).argmax(1)
    assert balanced.sum() > plain.sum()


@pytest.mark.parametrize("function", [cross_validate, cross_validate_discriminant])
@pytest.mark.parametrize("classes", [2, 7])
def test_two_images_per_class_and_classes_with_one(classes: int, function: Any) -> None:
    features, labels = clusters(2 * classes, 12, classes, distance=3.0)
    features, labels = features[1:], labels[1:]  # class 0 has one image
    probe = function(features, labels, classes=classes, folds=choose_folds(labels)).fit()
    assert score(probe(features), labels).top1 == 1.0
    assert probe.out_of_fold.isfinite().all()


@pytest.mark.parametrize("function", [cross_validate, cross_validate_discriminant])
def test_constant_features(function: Any) -> None:
    labels = torch.arange(20) % 2
    probe = function(torch.ones(20, 5), labels, classes=2, folds=choose_folds(labels)).fit()
    assert probe.weight.isfinite().all()
    assert probe(torch.ones(1, 5)).softmax(1).tolist() == [[pytest.approx(0.5, abs=1e-3)] * 2]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=5, max_size=80), st.integers(0, 100))
def test_folds_have_equal_shares_of_every_class(labels: list[int], seed: int) -> None:
    folds = choose_folds(torch.tensor(labels), seed=seed)
    sizes = folds.bincount(minlength=5)
    assert sizes.max() - sizes.min() <= 1
    for label in set(labels):
        counts = folds[torch.tensor(labels) == label].bincount(minlength=5)
        assert counts.max() - counts.min() <= 1


def test_groups_stay_together() -> None:
    labels = torch.from_numpy(np.random.default_rng(0).integers(0, 3, 90))
    groups = torch.arange(90) // 3
    labels = labels[groups]
    folds = choose_folds(labels, groups=groups)
    assert all(folds[groups == group].unique().numel() == 1 for group in range(30))
    assert folds.unique().tolist() == [0, 1, 2, 3, 4]


def test_folds_of_multi_label_images_spread_the_rarest_label() -> None:
    labels = torch.zeros(50, 2, dtype=torch.long)
    labels[:, 0] = 1
    labels[:10, 1] = 1
    folds = choose_folds(labels)
    assert folds[:10].bincount(minlength=5).tolist() == [2, 2, 2, 2, 2]
