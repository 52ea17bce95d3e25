"""Tables: a column of pictures and a column of labels, as CSV or Parquet; datasets of the hub are Parquet, too."""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vitral.data.items import SPLITS, Dataset, InFile, InTable, Item, natural_order
from vitral.data.parquet import import_pyarrow
from vitral.errors import DataError

_PICTURES = ("image", "img", "file", "filename", "file_name", "path", "filepath", "image_path", "picture")
_LABELS = ("label", "labels", "class", "target", "category", "fine_label")
_SPLIT = ("split", "set", "subset")
Row = tuple[str, Any, object, str]
"""Key, source, label as it stands, split."""


def open_table(path: Path) -> Dataset:
    if not path.is_file():
        raise DataError(f"There is no table {path}.")
    rows, names = read_parquet(path, "train") if path.suffix.lower() == ".parquet" else (_read_csv(path), None)
    return build(path.stem, rows, names)


def build(name: str, rows: Iterable[Row], names: Sequence[str] | None) -> Dataset:
    """``names`` are those of the classes, where the labels are numbers."""
    rows = list(rows)
    if not rows:
        raise DataError(f"The table {name} has no rows.")
    lists = [label for _, _, label, _ in rows if isinstance(label, list | tuple)]
    flat = {str(label) for *_, label, _ in rows if not isinstance(label, list | tuple)}
    flat |= {str(label) for labels in lists for label in labels}
    classes = tuple(names) if names else tuple(sorted(flat, key=natural_order))
    numbers = {label: index for index, label in enumerate(classes)}
    if names:
        numbers |= {str(index): index for index in range(len(names))}
    splits: dict[str, list[Item]] = {}
    skipped: dict[str, str] = {}
    for key, source, label, split in rows:
        found = [numbers.get(str(part)) for part in (label if isinstance(label, list | tuple) else [label])]
        if None in found or (label in (None, "") and not isinstance(label, list | tuple)):
            skipped[key] = f"label {label!r} is no class"
            continue
        number = tuple(sorted(set(found))) if lists else found[0]  # type: ignore[type-var]
        splits.setdefault(SPLITS.get(split.lower(), "train"), []).append(Item(key, number, source))  # type: ignore[arg-type]
    notes = (f"{len(skipped)} rows have no usable label.",) if skipped else ()
    return Dataset(
        name=name,
        classes=classes,
        splits={split: tuple(items) for split, items in splits.items()},
        multi_label=bool(lists),
        skipped=skipped,
        notes=notes,
    )


def _find(columns: Sequence[str], known: Sequence[str], what: str, path: Path, needed: bool = True) -> str | None:
    found = [column for column in columns if column.strip().lower() in known]
    if len(found) == 1 or (found and not needed):
        return found[0]
    if len(found) > 1:
        raise DataError(
            f"{path} has several columns of {what}: {', '.join(found)}.", hint="Leave one; a model sees one picture."
        )
    if needed:
        raise DataError(
            f"{path} has no column of {what}; its columns are {', '.join(columns[:12]) or 'none'}.",
            hint=f"Call it one of {', '.join(known)}.",
        )
    return None


def _read_csv(path: Path) -> list[Row]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text in UTF-8: {error}.") from error
    first = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=first.count)
    reader = csv.DictReader(text.splitlines(), delimiter=delimiter)
    columns = [column for column in reader.fieldnames or () if column]
    picture, label = _find(columns, _PICTURES, "pictures", path), _find(columns, _LABELS, "labels", path)
    split = _find(columns, _SPLIT, "splits", path, needed=False)
    assert picture is not None
    assert label is not None
    is_multi = label.strip().lower() == "labels"
    rows: list[Row] = []
    for line in reader:
        name, value = (line.get(picture) or "").strip(), (line.get(label) or "").strip()
        if not name:
            continue
        labels = [part.strip() for part in value.replace(";", "|").replace(" ", "|").split("|") if part.strip()]
        content = InFile(str(path.parent / name))
        rows.append((name, content, labels if is_multi else value, (line.get(split) or "train") if split else "train"))
    return rows


def read_parquet(path: Path, split: str, key: str | None = None) -> tuple[list[Row], list[str] | None]:
    """The rows of a file, and the names of its classes where it has them. A row is called ``key`` and its number."""
    parquet = import_pyarrow()
    try:
        schema = parquet.read_schema(path)
    except Exception as error:  # pyarrow's own errors come from C++ under many names
        raise DataError(f"{path} is no Parquet table: {error}.") from error
    pictures = _picture_columns(schema)
    if len(pictures) > 1:
        raise DataError(f"{path} has several columns of pictures: {', '.join(pictures)}.", hint="Leave one.")
    picture = pictures[0] if pictures else _find(schema.names, _PICTURES, "pictures", path)
    label = _find(schema.names, _LABELS, "labels", path)
    part = _find(schema.names, _SPLIT, "splits", path, needed=False)
    assert picture is not None
    assert label is not None
    is_text = str(schema.field(picture).type) in ("string", "large_string")
    columns = [name for name in (label, part, picture if is_text else None) if name]
    table = parquet.read_table(path, columns=columns).to_pydict()
    rows: list[Row] = []
    for row, value in enumerate(table[label]):
        source = InFile(str(path.parent / table[picture][row])) if is_text else InTable(str(path), picture, row)
        name = table[picture][row] if is_text else f"{key or path.stem}/{row:06d}"
        rows.append((name, source, value, str(table[part][row]) if part else split))
    return rows, _class_names(schema, label)


def _picture_columns(schema: Any) -> list[str]:
    """Those whose cells hold bytes, as Hugging Face stores pictures."""
    found = []
    for column in schema:
        kind = str(column.type)
        if kind in ("binary", "large_binary") or (kind.startswith("struct") and "bytes: binary" in kind):
            found.append(column.name)
    return found


def _class_names(schema: Any, label: str) -> list[str] | None:
    """Hugging Face keeps the names of numbered classes in the table's metadata."""
    try:
        told = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        names = told["info"]["features"][label]["names"]
        return [str(name) for name in names]
    except (ValueError, KeyError, TypeError):
        return None
