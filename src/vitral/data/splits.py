"""Decide which images to train on, which choose the best epoch (validation), and which are held out (test)."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from vitral.data.dataset import DatasetIndex, FileSource, Item, TarSource, check_classes, class_counts, content_digest
from vitral.data.headers import BadImageError
from vitral.data.remote import RemoteSource
from vitral.errors import DataError

TEST_FRACTION = 0.2
"""The fraction of each class that is held out if a dataset has no split of its own."""
VAL_FRACTION = 0.1
"""The fraction of the training images that chooses the best epoch if a dataset has no validation split."""
TEST_SPLIT_REASON = "about a fifth of each class, by a hash of the names"
_TAIL_BYTES = 4096
"""Files of one size are compared by their last bytes before they are read as a whole."""


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The images of each split, and the reasons for the validation and test splits."""

    train: tuple[Item, ...]
    validation: tuple[Item, ...]
    test: tuple[Item, ...]
    reasons: dict[str, str]
    is_validation_carved: bool = False
    """Whether the validation images were taken from the training images and serve nothing else."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """The group of each image that the dataset has for training, for folds: equal names belong together."""
    notes: tuple[str, ...] = ()
    """Remarks on the images that were dropped, and on classes with one image."""


def choose_splits(
    data: DatasetIndex,
    other: DatasetIndex | None = None,
    val_fraction: float = VAL_FRACTION,
    groups: Mapping[str, str] | None = None,
) -> Splits:
    """Return the train, validation and test splits of a dataset.

    The test split is that of `other` (--val), the dataset's own, or about a fifth of each class. The validation split
    is the dataset's own if that is not the test split already, or a part of the training images. Images of one group
    (those of the dataset, and `groups`: a name for some or all keys) and equal images are not divided. The images that
    the dataset drops are left out of the train and validation splits, never of the test split.
    """
    train = data.splits.get("train", ())
    leaders, is_carved = find_equal(train), False
    if data.groups or groups:
        named = merge_groups(data.groups, groups or {}, leaders)
        leaders = {key: named[key] for key in leaders}
    reasons = {}
    if other is not None:
        test, reasons["test"] = relabel(other, data.classes), "the dataset given with --val"
    elif name := own_test_split(data):
        test, reasons["test"] = data.splits[name], f"the dataset's {name} split"
    else:
        train, test = split_off(train, leaders=leaders)
        reasons["test"] = TEST_SPLIT_REASON if data.classes else "about a fifth, by a hash of the names"
        reasons["test"] += "; groups are not divided" if data.groups or groups else ""
    train, notes = _without_dropped(data, train), _describe_dropped(data, test if other is None else ())
    notes = (*notes, *_describe_single_images(data, train))
    if data.dropped and data.classes:
        check_classes(replace(data, splits={"train": train}))
    if "val" in data.splits and ("test" in data.splits or other is not None):
        validation, reasons["validation"] = _without_dropped(data, data.splits["val"]), "the dataset's val split"
    else:
        rest, part = split_off(train, val_fraction, salt="selection", leaders=leaders)
        if part and len(rest) > len(part):
            train, validation, is_carved = rest, part, True
            reasons["validation"] = f"about {100 * val_fraction:.6g} % of the training images"
        else:
            validation, reasons["validation"] = train, "the training images: there are too few to hold some out"
    if not train:
        raise DataError(f"{data.name} has no training images.", hint="Call the folder of training images train.")
    if not test:
        test, is_carved = validation, False
        reasons["test"] = "the validation images: there are too few to hold others out"
        if validation is train:
            reasons["test"] = "the training images themselves, so scores mean little: there are too few"
    return Splits(
        train=train,
        validation=validation,
        test=test,
        reasons=reasons,
        is_validation_carved=is_carved,
        groups=leaders,
        notes=notes,
    )


def _without_dropped(data: DatasetIndex, items: tuple[Item, ...]) -> tuple[Item, ...]:
    return tuple(item for item in items if item.key not in data.dropped) if data.dropped else items


def _describe_dropped(data: DatasetIndex, test: Sequence[Item]) -> tuple[str, ...]:
    """Return notes on how many images are dropped, and how many of them stay because they are test images."""
    kept = sum(item.key in data.dropped for item in test)
    notes = {
        "Images dropped from the train and validation splits": len(data.dropped) - kept,
        "Images listed to drop that stay in the test split": kept,
    }
    return tuple(f"{note}: {count:,}." for note, count in notes.items() if count)


def _describe_single_images(data: DatasetIndex, train: Sequence[Item]) -> tuple[str, ...]:
    """Return a note on the classes that have a single image to learn from."""
    counts = class_counts(train, len(data.classes))
    names = [name for name, count in zip(data.classes, counts, strict=True) if count == 1]
    shown = f"{', '.join(names[:5])}{', ...' if names[5:] else ''}"
    return (f"Classes with a single training image: {len(names):,} ({shown}). Add more images.",) if names else ()


def own_test_split(data: DatasetIndex) -> str | None:
    """Return the name of the dataset's own test split: test, else val, else None."""
    return next((name for name in ("test", "val") if name in data.splits), None)


def relabel(other: DatasetIndex, classes: tuple[str, ...]) -> tuple[Item, ...]:
    """Return the test images of another dataset (all images if it has no splits), labeled by these classes."""
    if unknown := sorted(set(other.classes) - set(classes)):
        names = ", ".join(unknown[:5])
        raise DataError(f"{other.name} has classes that the training dataset does not have: {names}.")
    items = other.splits.get(own_test_split(other) or "train", ())
    if not classes:  # unlabeled images
        return items
    index_of = {name: index for index, name in enumerate(classes)}
    relabeled = []
    for item in items:
        labels = tuple(index_of[other.classes[label]] for label in item.labels)
        relabeled.append(replace(item, label=labels if isinstance(item.label, tuple) else labels[0]))
    return tuple(relabeled)


def split_off(
    items: Sequence[Item],
    fraction: float = TEST_FRACTION,
    salt: str = "held out",
    leaders: Mapping[str, str] | None = None,
) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Split items by a hash of their names: return (rest, part), with about `fraction` of each class in the part.

    New images do not move others to the other side, and equal images stay on one side. A class of two or more groups
    has at least one on each side (a group may be needed elsewhere for another of its labels). `leaders` names the group
    of each image; by default it is the result of `find_equal`.
    """
    leaders = find_equal(items) if leaders is None else leaders
    groups_of: dict[int, set[str]] = {}
    for item in items:
        for label in item.labels:
            groups_of.setdefault(label, set()).add(leaders[item.key])
    position = {leader: _hash_position(leader, salt) for members in groups_of.values() for leader in members}
    chosen = {leader for leader in position if position[leader] < fraction}
    for members in groups_of.values():
        groups = sorted(members, key=position.__getitem__)
        inside = [leader for leader in groups if leader in chosen]
        if len(groups) > 1 and not inside:
            chosen.add(groups[0])
        elif inside and len(inside) == len(groups):  # the only group of a class is for training
            chosen.discard(groups[-1])
    rest = tuple(item for item in items if leaders[item.key] not in chosen)
    return rest, tuple(item for item in items if leaders[item.key] in chosen)


def merge_groups(*mappings: Mapping[str, str]) -> dict[str, str]:
    """Return the group of each key, where keys belong together if any of the mappings gives them the same group.

    A merged group is named as in the first mapping that names it, by the smallest of the names there. If another group
    has that name already, a prime is added.
    """
    parents: dict[tuple[int, str], tuple[int, str]] = {}

    def find_root(node: tuple[int, str]) -> tuple[int, str]:
        while (parent := parents.setdefault(node, node)) != node:
            parents[node] = parents[parent]
            node = parents[node]
        return node

    for number, mapping in enumerate(mappings):
        for key, name in mapping.items():  # a smaller node is always the root: names before keys
            first, second = sorted((find_root((number, name)), find_root((len(mappings), key))))
            parents[second] = first
    roots = {key: find_root((len(mappings), key)) for mapping in mappings for key in mapping}
    names: dict[str, tuple[int, str]] = {}
    for root in sorted(set(roots.values())):
        name = root[1]
        while name in names:
            name += "'"
        names[name] = root
    name_of = {root: name for name, root in names.items()}
    return {key: name_of[root] for key, root in roots.items()}


def sample_items(items: Sequence[Item], count: int, *, balanced: bool = False) -> tuple[Item, ...]:
    """Return `count` items in their order, chosen by a hash of their names; balanced: an equal share of each class."""
    if count >= len(items):
        return tuple(items)
    ordered = sorted(items, key=lambda item: _hash_position(item.key, "sample"))
    if balanced:
        seen: Counter[tuple[int, ...]] = Counter()
        ranks: dict[str, int] = {}
        for item in ordered:
            ranks[item.key] = seen[item.labels]
            seen[item.labels] += 1
        ordered.sort(key=lambda item: ranks[item.key])
    chosen = {item.key for item in ordered[:count]}
    return tuple(item for item in items if item.key in chosen)


def _hash_position(key: str, salt: str) -> float:
    """Return a number from 0 to 1 that depends on the name only."""
    digest = hashlib.sha256(f"{salt}\n{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def find_equal(items: Sequence[Item]) -> dict[str, str]:
    """Map each key to the first item with the same bytes. Only items that share size and last bytes are read."""
    groups = [list(items)]
    for property_of in (_size, _read_tail, _digest):
        groups = [part for group in groups for part in _group(group, property_of) if len(part) > 1]
    return {item.key: item.key for item in items} | {item.key: group[0].key for group in groups for item in group}


def _group(items: Iterable[Item], property_of: Callable[[Item], object]) -> Iterable[list[Item]]:
    """Return the items of equal property together, without those that do not have it."""
    groups: dict[object, list[Item]] = {}
    for item in items:
        groups.setdefault(property_of(item), []).append(item)
    return [group for value, group in groups.items() if value is not None]


def _size(item: Item) -> int | None:
    if isinstance(item.source, FileSource):
        with suppress(OSError, ValueError):  # ValueError: a zero byte in the name
            return os.stat(item.source.path).st_size
    return item.source.size if isinstance(item.source, TarSource | RemoteSource) else None


def _read_tail(item: Item) -> bytes:
    """Return the last bytes of a large file, or b"" for a small one, which is compared as a whole."""
    source, size = item.source, _size(item) or 0
    if size > 2 * _TAIL_BYTES and isinstance(source, FileSource | TarSource):
        start = source.offset if isinstance(source, TarSource) else 0
        with suppress(OSError, ValueError, OverflowError), open(source.path, "rb") as stream:
            stream.seek(start + size - _TAIL_BYTES)
            return stream.read(_TAIL_BYTES)
    return b""


def _digest(item: Item) -> bytes | None:
    if isinstance(item.source, RemoteSource):
        return item.source.digest or None
    with suppress(BadImageError):  # reported when the image is loaded
        return content_digest(item.source.read())
    return None
