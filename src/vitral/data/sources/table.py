"""Open tables: a column of images and a column of labels, as CSV or Parquet. Hub datasets are Parquet, too."""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitral.data.dataset import (
    NO_LABEL,
    SPLIT_NAMES,
    DatasetIndex,
    FileSource,
    Item,
    Source,
    TableSource,
    import_pyarrow,
    natural_order,
    summarize_reasons,
)
from vitral.errors import DataError, first_line
from vitral.files import as_text

_IMAGE_COLUMNS = ("image", "img", "file", "filename", "file_name", "path", "filepath", "image_path", "picture")
_LABEL_COLUMNS = ("label", "labels", "class", "target", "category", "fine_label")
_SPLIT_COLUMNS = ("split", "set", "subset")
_BYTES = re.compile(r"(large_)?binary$|struct.*bytes: binary")
"""The types of columns of bytes, as Hugging Face stores images."""
_QUOTE_HINT = "Look for a quote that is not closed."
Row = tuple[str, Source | None, object, object]
"""Key, source (None if the row names no image), and the label and split as written."""


def open_table(path: Path, *, labeled: bool = True) -> DatasetIndex:
    """Return the index of a .csv, .tsv or .parquet file."""
    if not path.is_file():
        raise DataError(f"{path} not found.")
    if path.suffix.lower() == ".parquet":
        index = build_index(as_text(path.stem), *read_parquet(path, "train", labeled=labeled))
    else:
        rows, notes = _read_csv(path, labeled)
        index = build_index(as_text(path.stem), rows, None, notes)
    return replace(index, tables=((path, None),))


def build_index(
    name: str, rows: Iterable[Row], class_names: Sequence[str] | None, notes: Iterable[str] = ()
) -> DatasetIndex:
    """Return the index of rows. `class_names` are given if the labels are numbers."""
    rows = list(rows)
    if not rows:
        raise DataError(f"The table {name} has no rows.")
    usable = [label for _, source, label, _ in rows if source is not None and _is_usable(label)]
    is_multi = any(isinstance(label, list | tuple) for label in usable)
    names = {str(value) for label in usable for value in _values(label)}
    classes = tuple(class_names) if class_names else tuple(sorted(names, key=natural_order))
    index_of = {label: index for index, label in enumerate(classes)}
    if class_names:
        index_of |= {str(index): index for index in range(len(class_names))}
    splits: dict[str, list[Item]] = {}
    skipped: dict[str, str] = {}
    for key, source, label, split in rows:
        if source is None:
            skipped[key] = "the row names no image"
        elif not _is_usable(label) or any(str(value) not in index_of for value in _values(label)):
            skipped[key] = f"label {label!r} is not a class"
        else:
            indices = [index_of[str(value)] for value in _values(label)]
            item = Item(key, tuple(sorted(set(indices))) if is_multi else indices[0], source)
            splits.setdefault(_parse_split(split, name, key), []).append(item)
    if not splits:
        raise DataError(f"No row of the table {name} has an image and a label: {summarize_reasons(skipped)}.")
    return DatasetIndex(
        name=name,
        classes=classes,
        splits={split: tuple(items) for split, items in splits.items()},
        multi_label=is_multi,
        skipped=skipped,
        notes=(*notes, *([f"Skipped rows: {summarize_reasons(skipped)}."] if skipped else [])),
    )


def _values(label: object) -> Sequence[object]:
    return label if isinstance(label, list | tuple) else [label]


def _is_usable(label: object) -> bool:
    """Return whether a label is one word or number, or a list of them. Cells may be empty, null or NaN (pandas)."""
    return not any(
        value is None or value != value or isinstance(value, list | dict | bytes) or not str(value).strip()
        for value in _values(label)
    )


def _parse_split(split: object, name: str, key: str) -> str:
    word = "" if split is None else str(split).strip()
    if word.lower() not in SPLIT_NAMES:
        problem = f"the unknown split {word!r}" if word else "no split"
        raise DataError(
            f"{key} in the table {name} has {problem}.",
            hint=f"Use one of {', '.join(SPLIT_NAMES)}, or rename the column.",
        )
    return SPLIT_NAMES[word.lower()]


def _find_column(columns: Sequence[str], names: Sequence[str], what: str, path: Path) -> str:
    matches = [column for column in columns if column.strip().lower() in names]
    if len(matches) > 1:
        raise DataError(f"{path} has several columns of {what}: {', '.join(matches)}.", hint="Keep one of them.")
    if not matches:
        raise DataError(
            f"{path} has no column of {what} (got {', '.join(columns[:12]) or 'no columns'}).",
            hint=f"Name it one of {', '.join(names)}.",
        )
    return matches[0]


def _find_columns(
    columns: Sequence[str], path: Path, labeled: bool, image: str | None = None
) -> tuple[str, str | None, str | None]:
    """Return the columns of images, of labels (None if unlabeled) and of splits (None if there is none)."""
    image = image or _find_column(columns, _IMAGE_COLUMNS, "images", path)
    label = _find_column(columns, _LABEL_COLUMNS, "labels", path) if labeled else None
    return image, label, next((column for column in columns if column.strip().lower() in _SPLIT_COLUMNS), None)


def read_column(path: Path, column: str, key: str | None) -> dict[str, object]:
    """Return the cells of one column of a table by the names of its images, as `open_table` names them."""
    if path.suffix.lower() == ".parquet":
        image, is_text = _find_image_column(_read_schema(path), path)
        cells = _read_cells(path, [column, *([image] if is_text else [])])
        keys = _row_keys(path, key, cells[image] if is_text else [None] * len(cells[column]))
        return dict(zip(keys, cells[column], strict=True))
    header, lines = open_csv(path)
    image = _find_column([name for name in header if name], _IMAGE_COLUMNS, "images", path)
    rows = (dict(zip(header, line, strict=False)) for _, line in lines)
    return {row.get(image, "").strip(): row.get(column) for row in rows}


def column_names(path: Path) -> list[str]:
    """Return the columns of a table."""
    is_parquet = path.suffix.lower() == ".parquet"
    return _read_schema(path).names if is_parquet else [name for name in open_csv(path)[0] if name]


def open_csv(path: Path) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return the header of a CSV file, and an iterator over the number and the cells of each line after it."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}.") from error
    lines = _read_lines(text, path)
    return next(lines, (1, []))[1], lines


def _read_csv(path: Path, labeled: bool) -> tuple[list[Row], list[str]]:
    """Return the rows, and a note if the labels are separated in an unusual way."""
    header, lines = open_csv(path)
    image, label, split = _find_columns([column for column in header if column], path, labeled)
    rows: list[Row] = []
    for number, line in lines:
        named = dict(zip(header, line, strict=False))
        cells = {column: named.get(column, "").strip() for column in (image, label, split) if column}
        if any("\n" in cell for cell in cells.values()):
            raise DataError(f"A cell of {path} spans several lines, from line {number}.", hint=_QUOTE_HINT)
        if any(cells.values()):
            name, value = cells[image], cells[label] if label else NO_LABEL
            source = FileSource(str(path.parent / name)) if name else None
            rows.append((name or f"line {number}", source, value, cells[split] if split else "train"))
    return _split_labels(rows) if label and label.strip().lower() == "labels" else (rows, [])


def _read_lines(text: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of each line, the header among them."""
    delimiter = max(",;\t", key=text.split("\n", 1)[0].count)
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True)
    while True:
        number = reader.line_num + 1
        try:
            yield number, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"Line {number} of {path} cannot be read: {error}.", hint=_QUOTE_HINT) from error


def _split_labels(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Split cells such as cat|dog. Labels may contain spaces, unless the column has no other separator."""
    cells = [str(label) for _, _, label, _ in rows]
    separator = next((mark for mark in "|; " if any(mark in cell for cell in cells)), "|")
    lists = [[value.strip() for value in cell.split(separator) if value.strip()] for cell in cells]
    unusual = {";": "semicolons", " ": "spaces"}.get(separator)
    notes = [f"The labels are split at {unusual}, because none contains a |."] if unusual else []
    return [(key, source, values, split) for (key, source, _, split), values in zip(rows, lists, strict=True)], notes


def read_parquet(
    path: Path, split: str, key: str | None = None, *, labeled: bool = True
) -> tuple[list[Row], list[str] | None]:
    """Return the rows of a file, and the names of its classes if it has them. Rows are named `key` and their number."""
    schema = _read_schema(path)
    image, is_text = _find_image_column(schema, path)
    _, label, split_column = _find_columns(schema.names, path, labeled, image)
    table = _read_cells(path, [name for name in (label, split_column, image if is_text else None) if name])
    number = import_pyarrow().read_metadata(path).num_rows
    names = table[image] if is_text else [None] * number
    rows: list[Row] = []
    for row, row_key in enumerate(_row_keys(path, key, names)):
        source: Source | None = TableSource(str(path), image, row)
        if is_text:
            source = FileSource(str(path.parent / names[row])) if names[row] else None
        value = table[label][row] if label else NO_LABEL
        rows.append((row_key, source, value, table[split_column][row] if split_column else split))
    return rows, _class_names(schema, label) if label else None


def _read_schema(path: Path) -> Any:
    parquet = import_pyarrow()
    try:
        return parquet.read_schema(path)
    except Exception as error:  # pyarrow's own errors come from C++ under many names
        raise DataError(f"{path} is not a Parquet file: {first_line(error)}.") from error


def _read_cells(path: Path, columns: Sequence[str]) -> dict[str, list[Any]]:
    try:
        return import_pyarrow().read_table(path, columns=columns).to_pydict()
    except Exception as error:  # damaged pages, or text that is not UTF-8
        raise DataError(f"The Parquet table {path} is damaged: {first_line(error)}.") from error


def _find_image_column(schema: Any, path: Path) -> tuple[str, bool]:
    """Return the column of images, and whether it has file names instead of bytes."""
    embedded = [column.name for column in schema if _BYTES.match(str(column.type))]
    if len(embedded) > 1:
        raise DataError(f"{path} has several columns of images: {', '.join(embedded)}.", hint="Keep one of them.")
    image = embedded[0] if embedded else _find_column(schema.names, _IMAGE_COLUMNS, "images", path)
    return image, str(schema.field(image).type) in ("string", "large_string")


def _row_keys(path: Path, key: str | None, names: Sequence[str | None]) -> list[str]:
    """Return the name of each row: that of its file, or else `key` and its number."""
    return [name or f"{key or as_text(path.stem)}/{row:06d}" for row, name in enumerate(names)]


def _class_names(schema: Any, label: str) -> list[str] | None:
    """Return the names of numbered classes, which Hugging Face writes into the table's metadata."""
    try:
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        return [as_text(str(name)) for name in metadata["info"]["features"][label]["names"]]
    except (ValueError, KeyError, TypeError):
        return None
