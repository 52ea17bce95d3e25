"""Which logit is the truth: between the classes of a dataset and the labels of a model, with a map where their names
differ, and several truths a picture where somebody has labelled them anew (ReaL)."""

import csv
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitral.data.dataset import Item
from vitral.errors import DataError


def read_label_map(path: Path) -> list[tuple[str, str | int]]:
    """(class, label or number of the logit): a JSON object or list, or lines of "class label" (.csv: "class,label", in
    quotation marks where a name has a comma). With one word a line the number of the line counts."""
    text = _read(path)
    if path.suffix.lower() == ".json":
        told = _parse(text, path)
        if isinstance(told, list):
            return [(str(name), number) for number, name in enumerate(told)]
        if not isinstance(told, dict) or not all(type(value) in (str, int) for value in told.values()):
            raise DataError(f"{path} must be a JSON object from class to label, or a list of classes.")
        return list(told.items())
    between = {".csv": ",", ".tsv": "\t"}.get(path.suffix.lower())
    rows: list[tuple[str, str | int]] = []
    lines = list(filter(str.strip, text.splitlines()))
    try:
        split = csv.reader(lines, delimiter=between) if between else (line.split(maxsplit=1) for line in lines)
        for name, *label in split:
            rows.append((name.strip(), (between or " ").join(label).strip() if label else len(rows)))
    except csv.Error as error:
        raise DataError(f"{path} is no table: {error}.") from error
    return rows


def renumber(
    items: Sequence[Item],
    classes: Sequence[str],
    labels: tuple[str, ...],
    *,
    has_names: bool,
    label_map: Path | None = None,
) -> tuple[Item, ...]:
    """The items, with the numbers of the model's logits for labels."""
    places = _places(labels)
    if label_map is not None:
        numbers = _by_map(classes, labels, label_map)
    elif list(classes) == list(labels):
        return tuple(items)
    elif has_names and all(map(places.__contains__, classes)):
        numbers = [places[name] for name in classes]
    elif len(classes) == len(labels) and (not has_names or are_numbers(classes)):
        numbers = list(range(len(classes)))
    else:
        raise DataError(
            f"The data have {len(classes)} classes, and {_misfit(classes, labels, has_names=has_names)}.",
            hint="Give --label-map: a file with lines of the data's class and the model's label.",
        )
    return tuple(replace(item, label=_renumbered(item.label, numbers)) for item in items)


def _places(labels: Sequence[str]) -> dict[str, int]:
    """Of the labels that no other is called as."""
    times = Counter(labels)
    return {name: number for number, name in enumerate(labels) if times[name] == 1}


def _misfit(classes: Sequence[str], labels: tuple[str, ...], *, has_names: bool) -> str:
    """Why names do not lead from the classes to the labels."""
    if not has_names:
        return f"the model has {len(labels)} classes without names"
    name = next(name for name in classes if labels.count(name) != 1)
    times = labels.count(name)
    return f"{times} of the model's labels are called {name!r}" if times else f"the model knows no {name!r}"


def are_numbers(classes: Sequence[str]) -> bool:
    return list(classes) == [str(number) for number in range(len(classes))]


def _by_map(classes: Sequence[str], labels: tuple[str, ...], path: Path) -> list[int]:
    rows = read_label_map(path)
    places = _places(labels)
    numbers = [_number_of(label, places, len(labels)) for _, label in rows]
    are_synsets = all(re.fullmatch("n[0-9]+", name) for name, _ in rows)
    if are_synsets and len(rows) == len(labels) and all(number is None for number in numbers):
        numbers = list(range(len(rows)))  # ImageNet's list of synsets and their descriptions, in the model's order
    found: dict[str, int] = {}
    for (name, label), number in zip(rows, numbers, strict=True):
        if number is None:
            known = ", ".join(labels[:5]) + (", ..." if len(labels) > 5 else "")
            raise DataError(f"{path}: {label!r} is none of the model's {len(labels)} labels ({known}).")
        if found.setdefault(name, number) != number:
            raise DataError(
                f"{path}: the class {name!r} is {labels[found[name]]!r} in one line and {label!r} in another."
            )
    if missing := [name for name in classes if name not in found]:
        raise DataError(f"{path} has no line for the class {missing[0]!r}.")
    return [found[name] for name in classes]


def _number_of(label: str | int, places: dict[str, int], most: int) -> int | None:
    """Of a label that is a name, or the number itself."""
    if isinstance(label, str) and label in places:
        return places[label]
    number = int(label) if isinstance(label, int) or re.fullmatch(r"[0-9]{1,9}", label) else -1
    return number if 0 <= number < most else None


def _renumbered(label: int | tuple[int, ...], numbers: Sequence[int]) -> int | tuple[int, ...]:
    return numbers[label] if isinstance(label, int) else tuple(sorted(numbers[part] for part in label))


def read_real(path: Path, keys: Sequence[str], classes: int) -> list[tuple[int, ...]]:
    """The true labels of each picture: a JSON object from file name to labels, or ReaL's list, whose k-th entry is for
    the file whose name ends in the number k + 1 (ILSVRC2012_val_00000001.JPEG)."""
    told = _parse(_read(path), path)
    truths = []
    for key in keys:
        name = key.rpartition("/")[2]
        if isinstance(told, dict):
            found = told.get(key, told.get(name, told.get(name.partition(".")[0])))
        else:
            number = re.search(r"(\d+)$", name.partition(".")[0])
            place = int(number[1]) - 1 if number else -1
            found = told[place] if isinstance(told, list) and 0 <= place < len(told) else None
        if not isinstance(found, list) or not all(type(one) is int and 0 <= one < classes for one in found):
            raise DataError(f"{path} has no labels from 0 to {classes - 1} for {key}.")
        truths.append(tuple(found))
    if not any(truths):
        raise DataError(f"{path} has no label for any of the {len(keys)} pictures, so nothing can be right.")
    return truths


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # Excel begins its files with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def _parse(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no valid JSON: {error}.") from error
