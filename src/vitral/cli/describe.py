"""``vitral describe``: what a checkpoint is, and what became of every tensor."""

from typing import Annotated, Any

from cyclopts import Parameter

from vitral.cli.numbers import WHOLE, parse_size
from vitral.console.checkpoint import show_checkpoint
from vitral.console.output import Format, show_json, show_lines


def describe(
    checkpoint: str,
    /,
    *,
    image_size: Annotated[str | None, Parameter(help="As if loaded for this size: 384, or HEIGHTxWIDTH.")] = None,
    heads: Annotated[int | None, WHOLE, Parameter(help="Attention heads, where the file does not tell.")] = None,
    format: Annotated[Format, Parameter(help="human: a page; json: everything; quiet: the dialect.")] = "human",
) -> None:
    """Dialect, config, preprocessing, checksum, and what is renamed, resized, fresh or ignored.

    Parameters
    ----------
    checkpoint
        A file, a folder, vit-cifar10 (it comes with vitral), or hf:owner/name.
    """
    asked: dict[str, Any] = {} if heads is None else {"heads": heads}
    if image_size is not None:
        asked["image_size"] = parse_size(image_size)
    described = examine(checkpoint, asked)
    if format == "json":
        show_json(described)
    elif format == "quiet":
        show_lines([described["report"]["dialect"]])
    else:
        show_checkpoint(described)


def examine(source: str, asked: dict[str, Any]) -> dict[str, Any]:
    from vitral.weights.dialects.config_json import config_as_dict
    from vitral.weights.identity import identify
    from vitral.weights.load import load

    identity = identify(source)
    loaded = load(source, **asked)
    assert loaded.report is not None
    return {
        **identity,
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "config": config_as_dict(loaded.model.config),
        "preprocess": loaded.preprocess.as_dict(),
        "labels": loaded.labels,
        "report": loaded.report.as_dict(),
    }
