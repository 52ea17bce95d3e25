"""Check a dataset before training: classes, sizes, unreadable images, duplicates, leaks between splits."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vitral.data.dataset import DatasetIndex, Item, check_classes, class_counts, content_digest, natural_channels
from vitral.data.decode import decode
from vitral.data.dropping import drop_images, without_dropped
from vitral.data.grouping import group_images
from vitral.data.headers import BadImageError, Header, read_header
from vitral.data.sources import open_dataset
from vitral.data.splits import Splits, choose_splits
from vitral.data.streaming import read_in_order
from vitral.errors import DataError, check_number

MAX_BAD_FRACTION = 0.01
"""Training stops if a larger fraction of the training images is unreadable."""
MAX_NAMES = 10
_IMBALANCE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Images read so far."""

    done: int
    total: int


@dataclass(kw_only=True, slots=True)
class Scan:
    """The result of `vitral.scan`."""

    name: str
    classes: tuple[str, ...]
    multi_label: bool
    splits: dict[str, int]
    """Images per split."""
    per_class: dict[str, list[int]]
    """Images per class, by split."""
    groups: int = 0
    """Number of groups of images that stay in one split."""
    dropped: int = 0
    """Images that are left out, as training would."""
    channels: int = 3
    """Channels of a model for these images: 1 for gray, 3 for color, or the number of bands."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Smallest, median and largest height and width."""
    aspects: dict[str, int] = field(default_factory=dict)
    """Number of tall, square and wide images."""
    modes: dict[str, int] = field(default_factory=dict)
    formats: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Name and reason of each unreadable image."""
    duplicates: list[list[str]] = field(default_factory=list)
    """Groups of equal images within a split."""
    leaked: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of equal images: one in the train split, one in another."""
    contradictions: list[list[str]] = field(default_factory=list)
    """Groups of equal images with different labels."""
    problems: list[str] = field(default_factory=list)
    """Reasons why training would fail."""
    warnings: list[str] = field(default_factory=list)
    """Findings that do not prevent training."""

    @property
    def can_train(self) -> bool:
        """Return whether nothing prevents training."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and `can_train`, for JSON."""
        return {**asdict(self), "can_train": self.can_train}


def scan(
    data: str | Path | DatasetIndex,
    *,
    headers_only: bool = False,
    max_bad_fraction: float = MAX_BAD_FRACTION,
    group_by: str | None = None,
    drop: str | Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Scan:
    """Read every image of a dataset once and return what was found.

    `headers_only` skips decoding, which is faster but misses damaged pixels. More unreadable training images than the
    fraction `max_bad_fraction` are a problem. `group_by` (a column or a regular expression) and `drop` (a CSV file) are
    as in `vitral.train`. `on_progress` is called with a `Progress` after every 64 images.

        result = vitral.scan("photos/")
        result.can_train, result.problems, result.unreadable
    """
    index = data if isinstance(data, DatasetIndex) else open_dataset(data)
    index = group_images(drop_images(index, drop), group_by)
    events = scan_events(index, headers_only=headers_only, max_bad_fraction=max_bad_fraction)
    while isinstance(event := next(events), Progress):
        if on_progress:
            on_progress(event)
    return event


def scan_events(
    data: DatasetIndex, *, headers_only: bool = False, max_bad_fraction: float = MAX_BAD_FRACTION
) -> Iterator[Progress | Scan]:
    """Scan a dataset: yield progress, and the result last."""
    check_number("max_bad_fraction", max_bad_fraction, minimum=0, maximum=1)
    images = sum(map(len, data.splits.values()))
    data = without_dropped(data)
    result = Scan(
        name=data.name,
        classes=data.classes,
        multi_label=data.multi_label,
        splits={split: len(items) for split, items in data.splits.items()},
        per_class={split: class_counts(items, len(data.classes)) for split, items in data.splits.items()},
        groups=len(set(data.groups.values())),
        dropped=images - sum(map(len, data.splits.values())),
        warnings=list(data.notes),
    )
    items = [(split, item) for split, members in data.splits.items() for item in members]
    by_digest: dict[bytes, list[tuple[str, Item]]] = {}
    headers: list[tuple[Item, Header]] = []
    read = read_in_order([item for _, item in items])
    for number, ((split, item), content) in enumerate(zip(items, read, strict=True), 1):
        try:
            content = content or item.source.read()
            by_digest.setdefault(content_digest(content), []).append((split, item))
            header = read_header(content)
            if not headers_only:
                decode(content, header=header, channels=3 if header.bands == 1 else header.bands)
            headers.append((item, replace(header, profile=None)))  # profiles of many images would fill the memory
        except BadImageError as error:
            result.unreadable[item.key] = str(error)
        if number % 64 == 0:
            yield Progress(done=number, total=len(items))
    _measure(result, [header for _, header in headers])
    _find_odd_bands(result, headers)
    _compare(result, by_digest)
    _judge_classes(result, data)
    _judge_unreadable(result, data, max_bad_fraction)
    _judge_copies(result)
    yield result


def _measure(result: Scan, headers: Sequence[Header]) -> None:
    if not headers:
        return
    result.modes = dict(Counter(header.mode for header in headers).most_common())
    result.formats = dict(Counter(header.format for header in headers).most_common())
    sides = [(header.height, header.width) for header in headers]
    for name, values in zip(("height", "width"), map(sorted, zip(*sides, strict=True)), strict=True):
        result.sizes |= {f"{name}_smallest": values[0], f"{name}_median": values[len(values) // 2]}
        result.sizes[f"{name}_largest"] = values[-1]
    aspects = Counter("square" if h * 0.95 <= w <= h * 1.05 else "wide" if w > h else "tall" for h, w in sides)
    result.aspects = dict(aspects.most_common())


def _find_odd_bands(result: Scan, headers: Sequence[tuple[Item, Header]]) -> None:
    """Report images whose number of bands does not fit the others."""
    result.channels = natural_channels([header for _, header in headers])
    for item, header in headers:
        if header.bands == result.channels or {header.bands, result.channels} <= {1, 3}:
            continue
        try:
            decode(item.source.read(), channels=result.channels, header=header)
        except BadImageError as error:
            result.unreadable[item.key] = str(error)


def _compare(result: Scan, by_digest: dict[bytes, list[tuple[str, Item]]]) -> None:
    for members in by_digest.values():
        if len(members) < 2:
            continue
        if len({item.label for _, item in members}) > 1:
            result.contradictions.append([item.key for _, item in members])
        splits: dict[str, list[str]] = {}
        for split, item in members:
            splits.setdefault(split, []).append(item.key)
        result.duplicates += [keys for keys in splits.values() if len(keys) > 1]
        if "train" in splits:
            others = [key for split, keys in splits.items() if split != "train" for key in keys]
            result.leaked += [(splits["train"][0], key) for key in others]


def _judge_classes(result: Scan, data: DatasetIndex) -> None:
    train = result.per_class.get("train", [0] * len(data.classes))
    if not any(train):
        result.problems.append("There are no training images.")
    try:
        check_classes(data)
    except DataError as error:
        result.problems.append(error.message)
    totals = [sum(counts) for counts in zip(*result.per_class.values(), strict=True)]
    per_class = list(zip(data.classes, train, totals, strict=True))
    if untrained := [name for name, count, total in per_class if total and not count]:
        result.problems.append(f"Classes in other splits without training images: {_first(untrained)}.")
    if empty := [name for name, _, total in per_class if not total]:
        result.warnings.append(f"Classes without images: {_first(empty)}.")
    if single := [name for name, count, _ in per_class if count == 1]:
        result.warnings.append(f"Classes with one training image: {_first(single)}.")
    lowercase = Counter(name.lower() for name in data.classes)
    if twins := [name for name in data.classes if lowercase[name.lower()] > 1]:
        result.warnings.append(f"Classes that differ only in upper and lower case: {_first(twins)}.")
    used = [count for count in train if count]
    if used and max(used) > _IMBALANCE * min(used):
        ratio = f"{max(used) / min(used):.0f} times as many images as the smallest"
        result.warnings.append(f"The largest class has {ratio}; training weights the classes.")


def max_bad_images(total: int, max_fraction: float) -> float:
    """Return how many of `total` training images may be unreadable. A small dataset may have as many as one of 100."""
    return max_fraction * max(total, 100)


def _judge_unreadable(result: Scan, data: DatasetIndex, max_bad_fraction: float) -> None:
    """Count unreadable images as training does: too many training images, or all test images, end it."""
    if not (bad := len(result.unreadable)):
        return
    splits = _split(data)
    train, test = (sum(item.key in result.unreadable for item in items) for items in (splits.train, splits.test))
    limit = max_bad_images(len(splits.train), max_bad_fraction)
    if train and (train == len(splits.train) or train > limit):
        counted = f"{train} of {len(splits.train)} training images are unreadable"
        result.problems.append(f"{counted} (expected at most {int(limit)}). Replace or delete them.")
    elif splits.test and test == len(splits.test):
        result.problems.append(f"All {test} test images are unreadable. Replace them.")
    else:
        are = "image is unreadable; training skips it" if bad == 1 else "images are unreadable; training skips them"
        result.warnings.append(f"{bad} {are}.")


def _split(data: DatasetIndex) -> Splits:
    """Return the splits that training would choose; all images for training if it would refuse the dataset."""
    try:
        return choose_splits(data)
    except DataError:
        items = tuple(item for members in data.splits.values() for item in members)
        return Splits(train=items, validation=(), test=(), reasons={})


def _judge_copies(result: Scan) -> None:
    if leaked := len(result.leaked):
        result.warnings.append(f"{leaked} images of other splits are also in train; scores will be inflated.")
    if copies := sum(len(group) - 1 for group in result.duplicates):
        result.warnings.append(f"{copies} images are copies of others in the same split.")
    if contradictions := len(result.contradictions):
        result.warnings.append(f"{contradictions} images occur with different labels.")
    if "test" not in result.splits and "val" not in result.splits:
        result.warnings.append("There is no test split: training holds out about a fifth of each class.")


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
