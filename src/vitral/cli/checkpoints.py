"""`vitral describe`, `vitral convert` and `vitral export`: read, rewrite and export checkpoints."""

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

import vitral
from vitral.cli.parameters import (
    File,
    Format,
    ImageSize,
    Merge,
    Model,
    OptionalInt,
    Switch,
    Text,
    option,
    split_setting,
)
from vitral.console.checkpoint import show_checkpoint, show_conversion
from vitral.console.output import show_as, show_lines
from vitral.console.progress import stages
from vitral.model.sizes import parse_field
from vitral.report.text import format_bytes

Dialect = Literal["native", "google", "big_vision", "timm", "huggingface", "torchvision", "bit"]


def describe(
    model: Model,
    /,
    *,
    image_size: Annotated[ImageSize, option("Describe the model as loaded at another size.")] = None,
    heads: Annotated[OptionalInt, option("Attention heads, if the file does not state them.")] = None,
    format: Annotated[Format, option("human, json or quiet (the dialect only).")] = "human",
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
    overrides: dict[str, Any] = {"image_size": image_size, "heads": heads}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    description = vitral.describe(model, **overrides).as_dict()
    dialect = description["report"]["dialect"]
    show_as(format, json=description, quiet=[dialect], human=lambda: show_checkpoint(description))


def convert(
    model: Model,
    target: Path,
    /,
    *,
    to: Annotated[Dialect, option("Dialect to write.", "DIALECT")],
    set: Annotated[
        tuple[str, ...],
        option("Change fields: image_size=384, activation=gelu, preprocess.mean=(0.5,0.5,0.5).", "FIELD=VALUE"),
        Parameter(consume_multiple=True, negative="", show_default=False),
    ] = (),
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        option("Round the weights to bfloat16 or float16, which halves the file.", "PRECISION", show_choices=False),
    ] = None,
    overwrite: Annotated[Switch, option("Replace the target if it exists.")] = False,
    format: Format = "human",
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
    settings = dict(split_setting(setting, "image_size=384") for setting in set)
    fields = {name.strip(): parse_field(name.strip(), value) for name, value in settings.items()}
    prefix = "preprocess."
    changes = {name.removeprefix(prefix): fields.pop(name) for name in [*fields] if name.startswith(prefix)}
    conversion = vitral.convert(
        model, target, to=to, precision=precision, overwrite=overwrite, preprocess=changes or None, **fields
    ).as_dict()
    show_as(format, json=conversion, human=lambda: show_conversion(conversion, precision))


def export(
    model: Model,
    /,
    *,
    to: Annotated[
        Literal["onnx", "openvino", "pt2"],
        option("onnx for most runtimes, openvino for CPUs, pt2 for torch.export.", "FORMAT", show_choices=False),
    ],
    out: Annotated[File, option("File to write. By default the model's name with .onnx, .xml or .pt2.")] = None,
    precision: Annotated[
        Literal["float32", "bfloat16", "float16", "int8"],
        option("float32, bfloat16, float16 or int8 (openvino only).", "PRECISION", show_choices=False),
    ] = "float32",
    images: Annotated[
        Text, option("Compare on these images, and calibrate int8 with them. Default: those of the run.", "DATA")
    ] = None,
    max_drop: Annotated[float, option("Largest loss of top-1 by int8, in points.", "N")] = 0.5,
    image_size: ImageSize = None,
    merge: Merge = None,
    from_bytes: Annotated[
        Switch, option("Take one decoded image of any size, uint8 (height, width, channels), and resize it (onnx).")
    ] = False,
    dynamic_size: Annotated[
        Switch, option("Take images of any height and width that the patches divide, up to a limit, instead of one.")
    ] = False,
    overwrite: Annotated[Switch, option("Replace the file if it exists.")] = False,
    format: Format = "human",
) -> None:
    """Export a model to ONNX, OpenVINO or torch.export, and verify it.

    The file takes uint8 images (batch, channels, height, width), carries its preprocessing and labels as JSON, and is
    kept only if its outputs equal the model's.

    Examples
    --------
    vitral export vit-cifar10 --to onnx
    vitral export runs/photos-1 --to onnx --out photos.onnx --image-size 384
    vitral export runs/photos-1 --to onnx --dynamic-size
    vitral export runs/photos-1 --to openvino --precision int8 --max-drop 0.5
    """
    options: dict[str, Any] = dict(precision=precision, images=images, max_drop=max_drop, overwrite=overwrite)
    options |= dict(merge=merge, from_bytes=from_bytes, dynamic_size=dynamic_size)
    with stages(quiet=format != "human") as show_stage:
        exported = vitral.export(model, out, to=to, image_size=image_size, on_stage=show_stage, **options)
    difference = f"maximum difference {exported.difference:.1e}, relative to the largest logit"
    origin = exported.origin
    if exported.dynamic_size is not None:
        origin += f" of {', '.join('x'.join(map(str, size)) for size in exported.sizes)}"
    verified = f"Verified on {exported.images} images ({origin}): {difference}."
    accuracy = [] if exported.drop is None else [f"int8: {exported.drop}"]
    kept = [f"Layers in float32: {', '.join(exported.kept)}."] if exported.kept else []
    lines = [f"{exported.path}: {format_bytes(exported.bytes)}", verified, *accuracy, *kept, *exported.notes]
    show_as(format, json=exported.as_dict(), human=lambda: show_lines(lines))
