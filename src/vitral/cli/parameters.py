"""The kinds of option that several commands share, and how their text is parsed."""

import re
from collections.abc import Sequence

from cyclopts import Parameter, Token

from vitral.errors import ConfigError, check_int
from vitral.model.config import parse_size

MAX_INTEGER = 2**63 - 1


def parse_integer(_: type, tokens: Sequence[Token]) -> int:
    """Return the integer that was typed. cyclopts on its own would round 2.5."""
    (token,) = tokens
    is_integer = re.fullmatch("[+-]?[0-9]{1,40}", token.value)
    return check_int(str(token.keyword), int(token.value) if is_integer else token.value, maximum=MAX_INTEGER)


def parse_image_size(_: type, tokens: Sequence[Token]) -> tuple[int, int]:
    """Return (height, width) of the size that was typed."""
    (token,) = tokens
    try:
        return parse_size(token.value)
    except ConfigError as error:
        raise ConfigError(f"{token.keyword}: {error.message}", hint=error.hint) from None


INTEGER = Parameter(converter=parse_integer, metavar="N")
NUMBER = Parameter(metavar="N")
IMAGE_SIZE = Parameter(
    converter=parse_image_size,
    n_tokens=1,
    help="Use another input size than the model was trained at, such as 384 or 320x480.",
    metavar="SIZE",
    negative="",
)
SWITCH = Parameter(negative="", show_default=False)
FORMAT = Parameter(metavar="FORMAT", show_choices=False)
DEVICE = Parameter(help="cpu, cuda, cuda:1 or mps.", metavar="DEVICE")
PRECISION = Parameter(help="float32, bfloat16 or float16.", metavar="PRECISION")
FILE = Parameter(metavar="FILE")
DIR = Parameter(metavar="DIR")
MODEL = Parameter(metavar="MODEL")
