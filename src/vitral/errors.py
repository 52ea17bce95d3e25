"""The one tree of exceptions. Every message says what was seen, what is allowed and what to do about it; the
command line prints it as it stands and leaves with ``exit_code``.

    VitralError
      ConfigError  a setting, a name or a combination of settings that cannot be
      DataError    pictures or tensors that cannot be used
      WeightsError a checkpoint that cannot be read, understood, held or written
      MissingError a package that an extra of vitral would have installed
"""

from collections.abc import Iterable
from difflib import get_close_matches


class VitralError(Exception):
    """The root: ``except vitral.VitralError`` catches everything that vitral raises on purpose."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None):
        super().__init__(message if hint is None else f"{message} {hint}")
        self.message = message
        self.hint = hint


class ConfigError(VitralError):
    """A setting that cannot be: names the field, the value, the rule and the way out."""

    exit_code = 2


class DataError(VitralError):
    """Pictures or tensors that cannot be used."""

    exit_code = 2


class WeightsError(VitralError):
    """A checkpoint that cannot be read, understood, held or written."""

    exit_code = 2


class MissingError(VitralError):
    """An optional package that is not installed."""

    exit_code = 2


def missing_package(package: str, extra: str, purpose: str) -> MissingError:
    message = f"{purpose} needs {package}, which is not installed."
    return MissingError(message, hint=f"pip install 'vitral[{extra}]'")


def did_you_mean(word: str, choices: Iterable[str]) -> str | None:
    """The hint for a mistyped word, or None when nothing is near."""
    by_lower = {choice.lower(): choice for choice in choices}
    near = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f"Did you mean {by_lower[near[0]]!r}?" if near else None


def first_line(error: BaseException) -> str:
    """Of what other people's code says, for the middle of a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
