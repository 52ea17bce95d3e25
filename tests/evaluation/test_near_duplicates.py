"""Near-duplicates against scikit-learn's neighbors, their groups, and how much they inflate a random split."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from vitral.evaluation import near_duplicates
from vitral.evaluation.near_duplicates import (
    NearDuplicate,
    compare_splits,
    find_near_duplicates,
    group_keys,
    group_pairs,
)
from vitral.inference.novelty import fit_whitening


@pytest.mark.parametrize("max_similarities", [2**24, 500])  # in one block, and in many
def test_pairs_equal_scikit_learns_neighbors(max_similarities: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_duplicates, "MAX_SIMILARITIES", max_similarities)
    features = torch.randn(120, 6)
    mean, whitening = fit_whitening(features, shrinkage=near_duplicates.SHRINKAGE)
    whitened = ((features - mean) @ whitening).numpy()
    distances, indices = NearestNeighbors(metric="cosine", radius=0.1).fit(whitened).radius_neighbors(whitened)
    expected = {
        (first, int(second)): 1 - distance
        for first, (row, columns) in enumerate(zip(distances, indices, strict=True))
        for distance, second in zip(row, columns, strict=True)
        if first < second
    }
    pairs = find_near_duplicates(features, threshold=0.9)
    assert {(pair.first, pair.second) for pair in pairs} == set(expected)
    for pair in pairs:
        assert pair.similarity == pytest.approx(expected[pair.first, pair.second], abs=1e-5)
    assert [pair.similarity for pair in pairs] == sorted((pair.similarity for pair in pairs), reverse=True)


def test_equal_images_are_one_group_of_bounded_pairs() -> None:
    features = torch.cat([torch.ones(300, 4), -torch.ones(2, 4), torch.tensor([[1.0, -1, 1, -1]])])
    pairs = find_near_duplicates(features)
    assert len(pairs) <= 303 * near_duplicates.MAX_PAIRS
    assert all(pair.similarity == pytest.approx(1) and pair.similarity <= 1 for pair in pairs)
    assert group_pairs(pairs, 303).tolist() == [0] * 300 + [300] * 2 + [302]


def test_groups_are_chains_of_pairs() -> None:
    pairs = [NearDuplicate(first=first, second=second, similarity=1.0) for first, second in ((3, 4), (1, 2), (2, 4))]
    assert group_keys("abcdef", pairs) == {"a": "a", "b": "b", "c": "b", "d": "b", "e": "b", "f": "f"}


def test_ordinary_images_and_the_scale_of_the_features_do_not_matter() -> None:
    features = torch.randn(200, 32) * torch.linspace(0.01, 5, 32) + 20
    copies = features[:10] + 0.02 * features.std(0) * torch.randn(10, 32)
    pairs = find_near_duplicates(torch.cat([features, copies]))
    assert {(pair.first, pair.second) for pair in pairs} == {(index, 200 + index) for index in range(10)}


def test_a_class_that_fills_one_direction_has_no_near_duplicates() -> None:
    """Features of a supervised model have cosines near 1 within a class."""
    centers = 50 * torch.randn(4, 64)
    features = centers[torch.arange(400) % 4] + torch.randn(400, 64)
    cosine = torch.nn.functional.cosine_similarity(features[0], features[4], dim=0)
    assert cosine > 0.99
    assert find_near_duplicates(features) == []


def test_without_images() -> None:
    assert find_near_duplicates(torch.empty(0, 8)) == []
    assert find_near_duplicates(torch.ones(9, 8)) == []
    assert group_pairs([], 0).shape == (0,)


def test_bursts_inflate_a_random_split() -> None:
    """Labels that only a copy knows: a random split scores its memory, groups in one fold score chance."""
    random = np.random.default_rng(0)
    shots = torch.from_numpy(random.normal(size=(60, 40))).float()
    labels = torch.from_numpy(random.integers(0, 2, 60))
    features = shots.repeat_interleave(3, 0) + 0.01 * torch.randn(180, 40)
    labels = labels.repeat_interleave(3)
    groups = group_pairs(find_near_duplicates(features), 180)
    assert torch.equal(groups, torch.arange(180) // 3 * 3)
    comparison = compare_splits(features, labels, groups, classes=2)
    assert comparison is not None
    assert comparison.images == 180
    assert comparison.random > 0.9
    assert comparison.grouped < 0.7
    assert comparison.inflation == pytest.approx(comparison.random_in_groups - comparison.grouped_in_groups)


def test_nothing_to_compare_without_groups() -> None:
    assert compare_splits(torch.randn(20, 4), torch.arange(20) % 2, torch.arange(20), classes=2) is None
