"""Numbers as they are typed."""

import re
from collections.abc import Sequence
from typing import Any, overload

from cyclopts import Parameter

from vitral.errors import ConfigError


def whole_number(_: type, tokens: Sequence[Any]) -> int:
    """cyclopts by itself would round 2.5."""
    (token,) = tokens
    try:
        return int(token.value)
    except ValueError:
        raise ConfigError(f"{token.keyword} {token.value} must be a whole number.") from None


WHOLE = Parameter(converter=whole_number)


@overload
def parse_size(words: str) -> tuple[int, int]: ...
@overload
def parse_size(words: str | None) -> tuple[int, int] | None: ...
def parse_size(words: str | None) -> tuple[int, int] | None:
    """'384' or '384x256' -> (height, width)."""
    if words is None:
        return None
    sides = words.lower().split("x")
    if len(sides) > 2 or not all(re.fullmatch("[1-9][0-9]{0,5}", side) for side in sides):
        raise ConfigError(
            f"--image-size {words!r} must be a whole number of pixels below a million, or HEIGHTxWIDTH.",
            hint="Such as 384.",
        )
    return int(sides[0]), int(sides[-1])
