"""Tables: a column of pictures and a column of labels, as CSV or Parquet; datasets of the hub are Parquet, too."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vitral.data.dataset import (
    NO_LABEL,
    SPLITS,
    DatasetIndex,
    FileSource,
    Item,
    Source,
    TableSource,
    counted_reasons,
    natural_order,
)
from vitral.data.parquet import import_pyarrow
from vitral.errors import DataError, first_line
from vitral.files import as_text

_PICTURES = ("image", "img", "file", "filename", "file_name", "path", "filepath", "image_path", "picture")
_LABELS = ("label", "labels", "class", "target", "category", "fine_label")
_SPLIT = ("split", "set", "subset")
Row = tuple[str, Source | None, object, object]
"""Key, source (None where the row names no picture), label and split as they stand."""


def open_table(path: Path, *, labelled: bool = True) -> DatasetIndex:
    if not path.is_file():
        raise DataError(f"There is no table {path}.")
    if path.suffix.lower() == ".parquet":
        return build(as_text(path.stem), *read_parquet(path, "train", labelled=labelled))
    rows, notes = _read_csv(path, labelled)
    return build(as_text(path.stem), rows, None, notes)


def build(name: str, rows: Iterable[Row], names: Sequence[str] | None, notes: Iterable[str] = ()) -> DatasetIndex:
    """``names`` are those of the classes, where the labels are numbers."""
    rows = list(rows)
    if not rows:
        raise DataError(f"The table {name} has no rows.")
    usable = [label for _, source, label, _ in rows if source is not None and _is_usable(label)]
    is_multi = any(isinstance(label, list | tuple) for label in usable)
    found = {str(part) for label in usable for part in _parts(label)}
    classes = tuple(names) if names else tuple(sorted(found, key=natural_order))
    numbers = {label: index for index, label in enumerate(classes)}
    if names:
        numbers |= {str(index): index for index in range(len(names))}
    splits: dict[str, list[Item]] = {}
    skipped: dict[str, str] = {}
    for key, source, label, split in rows:
        if source is None:
            skipped[key] = "no picture is named"
        elif not _is_usable(label) or any(str(part) not in numbers for part in _parts(label)):
            skipped[key] = f"label {label!r} is no class"
        else:
            parts = [numbers[str(part)] for part in _parts(label)]
            number = tuple(sorted(set(parts))) if is_multi else parts[0]
            splits.setdefault(_known_split(split, name, key), []).append(Item(key, number, source))
    if not splits:
        raise DataError(f"No row of the table {name} has a picture and a label: {counted_reasons(skipped)}.")
    told = [f"Rows that were left out: {counted_reasons(skipped)}."] if skipped else []
    return DatasetIndex(
        name=name,
        classes=classes,
        splits={split: tuple(items) for split, items in splits.items()},
        multi_label=is_multi,
        skipped=skipped,
        notes=(*notes, *told),
    )


def _parts(label: object) -> Sequence[object]:
    return label if isinstance(label, list | tuple) else [label]


def _is_usable(label: object) -> bool:
    """Whether it is there, and one word or number, or a list of them: cells may be empty, null, or what pandas makes
    of these, NaN."""
    for part in _parts(label):
        if part is None or part != part or isinstance(part, list | dict | bytes):
            return False
        if isinstance(part, str) and not part.strip():
            return False
    return True


def _known_split(split: object, name: str, key: str) -> str:
    word = "" if split is None else str(split).strip()
    if word.lower() not in SPLITS:
        seen = f"split {word!r}" if word else "no split"
        raise DataError(
            f"In the table {name}, {key} has {seen}; it may be {', '.join(SPLITS)}.",
            hint="Write one of them, or call the column otherwise.",
        )
    return SPLITS[word.lower()]


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


def _read_csv(path: Path, labelled: bool) -> tuple[list[Row], list[str]]:
    """The rows, and how their labels were understood where that is not written in the manual."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text in UTF-8: {error}.") from error
    first = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=first.count)
    reader = csv.DictReader(io.StringIO(text), delimiter=delimiter, strict=True)
    columns = [column for column in _columns(reader, path) if column]
    picture = _find(columns, _PICTURES, "pictures", path)
    label = _find(columns, _LABELS, "labels", path) if labelled else None
    split = _find(columns, _SPLIT, "splits", path, needed=False)
    assert picture is not None
    rows: list[Row] = []
    for number, line in _lines(reader, path, [name for name in (picture, label, split) if name]):
        name, value = line[picture], line[label] if label else NO_LABEL
        source = FileSource(str(path.parent / name)) if name else None
        rows.append((name or f"line {number}", source, value, line[split] if split else "train"))
    return _with_lists(rows) if label and label.strip().lower() == "labels" else (rows, [])


def _columns(reader: "csv.DictReader[str]", path: Path) -> Sequence[str]:
    try:
        return reader.fieldnames or ()
    except csv.Error as error:
        raise DataError(f"{path} cannot be read from line 1 on: {error}.") from error


def _lines(reader: "csv.DictReader[str]", path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """The lines that are not empty, by their numbers: the cells of these columns."""
    while True:
        number = reader.line_num + 1
        try:
            line = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{path} cannot be read from line {number} on: {error}.", hint="Is there a quote that is not closed?"
            ) from error
        if line is None:
            return
        cells = {column: (line.get(column) or "").strip() for column in columns}
        if any("\n" in cell for cell in cells.values()):
            raise DataError(
                f"A cell of {path} goes on over several lines, from line {number} on.",
                hint="Is there a quote that is not closed?",
            )
        if any(cells.values()):
            yield number, cells


def _with_lists(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """cat|dog: a label may have spaces, unless it is spaces that all of the column is separated by."""
    cells = [str(label) for _, _, label, _ in rows]
    separator = next((mark for mark in "|; " if any(mark in cell for cell in cells)), "|")
    lists = [[part.strip() for part in cell.split(separator) if part.strip()] for cell in cells]
    named = {";": "semicolons", " ": "spaces"}.get(separator)
    notes = [f"The labels are separated at {named}, as there is no | between them."] if named else []
    return [(key, source, parts, split) for (key, source, _, split), parts in zip(rows, lists, strict=True)], notes


def read_parquet(
    path: Path, split: str, key: str | None = None, *, labelled: bool = True
) -> tuple[list[Row], list[str] | None]:
    """The rows of a file, and the names of its classes where it has them. A row is called ``key`` and its number."""
    parquet = import_pyarrow()
    try:
        schema = parquet.read_schema(path)
    except Exception as error:  # pyarrow's own errors come from C++ under many names
        raise DataError(f"{path} is no Parquet table: {first_line(error)}.") from error
    pictures = _picture_columns(schema)
    if len(pictures) > 1:
        raise DataError(f"{path} has several columns of pictures: {', '.join(pictures)}.", hint="Leave one.")
    picture = pictures[0] if pictures else _find(schema.names, _PICTURES, "pictures", path)
    label = _find(schema.names, _LABELS, "labels", path) if labelled else None
    part = _find(schema.names, _SPLIT, "splits", path, needed=False)
    assert picture is not None
    is_text = str(schema.field(picture).type) in ("string", "large_string")
    columns = [name for name in (label, part, picture if is_text else None) if name]
    try:
        table = parquet.read_table(path, columns=columns).to_pydict()
        number = parquet.read_metadata(path).num_rows
    except Exception as error:  # damaged pages, or text that is no UTF-8
        raise DataError(f"The Parquet table {path} is damaged: {first_line(error)}.") from error
    rows: list[Row] = []
    for row in range(number):
        named = f"{key or as_text(path.stem)}/{row:06d}"
        source: Source | None = TableSource(str(path), picture, row)
        if is_text:
            name = table[picture][row]
            named, source = (name, FileSource(str(path.parent / name))) if name else (named, None)
        value = table[label][row] if label else NO_LABEL
        rows.append((named, source, value, table[part][row] if part else split))
    return rows, _class_names(schema, label) if label else None


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
        return [as_text(str(name)) for name in names]
    except (ValueError, KeyError, TypeError):
        return None
