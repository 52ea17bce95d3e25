"""Match the classes of a dataset with the labels of a model: by name, by a label map, or with ReaL labels."""

import csv
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vitral.data.dataset import Item
from vitral.errors import DataError


def read_label_map(path: Path) -> list[tuple[str, str | int]]:
    """Read (class, label or logit index) pairs.

    The file is a JSON object or list, or lines of "class label" (.csv: "class,label", quoted if a name has a comma).
    A line with one word maps that class to the number of the line.
    """
    text = _read_text(path)
    if path.suffix.lower() == ".json":
        content = _parse_json(text, path)
        if isinstance(content, list):
            return [(str(name), index) for index, name in enumerate(content)]
        if not isinstance(content, dict) or not all(type(value) in (str, int) for value in content.values()):
            raise DataError(f"{path} is not a label map; expected a JSON object of class: label, or a list of classes.")
        return list(content.items())
    delimiter = {".csv": ",", ".tsv": "\t"}.get(path.suffix.lower())
    rows: list[tuple[str, str | int]] = []
    lines = list(filter(str.strip, text.splitlines()))
    try:
        fields = csv.reader(lines, delimiter=delimiter) if delimiter else (line.split(maxsplit=1) for line in lines)
        for name, *label in fields:
            rows.append((name.strip(), (delimiter or " ").join(label).strip() if label else len(rows)))
    except csv.Error as error:
        raise DataError(f"{path} is not a valid table: {error}.") from error
    return rows


def match_classes(
    classes: Sequence[str], labels: tuple[str, ...], *, has_names: bool, label_map: str | Path | None = None
) -> list[int]:
    """Return the logit index of each class: by label map, name or position (of numbers). Raise DataError otherwise."""
    positions = unique_positions(labels)
    if label_map is not None:
        return _apply_map(classes, labels, Path(label_map))
    unmatched = [name for name in classes if name not in positions]
    if has_names and not unmatched:
        return [positions[name] for name in classes]
    if len(classes) == len(labels) and (not has_names or are_numbers(classes) or list(classes) == list(labels)):
        return list(range(len(classes)))
    mismatch = f"it has {len(labels)} classes without names"
    if has_names:
        name, count = unmatched[0], labels.count(unmatched[0])
        mismatch = f"{count} of its labels are named {name!r}" if count else f"it has no label {name!r}"
    hint = "Pass --label-map FILE with lines of a dataset class and a model label."
    raise DataError(f"The dataset's {len(classes)} classes do not match the model: {mismatch}.", hint=hint)


def relabel(items: Sequence[Item], indices: Sequence[int]) -> tuple[Item, ...]:
    """Return the items labeled with logit indices instead of classes."""

    def index_of(label: int | tuple[int, ...]) -> int | tuple[int, ...]:
        return indices[label] if isinstance(label, int) else tuple(sorted(indices[number] for number in label))

    return tuple(replace(item, label=index_of(item.label)) for item in items)


def unique_positions(labels: Sequence[str]) -> dict[str, int]:
    """Return the logit index of each label name that occurs once."""
    counts = Counter(labels)
    return {name: index for index, name in enumerate(labels) if counts[name] == 1}


def are_numbers(classes: Sequence[str]) -> bool:
    """Return whether the class names are "0", "1", "2", ... in order."""
    return list(classes) == [str(number) for number in range(len(classes))]


def _apply_map(classes: Sequence[str], labels: tuple[str, ...], path: Path) -> list[int]:
    """Return the logit index of each class by a label map file."""
    rows = read_label_map(path)
    positions = unique_positions(labels)
    indices = [_index_of(label, positions, len(labels)) for _, label in rows]
    are_synsets = all(re.fullmatch("n[0-9]+", name) for name, _ in rows)
    if are_synsets and len(rows) == len(labels) and all(index is None for index in indices):
        indices = list(range(len(rows)))  # ImageNet's synset list with descriptions, in the model's order
    mapped: dict[str, int] = {}
    for (name, label), index in zip(rows, indices, strict=True):
        if index is None:
            examples = ", ".join(labels[:5]) + (", ..." if len(labels) > 5 else "")
            raise DataError(f"{path}: {label!r} is not one of the model's {len(labels)} labels ({examples}).")
        if mapped.setdefault(name, index) != index:
            raise DataError(f"{path} maps the class {name!r} to both {labels[mapped[name]]!r} and {label!r}.")
    if missing := [name for name in classes if name not in mapped]:
        raise DataError(f"{path} has no line for the class {missing[0]!r}.")
    return [mapped[name] for name in classes]


def _index_of(label: str | int, positions: dict[str, int], classes: int) -> int | None:
    """Return the logit index of a label name or number, or None if the model has no such label."""
    if isinstance(label, str) and label in positions:
        return positions[label]
    index = int(label) if isinstance(label, int) or re.fullmatch(r"[0-9]{1,9}", label) else -1
    return index if 0 <= index < classes else None


def read_real(path: Path, keys: Sequence[str], classes: int) -> list[tuple[int, ...]]:
    """Read the true labels of each image from a JSON object of file name: labels, or from ReaL's list.

    Entry k of a list is for the file name that ends in the number k + 1 (ILSVRC2012_val_00000001.JPEG).
    """
    content = _parse_json(_read_text(path), path)
    true_labels: list[tuple[int, ...]] = []
    for key in keys:
        labels = _real_labels(content, key)
        if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < classes for label in labels):
            raise DataError(f"{path} has no labels from 0 to {classes - 1} for {key}.")
        true_labels.append(tuple(labels))
    if not any(true_labels):
        raise DataError(f"{path} has no label for any of the {len(keys)} images.")
    return true_labels


def _real_labels(content: object, key: str) -> object:
    """Return the entry of one image in the content of a ReaL file, or None."""
    name = key.rpartition("/")[2]
    stem = name.partition(".")[0]
    if isinstance(content, dict):
        return content.get(key, content.get(name, content.get(stem)))
    number = re.search(r"(?<!\d)(\d{1,18})$", stem)
    index = int(number[1]) - 1 if number else -1
    return content[index] if isinstance(content, list) and 0 <= index < len(content) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # Excel starts its files with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read {path}: {error}.") from error


def _parse_json(text: str, path: Path) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}.") from error
