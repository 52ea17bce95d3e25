"""Find near-duplicates, such as resized copies and shots of one burst, by their features."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.evaluation.linear_probe import choose_folds, cross_validate
from vitral.inference.novelty import fit_whitening

MIN_THRESHOLD, MAX_THRESHOLD = 0.6, 0.8
"""Bounds of the similarity that makes two images near-duplicates, measured in docs/decisions/near-duplicates.md."""
CROWD, CROWD_THRESHOLD = 20, 0.98
"""The upper bound if images have more neighbors above it than this, on average: a model that was trained on the dataset
makes all images of a class similar."""
SHRINKAGE = 1.0
MIN_IMAGES = 10
"""Fewer images do not show which similarity is ordinary."""
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


def find_near_duplicates(features: Tensor, *, threshold: float | None = None) -> list[NearDuplicate]:
    """Return the pairs of images whose (N, D) features are nearly equal, most similar first.

    Similarity is the cosine of whitened features. The default threshold is halfway between the median similarity of
    nearest neighbors and 1, within bounds. At most 20 pairs are returned per image. Memory is bounded.
    """
    images = len(features)
    if images < MIN_IMAGES:
        return []
    mean, whitening = fit_whitening(features, shrinkage=SHRINKAGE)
    directions = F.normalize((features.float() - mean) @ whitening, dim=1)
    nearest, neighbors = torch.zeros(images), 0
    pairs: list[NearDuplicate] = []
    rows = max(1, MAX_SIMILARITIES // images)
    for start in range(0, images, rows):
        similarity = (directions[start : start + rows] @ directions[start:].T).triu(1)  # each pair once
        block = slice(start, start + len(similarity))
        nearest[block] = torch.maximum(nearest[block], similarity.amax(1))
        nearest[start:] = torch.maximum(nearest[start:], similarity.amax(0))
        neighbors += 2 * int((similarity >= MAX_THRESHOLD).sum())
        pairs += _pairs_above(MIN_THRESHOLD if threshold is None else threshold, similarity, start)
    if threshold is None:
        highest = CROWD_THRESHOLD if neighbors > CROWD * images else MAX_THRESHOLD
        threshold = min(highest, max(MIN_THRESHOLD, (1 + nearest.median().item()) / 2))
    chosen = (pair for pair in pairs if pair.similarity >= threshold)
    return sorted(chosen, key=lambda pair: (-pair.similarity, pair.first, pair.second))


def _pairs_above(threshold: float, similarity: Tensor, start: int) -> Iterator[NearDuplicate]:
    """Yield the most similar pairs of each row of a block. Row and column 0 are the image `start`."""
    firsts, seconds = (similarity >= threshold).nonzero(as_tuple=True)
    counts = firsts.bincount(minlength=len(similarity)).tolist()
    for row, columns in enumerate(seconds.split(counts)):
        best = similarity[row, columns].topk(min(MAX_PAIRS, len(columns)))
        for value, column in zip(best.values.tolist(), columns[best.indices].tolist(), strict=True):
            yield NearDuplicate(first=start + row, second=start + column, similarity=min(1.0, value))


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
    leaders: list[int] = group_pairs(pairs, len(keys)).tolist()
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
        predicted = cross_validate(features, labels, classes=classes, folds=folds).out_of_fold.argmax(1)
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
