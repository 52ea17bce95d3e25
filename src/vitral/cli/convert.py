"""`vitral convert`: write a checkpoint in another dialect and compare the outputs."""

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from vitral.cli.parameters import FORMAT, Model, Switch, split_setting
from vitral.console.checkpoint import show_conversion
from vitral.console.output import Format, show_as

Dialect = Literal["native", "google", "big_vision", "timm", "huggingface", "torchvision", "bit"]


def convert(
    model: Model,
    target: Path,
    /,
    *,
    to: Annotated[Dialect, Parameter(help="Dialect to write.", metavar="DIALECT")],
    set: Annotated[
        tuple[str, ...],
        Parameter(
            help="Change fields: image_size=384, activation=gelu, preprocess.mean=(0.5,0.5,0.5).",
            metavar="FIELD=VALUE",
            consume_multiple=True,
            negative="",
            show_default=False,
        ),
    ] = (),
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Parameter(
            help="Round the weights to bfloat16 or float16, which halves the file.",
            metavar="PRECISION",
            show_choices=False,
        ),
    ] = None,
    overwrite: Annotated[Switch, Parameter(help="Replace the target if it exists.")] = False,
    format: Annotated[Format, FORMAT, Parameter(help="human, json or quiet.")] = "human",
) -> None:
    """Convert a checkpoint to another dialect, and verify it.

    Loads the written file, runs it and prints the largest difference of features and logits.

    Parameters
    ----------
    target
        File to write: .safetensors for native; .npz for google, big_vision and bit; .safetensors or .pth for the
        others. timm and huggingface also write folders.

    Examples
    --------
    vitral convert ViT-B_16.npz vit-b16 --to huggingface
    vitral convert runs/photos-1 photos.safetensors --to timm
    vitral convert ViT-B_16.npz b16.safetensors --to native --set image_size=384
    """
    fields = parse_fields(set)
    from vitral.weights.convert import convert as convert_checkpoint

    prefix = "preprocess."
    changes = {name.removeprefix(prefix): fields.pop(name) for name in [*fields] if name.startswith(prefix)}
    conversion = convert_checkpoint(
        model, target, to=to, precision=precision, overwrite=overwrite, preprocess=changes or None, **fields
    ).as_dict()
    show_as(format, json=conversion, human=lambda: show_conversion(conversion, precision))


def parse_fields(settings: tuple[str, ...]) -> dict[str, Any]:
    """Return config fields from texts such as image_size=384, pool=mean and class_token=true."""
    from vitral.model.sizes import parse_field

    pairs = dict(split_setting(setting, "image_size=384") for setting in settings)
    return {name.strip(): parse_field(name.strip(), value) for name, value in pairs.items()}
