"""The arguments and options that several commands share, and how their text is parsed."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, Token

from vitral.console import output
from vitral.errors import ConfigError, check_int, short_repr
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


def split_setting(setting: str, example: str) -> tuple[str, str]:
    """Return the name and the value of NAME=VALUE, as --set takes it."""
    name, equals, value = setting.partition("=")
    if not equals:
        raise ConfigError(f"--set must be NAME=VALUE (got {short_repr(setting)}).", hint=f"Use {example}, for example.")
    return name, value


def option(help: str, metavar: str | None = None, **more: Any) -> Parameter:
    """Return the help text of an option, and the placeholder of its value unless the type brings one."""
    return Parameter(help=help, **({} if metavar is None else {"metavar": metavar}), **more)


Format = Annotated[output.Format, option("human, json or quiet.", "FORMAT", show_choices=False)]
SIZE_HELP = "Use another input size than the model was trained at, such as 384 or 320x480."

MODEL_HELP = "A run folder, a weights file, a shipped or pretrained name (vit-cifar10, dinov2-s14), or hf:OWNER/NAME."
RUNNABLE_HELP = f"{MODEL_HELP.removesuffix('.')}; or an ONNX or OpenVINO file of `vitral export`."

Model = Annotated[str, option(MODEL_HELP)]
RunnableModel = Annotated[str, option(RUNNABLE_HELP)]
Image = Annotated[str, option("Image files, folders or glob patterns. Use - to read paths from standard input.")]
Text = str | None
Integer = Annotated[int, Parameter(converter=parse_integer, metavar="N")]
OptionalInt = Annotated[int | None, Parameter(converter=parse_integer, metavar="N")]
OptionalNumber = Annotated[float | None, Parameter(metavar="N")]
ImageSize = Annotated[
    tuple[int, int] | None,
    Parameter(converter=parse_image_size, n_tokens=1, help=SIZE_HELP, metavar="SIZE", negative=""),
]
MERGE_HELP = "Merge R pairs of similar tokens per block (ToMe): faster, slightly less accurate."
Merge = Annotated[int | None, Parameter(converter=parse_integer, help=MERGE_HELP, metavar="R")]
Switch = Annotated[bool, Parameter(negative="", show_default=False)]
Device = Annotated[str, option("cpu, cuda, cuda:1 or mps.", "DEVICE")]
Precision = Annotated[str, option("float32, bfloat16, float16 or int8.", "PRECISION")]
Engine = Annotated[
    str,
    option("torch, compiled, onnxruntime or openvino; auto measures them if there are many images.", "ENGINE"),
]
BatchSize = Annotated[Integer, option("Images per batch.")]
Processes = Annotated[OptionalInt, option("Run in this many processes of this machine, one per GPU.", show_default="1")]
File = Annotated[Path | None, Parameter(metavar="FILE")]
