"""Keep near-duplicates in one split: find them by the checkpoint's features before the dataset is split."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vitral.data.dataset import DatasetIndex
from vitral.data.splits import Splits, own_test_split
from vitral.errors import VitralError
from vitral.evaluation.feature_cache import cached_features
from vitral.evaluation.near_duplicates import (
    SplitComparison,
    compare_splits,
    find_near_duplicates,
    group_keys,
    group_pairs,
)
from vitral.evaluation.suspects import NearDuplicateRow, load_for_features
from vitral.training.budget import Budget
from vitral.training.config import TrainConfig
from vitral.training.events import Chosen, Event, Warned
from vitral.training.probe import measuring
from vitral.training.timing import time_image

SIDE = 112
"""Images are compared at no more than this side in pixels, where features are cheap."""
MAX_IMAGES = 10_000
"""Larger datasets are searched only if near_duplicates=group."""
MAX_GROUPED = 0.3
"""If more of the images than this seem to have near-duplicates, the checkpoint cannot distinguish them."""
MAX_SHARE = 0.1
"""Largest share of a time budget for the search."""


@dataclass(frozen=True, kw_only=True)
class NearDuplicates:
    """Pairs of nearly equal images, and the groups that they form."""

    groups: Mapping[str, str] = field(default_factory=dict[str, str])
    """The first image of the group of each image that has a near-duplicate."""
    pairs: Sequence[tuple[str, str, float]] = ()
    is_searched: bool = False
    """Whether the images were compared at all."""
    comparison: SplitComparison | None = None
    """How much a random split would have overstated the accuracy."""

    def rows(self, splits: Splits) -> tuple[NearDuplicateRow, ...]:
        """Return the pairs, each with the splits that its images belong to."""
        names = {item.key: name for name in ("test", "validation", "train") for item in getattr(splits, name)}
        return tuple(
            NearDuplicateRow(
                file=first,
                other=second,
                similarity=similarity,
                split=names.get(first, ""),
                other_split=names.get(second, ""),
            )
            for first, second, similarity in self.pairs
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison for report.json."""
        return {} if self.comparison is None else {**asdict(self.comparison), "inflation": self.comparison.inflation}


def search_near_duplicates(
    config: TrainConfig, dataset: DatasetIndex, budget: Budget | None
) -> Generator[Event, None, NearDuplicates]:
    """Return the near-duplicates of the dataset of a run from a checkpoint, or none if that takes too long."""
    items = [item for split in dataset.splits.values() for item in split]
    if not config.starts_with_probe or config.near_duplicates == "ignore" or dataset.multi_label:
        return NearDuplicates()
    if config.near_duplicates == "auto" and len(items) > MAX_IMAGES:
        return NearDuplicates()
    assert config.from_weights is not None
    try:
        model = load_for_features(config.from_weights, device=config.device, max_image_size=SIDE)
        seconds = time_image(model, items)
        if config.near_duplicates == "auto" and budget and len(items) * seconds > MAX_SHARE * budget.left:
            yield Chosen(name="near_duplicates", value="ignore", reason="the search would take too much of the time")
            return NearDuplicates()
        features = yield from measuring(cached_features(model, items), "near-duplicates")
    except VitralError as error:  # reported again, and better, where the checkpoint or the images are needed
        yield Warned(message=f"Near-duplicates were not searched: {error.message}")
        return NearDuplicates()
    pairs, keys = find_near_duplicates(features.outputs), features.keys
    groups = group_keys(keys, pairs)
    shared = {name for key, name in groups.items() if key != name}
    grouped = sum(name in shared for name in groups.values())
    if config.near_duplicates == "auto" and grouped > MAX_GROUPED * len(keys):
        reason = f"{grouped:,} of {len(keys):,} images look nearly equal to this checkpoint"
        yield Chosen(name="near_duplicates", value="ignore", reason=reason)
        return NearDuplicates()
    if not pairs:
        return NearDuplicates(is_searched=True)
    comparison, reason = None, "listed; images of one split stay together"
    if config.val is None and own_test_split(dataset) is None:
        members, classes, reason = group_pairs(pairs, len(keys)), len(dataset.classes), "kept in one split"
        comparison = compare_splits(features.outputs, features.labels, members, classes=classes, seed=config.seed)
    yield Chosen(name="near_duplicates", value=f"{len(pairs):,} pairs", reason=reason)
    return NearDuplicates(
        groups={key: name for key, name in groups.items() if name in shared},
        pairs=tuple((keys[pair.first], keys[pair.second], pair.similarity) for pair in pairs),
        is_searched=True,
        comparison=comparison,
    )
