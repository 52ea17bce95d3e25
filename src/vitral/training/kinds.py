"""A value in the type of its setting: words from a command line are read as numbers where one is wanted."""

from collections.abc import Mapping
from os import PathLike, fspath
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from vitral.errors import ConfigError


def in_kind(name: str, value: Any, kind: Any, origin: str) -> Any:
    """ConfigError for a value that is of none of the types that ``kind`` allows."""
    for choice in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        found = _as_kind(value, choice)
        if found is not _NO:
            return found
    raise ConfigError(f"{origin}: {name}={value!r} must be {_allowed(kind)}.")


_NO = object()


def _as_kind(value: Any, kind: Any) -> Any:
    if kind is type(None):
        return None if value is None or value == "none" else _NO
    if get_origin(kind) is Literal:
        return value if isinstance(value, str) and value in get_args(kind) else _NO
    if get_origin(kind) is tuple:
        return _as_tuple(value, get_args(kind))
    if kind is bool:
        words = {"true": True, "false": False}
        return value if isinstance(value, bool) else words.get(value, _NO) if isinstance(value, str) else _NO
    if kind in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
            return _NO if kind is int and number != int(number) else kind(number)
        except (TypeError, ValueError, OverflowError):
            return _NO
    if kind is str:
        return fspath(value) if isinstance(value, str | PathLike) else _NO
    return value if isinstance(value, Mapping) else _NO


def _as_tuple(value: Any, kinds: tuple[Any, ...]) -> Any:
    parts = value.replace("x", ",").split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or len(parts) != len(kinds):
        return _NO
    found = tuple(_as_kind(part, kind) for part, kind in zip(parts, kinds, strict=True))
    return _NO if _NO in found else found


def _allowed(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_allowed(part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return ", ".join(repr(part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        return "two numbers" if len(get_args(kind)) == 2 else "three numbers"
    if get_origin(kind) is Mapping:
        return "a table of fields"
    return {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}.get(kind, "nothing")
