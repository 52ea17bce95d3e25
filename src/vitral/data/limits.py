"""What a picture may claim, and what is said of one that cannot be used: one of a few words, so that they can be
counted."""

from dataclasses import dataclass
from typing import Literal

from vitral.errors import DataError

Reason = Literal[
    "empty",
    "unsupported",
    "truncated",
    "corrupt",
    "too large",
    "too many pixels",
    "bad dimensions",
    "wrong channels",
    "missing",
    "unreadable",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a picture may claim in its header."""

    bytes: int = 256 * 2**20
    pixels: int = 89_000_000
    side: int = 65_500
    aspect: float = 100.0


LIMITS = Limits()


class BadImageError(DataError):
    """A picture that cannot be used, and the reason in a word."""

    def __init__(self, reason: Reason, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: Reason = reason


def check_bytes(size: int, limits: Limits = LIMITS) -> None:
    """Before they are read."""
    if size > limits.bytes:
        raise BadImageError("too large", f"{size:,} bytes; at most {limits.bytes:,}")
