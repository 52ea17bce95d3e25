"""Check exported files before a runtime opens them: their size, where their weights are, and which operators they use.

ONNX files are read by a small protobuf reader of our own and OpenVINO files by Python's XML parser, so that a crafted
file cannot name weights outside its folder or operators of a foreign library. Nothing here imports torch or a runtime.
"""

import json
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from vitral.errors import WeightsError

MAX_BYTES = 64 * 2**30
MAX_DEPTH = 32
_MAX_XML_BYTES = 2**28
_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})
"""Operators that ONNX Runtime itself brings."""
_MESSAGES: dict[str, dict[int, str]] = {
    "model": {7: "graph", 14: "property", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute", 10: "*domain"},
    "node": {5: "attribute", 7: "*node domain", 4: "*operator"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "external"},
    "external": {1: "*key", 2: "*value"},
    "property": {1: "*key", 2: "*value"},
}
"""The nested messages of onnx.proto that matter here, by field number; a star marks a string."""


@dataclass(kw_only=True)
class _Content:
    """The operators and files that an ONNX file refers to."""

    operators: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """(domain, operator)."""
    functions: set[str] = field(default_factory=set[str])
    """Domains of functions that the file defines itself."""
    locations: set[str] = field(default_factory=set[str])
    """Files with weights."""
    properties: dict[str, str] = field(default_factory=dict[str, str])


def check_onnx(path: Path) -> dict[str, Any]:
    """Return the description that `vitral export` stored in an ONNX file. Raise WeightsError if it is not safe."""
    check_size(path)
    content = _Content()
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _read_message(data, (0, len(data)), "model", content, depth=0)
    except (ValueError, IndexError, OSError, UnicodeDecodeError) as error:
        raise WeightsError(f"{path} is damaged or not an ONNX file: {error}.") from error
    for domain, operator in sorted(content.operators):
        if domain not in _DOMAINS | content.functions:
            problem = f"{path} uses the custom operator {domain}::{operator}."
            raise WeightsError(problem, hint="Pass a file of `vitral export`.")
    for location in sorted(content.locations):
        _check_inside(path, location)
    return parse_description(path, content.properties.get("vitral"))


def check_openvino(path: Path) -> dict[str, Any]:
    """Return the description that `vitral export` stored in an OpenVINO file. Raise WeightsError if it is not safe."""
    check_size(path, _MAX_XML_BYTES)
    weights = path.with_suffix(".bin")
    _check_inside(path, weights.name)
    text = path.read_bytes()
    if re.search(rb"<!(DOCTYPE|ENTITY)", text, re.IGNORECASE):
        raise WeightsError(f"{path} declares entities, which a model does not need.")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise WeightsError(f"{path} is damaged or not an OpenVINO file: {error}.") from error
    size = weights.stat().st_size
    for layer in root.iter("layer"):
        if not re.fullmatch(r"opset\d{1,3}", layer.get("version", "")):
            raise WeightsError(f"{path} uses the custom operator {layer.get('type')}.")
        data = layer.find("data")
        if layer.get("type") == "Const" and data is not None:
            end = sum(_as_int(data.get(name)) for name in ("offset", "size"))
            if end > size:
                raise WeightsError(f"{weights} is incomplete ({size:,} bytes; expected {end:,}).")
    entry = root.find("./rt_info/vitral")
    return parse_description(path, None if entry is None else entry.get("value"))


def parse_description(path: Path, text: str | None) -> dict[str, Any]:
    """Return the JSON that describes the model. Raise WeightsError if there is none."""
    try:
        description: dict[str, Any] = json.loads(text or "null")
        labels = description["labels"]
        is_list = labels is None or isinstance(labels, list)
        if not is_list or not {"preprocess", "multi_label"} <= description.keys():
            raise ValueError("no description")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = f"{path} does not describe its preprocessing and labels."
        raise WeightsError(problem, hint="Write it with `vitral export`.") from error
    return description


def check_size(path: Path, limit: int = MAX_BYTES) -> None:
    """Raise WeightsError unless the file exists and has a plausible size."""
    if not path.is_file():
        raise WeightsError(f"{path} was not found.")
    if not 0 < (size := path.stat().st_size) <= limit:
        raise WeightsError(f"{path} has {size:,} bytes (expected 1 to {limit:,}).")


def _check_inside(path: Path, location: str) -> None:
    """Raise WeightsError unless a file of weights is beside the model, links included."""
    folder = path.resolve().parent
    target = Path(os.path.realpath(folder / location))
    if Path(location).is_absolute() or not target.is_relative_to(folder):
        raise WeightsError(f"{path} refers to weights outside its folder ({location!r}).")
    if not target.is_file():
        raise WeightsError(f"{path} needs the file {location}, which was not found in its folder.")
    check_size(target)


def _as_int(text: str | None) -> int:
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text) else MAX_BYTES


# ---- protobuf ----


Span = tuple[int, int]
"""The first byte of a value and the byte after its last one."""


def _read_message(data: mmap.mmap, span: Span, kind: str, content: _Content, *, depth: int) -> None:
    """Collect what a message of onnx.proto refers to."""
    if depth > MAX_DEPTH:
        raise ValueError("graphs are nested too deeply")
    fields, strings = _MESSAGES[kind], dict[str, str]()
    for number, value in _fields(data, span):
        nested = fields.get(number)
        if nested is None or value is None:
            continue
        if nested.startswith("*"):
            strings[nested[1:]] = data[slice(*value)].decode()
        else:
            _read_message(data, value, nested, content, depth=depth + 1)
    if kind == "node":
        content.operators.add((strings.get("node domain", ""), strings.get("operator", "")))
    elif kind == "function":
        content.functions.add(strings.get("domain", ""))
    elif kind == "external" and strings.get("key") == "location":
        content.locations.add(strings.get("value", ""))
    elif kind == "property":
        content.properties[strings.get("key", "")] = strings.get("value", "")


def _fields(data: mmap.mmap, span: Span) -> Iterator[tuple[int, Span | None]]:
    """Yield the number of each field, and where its value is if it has a length."""
    at, end = span
    while at < end:
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            _, at = _varint(data, at)
            yield number, None
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
            yield number, None
        elif wire == 2:
            length, at = _varint(data, at)
            if at + length > end:
                raise ValueError("a field is longer than the file")
            yield number, (at, at + length)
            at += length
        else:
            raise ValueError(f"unknown wire type {wire}")
    if at != end:
        raise ValueError("the last field is incomplete")


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number has more than 64 bits")
