"""Tar shards, as WebDataset writes them: members KEY.jpg and KEY.cls. They are indexed once and read in place; nothing
is extracted, and names serve as keys only."""

import json
import re
import tarfile
from collections.abc import Iterable
from itertools import product
from pathlib import Path

from vitral.data.decode import SUFFIXES
from vitral.data.items import Dataset, InTar, Item
from vitral.errors import DataError

_LARGEST_LABEL = 64 * 1024


def expand_braces(pattern: str) -> list[Path]:
    """train-{000..009}.tar and {train,val}-0.tar, as shells have it."""
    parts = re.split(r"(\{[^{}]*\})", pattern)
    choices = []
    for part in parts:
        if not part.startswith("{"):
            choices.append([part])
        elif numbers := re.fullmatch(r"\{(\d+)\.\.(\d+)\}", part):
            first, last = numbers.groups()
            choices.append([str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)])
        else:
            choices.append(part[1:-1].split(","))
    paths = [Path("".join(words)).expanduser() for words in product(*choices)]
    if missing := [path for path in paths if not path.is_file()]:
        raise DataError(
            f"There is no shard {missing[0]}{f' (and {len(missing) - 1} more)' if len(missing) > 1 else ''}."
        )
    return paths


def open_shards(paths: Iterable[Path], folder: Path | None = None) -> Dataset:
    """All shards of a dataset; in a folder their names begin with the split."""
    found: dict[str, list[tuple[str, str | int | tuple[int, ...], InTar]]] = {}
    skipped: dict[str, str] = {}
    notes: list[str] = []
    paths = list(paths)
    for path in paths:
        split = next((name for name in ("train", "val", "test") if folder and path.name.startswith(name)), "train")
        found.setdefault(split, []).extend(_read_index(path, skipped, notes))
    home = paths[0].parent
    classes = _classes(home, {label for rows in found.values() for _, label, _ in rows})
    numbers = {name: index for index, name in enumerate(classes)}
    splits: dict[str, tuple[Item, ...]] = {}
    for split, rows in found.items():
        items = []
        for key, label, source in rows:
            number = numbers.get(label) if isinstance(label, str) else label
            if number is None or (isinstance(number, int) and not 0 <= number < len(classes)):
                skipped[key] = f"label {label!r} is none of the {len(classes)} classes"
            else:
                items.append(Item(key, number, source))
        splits[split] = tuple(items)
    if not any(splits.values()):
        reason = f" ({next(iter(skipped.values()))})" if skipped else ""
        raise DataError(
            f"The shards in {home} hold no picture with a label{reason}.", hint="Members are KEY.jpg and KEY.cls."
        )
    if skipped:
        notes.append(f"{len(skipped)} members were left out: {next(iter(skipped.values()))}.")
    name = folder.resolve().name if folder else paths[0].stem
    multi = any(isinstance(item.label, tuple) for items in splits.values() for item in items)
    return Dataset(name=name, classes=classes, splits=splits, notes=tuple(notes), skipped=skipped, multi_label=multi)


def _classes(folder: Path, labels: set[str | int | tuple[int, ...]]) -> tuple[str, ...]:
    listed = folder / "classes.txt"
    if listed.is_file():
        return tuple(line.strip() for line in listed.read_text(encoding="utf-8").splitlines() if line.strip())
    names = sorted(label for label in labels if isinstance(label, str))
    if names:
        return tuple(names)
    numbers = [label for label in labels if isinstance(label, int)]
    numbers += [number for label in labels if isinstance(label, tuple) for number in label]
    return tuple(str(number) for number in range(max(numbers, default=-1) + 1))


def _read_index(
    path: Path, skipped: dict[str, str], notes: list[str]
) -> list[tuple[str, str | int | tuple[int, ...], InTar]]:
    pictures: dict[str, InTar] = {}
    labels: dict[str, str | int | tuple[int, ...]] = {}
    try:
        with tarfile.open(path, "r:") as shard:
            for member in shard:
                _take(shard, member, path, pictures, labels, skipped)
    except (tarfile.TarError, EOFError, OSError) as error:
        if not pictures:
            raise DataError(f"{path} is no tar shard: {error}.") from error
        notes.append(f"{path.name} is cut off; the {len(pictures)} pictures before that are used.")
    for key in pictures.keys() - labels.keys():
        skipped[f"{path.stem}/{key}"] = "no label beside it"
    return [(f"{path.stem}/{key}", labels[key], source) for key, source in pictures.items() if key in labels]


def _take(
    shard: tarfile.TarFile,
    member: tarfile.TarInfo,
    path: Path,
    pictures: dict[str, InTar],
    labels: dict[str, str | int | tuple[int, ...]],
    skipped: dict[str, str],
) -> None:
    if member.isdir():
        return
    key, _, ending = member.name.rpartition("/")[2].partition(".")
    parts = member.name.replace("\\", "/").split("/")
    if not member.isreg() or member.issparse() or ".." in parts or member.name.startswith("/"):
        skipped[f"{path.stem}/{member.name[:100]}"] = "no plain file inside the shard"
    elif f".{ending.lower()}".endswith(SUFFIXES):
        pictures[key] = InTar(str(path), member.offset_data, member.size)
    elif ending in ("cls", "txt", "json") and member.size <= _LARGEST_LABEL:
        stream = shard.extractfile(member)
        label = _parse_label(stream.read() if stream else b"", ending)
        if label is not None:
            labels.setdefault(key, label)


def _parse_label(content: bytes, ending: str) -> str | int | tuple[int, ...] | None:
    try:
        text = content.decode("utf-8").strip()
        if ending == "json":
            told = json.loads(text)
            label = told.get("label", told.get("cls")) if isinstance(told, dict) else told
            if isinstance(label, list):
                return tuple(sorted({int(number) for number in label}))
            return label if isinstance(label, str | int) else None
        return int(text) if ending == "cls" and re.fullmatch(r"\d+", text) else text if ending == "cls" else None
    except (ValueError, TypeError, RecursionError):
        return None
