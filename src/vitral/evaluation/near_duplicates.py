"""Find near-duplicates, such as resized copies and shots of one burst, by the cosine similarity of their features."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.evaluation.linear_probe import choose_folds, fit_probe

THRESHOLD = 0.97
MAX_SIMILARITIES = 2**24
"""Largest number of similarities in memory at once."""
MAX_PAIRS = 20
"""Largest number of pairs per image: a folder of equal images must not fill the memory with pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NearDuplicate:
    """Two images that are nearly equal, by their positions."""

    first: int
    second: int
    similarity: float


def find_near_duplicates(features: Tensor, *, threshold: float = THRESHOLD) -> list[NearDuplicate]:
    """Return the pairs of (N, D) features whose cosine similarity reaches the threshold, most similar first.

    Each image is compared with those after it, and its 20 most similar pairs are returned.
    """
    directions = F.normalize(features.float(), dim=1)
    pairs: list[NearDuplicate] = []
    rows = max(1, MAX_SIMILARITIES // max(1, len(directions)))
    for start in range(0, len(directions), rows):
        similarity = directions[start : start + rows] @ directions[start:].T
        similarity = similarity.triu(1)  # each pair once
        firsts, seconds = (similarity >= threshold).nonzero(as_tuple=True)
        for row in firsts.unique().tolist():
            columns = seconds[firsts == row]
            best = similarity[row, columns].topk(min(MAX_PAIRS, len(columns)))
            for value, column in zip(best.values.tolist(), columns[best.indices].tolist(), strict=True):
                pairs.append(NearDuplicate(first=start + row, second=start + column, similarity=min(1.0, value)))
    return sorted(pairs, key=lambda pair: (-pair.similarity, pair.first, pair.second))


def group_pairs(pairs: Sequence[NearDuplicate], images: int) -> Tensor:
    """Return (N,): the first image that each image is connected with by pairs, itself if there is none."""
    leaders = list(range(images))

    def leader_of(index: int) -> int:
        while leaders[index] != index:
            leaders[index] = leaders[leaders[index]]
            index = leaders[index]
        return index

    for pair in pairs:
        first, second = sorted((leader_of(pair.first), leader_of(pair.second)))
        leaders[second] = first
    return torch.tensor([leader_of(index) for index in range(images)], dtype=torch.long)


def group_keys(keys: Sequence[str], pairs: Sequence[NearDuplicate]) -> dict[str, str]:
    """Map the key of each image to that of the first image of its group, as `vitral.data.splits.find_equal` does."""
    leaders = group_pairs(pairs, len(keys)).tolist()
    return {key: keys[leader] for key, leader in zip(keys, leaders, strict=True)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitComparison:
    """The cross-validated accuracy of a probe with random folds, and with each group of images in one fold."""

    random: float
    grouped: float
    images: int
    """Number of images that are in a group with others."""
    random_in_groups: float
    """Accuracy on these images."""
    grouped_in_groups: float

    @property
    def inflation(self) -> float:
        """Return how much a random split overstates the accuracy."""
        return self.random - self.grouped


def compare_splits(
    features: Tensor, labels: Tensor, groups: Tensor, *, classes: int, seed: int = 0
) -> SplitComparison | None:
    """Measure how much near-duplicates in different folds inflate the accuracy; return None without such images.

    `groups` is the result of `group_pairs`, or any (N,) tensor with one number per group.
    """
    _, members, sizes = groups.unique(return_inverse=True, return_counts=True)
    shared = sizes[members] > 1
    if not shared.any():
        return None
    correct: list[Tensor] = []
    for kept in (None, groups):
        folds = choose_folds(labels, seed=seed, groups=kept)
        predicted = fit_probe(features, labels, classes=classes, folds=folds).out_of_fold.argmax(1)
        correct.append(predicted == labels if labels.ndim == 1 else labels.gather(1, predicted[:, None])[:, 0] > 0)
    (random, random_in_groups), (grouped, grouped_in_groups) = (
        (hits.double().mean().item(), hits[shared].double().mean().item()) for hits in correct
    )
    return SplitComparison(
        random=random,
        grouped=grouped,
        images=int(shared.sum()),
        random_in_groups=random_in_groups,
        grouped_in_groups=grouped_in_groups,
    )
