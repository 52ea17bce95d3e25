"""`vitral describe`: print what a checkpoint contains."""

from typing import Annotated, Any

from cyclopts import Parameter

from vitral.cli.parameters import FORMAT, ImageSize, Model, OptionalInt
from vitral.console.checkpoint import show_checkpoint
from vitral.console.output import Format, show_as


def describe(
    model: Model,
    /,
    *,
    image_size: Annotated[ImageSize, Parameter(help="Describe the model as loaded at another size.")] = None,
    heads: Annotated[OptionalInt, Parameter(help="Attention heads, if the file does not state them.")] = None,
    format: Annotated[Format, FORMAT, Parameter(help="human, json or quiet (the dialect only).")] = "human",
) -> None:
    """Describe a checkpoint.

    Prints dialect, config, preprocessing and checksum, and lists which tensors are renamed, resized, initialized or
    ignored.

    Examples
    --------
    vitral describe vit-cifar10
    vitral describe ViT-B_16.npz --image-size 384
    vitral describe hf:google/vit-base-patch16-224 --format json
    """
    from vitral.weights.describing import describe as describe_checkpoint

    overrides: dict[str, Any] = {"image_size": image_size, "heads": heads}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    description = describe_checkpoint(model, **overrides).as_dict()
    dialect = description["report"]["dialect"]
    show_as(format, json=description, quiet=[dialect], human=lambda: show_checkpoint(description))
