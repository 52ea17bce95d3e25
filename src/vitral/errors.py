"""One tree of exceptions, and the checks that raise them.

Each message names the problem, the value and the rule; `hint` is the fix. The command line prints the message and
exits with `exit_code`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from math import inf, nan
from numbers import Integral, Real
from reprlib import Repr
from typing import cast

MAX_NUMBER = 3.4e38
"""Larger numbers overflow float32, so `check_number` refuses them like infinity."""
Bound = float | None


class VitralError(Exception):
    """Base class of every exception that vitral raises on purpose."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None):
        super().__init__(message if hint is None else f"{message} {hint}")
        self.message = message
        self.hint = hint


class ConfigError(VitralError):
    """A setting, a name or a combination of settings is invalid."""

    exit_code = 2


class DataError(VitralError):
    """Images or tensors cannot be used."""

    exit_code = 2


class WeightsError(VitralError):
    """A checkpoint cannot be read, matched to a model or written."""

    exit_code = 2


class MissingError(VitralError):
    """An optional package is not installed."""

    exit_code = 2


def missing_package(package: str, extra: str, purpose: str) -> MissingError:
    """Return the error for a missing optional package, with the command that installs it."""
    message = f"{purpose} needs {package}, which is not installed."
    return MissingError(message, hint=f"Run: pip install 'vitral[{extra}]'")


def did_you_mean(word: str, choices: Iterable[str]) -> str | None:
    """Return a hint with the choice closest to `word`, or None if no choice is close."""
    by_lower = {choice.lower(): choice for choice in choices}
    near = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f"Did you mean {by_lower[near[0]]!r}?" if near else None


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message without a final period, to quote it in another message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def check_int(name: str, value: object, *, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return `value` as an int, or raise ConfigError if it is not an integer within the bounds."""
    if not isinstance(value, bool) and isinstance(value, Integral):
        number = int(value)
        if (minimum is None or number >= minimum) and (maximum is None or number <= maximum):
            return number
    raise ConfigError(f"{name} must be an integer{_bounds(minimum, maximum)} (got {short_repr(value)}).")


def check_number(
    name: str, value: object, *, minimum: Bound = None, maximum: Bound = None, above: Bound = None, below: Bound = None
) -> float:
    """Return `value` as a float, or raise ConfigError unless finite and in bounds; above and below are exclusive."""
    number = _to_float(value)
    low = (minimum is None or number >= minimum) and (above is None or number > above)
    high = (maximum is None or number <= maximum) and (below is None or number < below)
    if -MAX_NUMBER < number < MAX_NUMBER and low and high:
        return number
    rule = _bounds(minimum, maximum, above, below)
    raise ConfigError(f"{name} must be a finite number{rule} (got {short_repr(value)}).")


def _to_float(value: object) -> float:
    """Return NaN for what is not a number, infinity for an integer that is too large."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return nan
    try:
        return float(value)
    except OverflowError:
        return inf


def check_choice(
    name: str, value: object, choices: Iterable[str], *, synonyms: Mapping[str, str] | None = None
) -> None:
    """Raise ConfigError unless the value is one of the choices, with the closest one (`synonyms` help to find it)."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        hint = did_you_mean((synonyms or {}).get(str(value), str(value)), choices)
        raise ConfigError(f"{name} must be one of {', '.join(choices)} (got {short_repr(value)}).", hint=hint)


def check_bool(name: str, value: object) -> None:
    """Raise ConfigError unless the value is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False (got {short_repr(value)}).")


def check_type(name: str, value: object, *types: type, hint: str | None = None) -> None:
    """Raise ConfigError unless the value is an instance of one of the types."""
    if not isinstance(value, types):
        expected = " or ".join(f"a {kind.__name__}" for kind in types)
        raise ConfigError(f"{name} must be {expected} (got {short_repr(value)}).", hint=hint)


def check_field_names(names: Iterable[str], *, of: type) -> None:
    """Raise ConfigError for a name that is not a field of the dataclass, with the closest one."""
    choices = [field.name for field in fields(of)]
    for name in names:
        if name not in choices:
            hint = did_you_mean(str(name), choices) or f"Use one of: {', '.join(choices)}."
            raise ConfigError(f"{of.__name__} has no field {name!r}.", hint=hint)


def short_repr(value: object) -> str:
    """Return the repr of a value for an error message, shortened if it is long."""
    try:
        return _REPR.repr(value)
    except ValueError:  # an integer of more digits than Python converts
        return f"an integer of {int(value).bit_length()} bits" if isinstance(value, int) else type(value).__name__


class _ShortRepr(Repr):
    def repr_instance(self, x: object, level: int) -> str:
        """Return the type of tensors, arrays, modules and other objects whose repr has several lines."""
        if shape := getattr(x, "shape", None):
            return f"{type(x).__name__} of shape {tuple(shape)}"
        if isinstance(x, Mapping):
            return f"{type(x).__name__} of {len(cast('Mapping[object, object]', x))} items"
        text = super().repr_instance(x, level)
        return type(x).__name__ if "\n" in text else text


_REPR = _ShortRepr()
_REPR.maxlong, _REPR.maxstring, _REPR.maxother = 40, 80, 80


def _bounds(low: Bound, high: Bound, above: Bound = None, below: Bound = None) -> str:
    """Return the allowed range in words, with a leading space, or "" without bounds."""
    if low is not None and high is not None:
        return f" from {low} to {high}"
    limits = {"at least": low, "above": above, "at most": high, "below": below}
    words = " and ".join(f"{word} {limit}" for word, limit in limits.items() if limit is not None)
    return f" of {words}" if words.startswith("at") else f" {words}" if words else ""
