"""`vitral export`: write a model as a file for other runtimes."""

from typing import Annotated, Literal

from cyclopts import Parameter

from vitral.cli.parameters import FORMAT, File, ImageSize, Model, Switch
from vitral.console.output import Format, show_as, show_lines
from vitral.report.text import format_bytes


def export(
    model: Model,
    /,
    *,
    to: Annotated[
        Literal["onnx", "pt2"],
        Parameter(help="onnx for most runtimes, pt2 for torch.export and C++.", metavar="FORMAT", show_choices=False),
    ],
    out: Annotated[File, Parameter(help="File to write. By default the model's name with .onnx or .pt2.")] = None,
    image_size: ImageSize = None,
    overwrite: Annotated[Switch, Parameter(help="Replace the file if it exists.")] = False,
    format: Annotated[Format, FORMAT, Parameter(help="human, json or quiet.")] = "human",
) -> None:
    """Export a model to ONNX or torch.export, and verify it.

    The file takes uint8 images (batch, channels, height, width), carries its preprocessing and labels as JSON, and is
    kept only if its outputs equal the model's.

    Examples
    --------
    vitral export vit-cifar10 --to onnx
    vitral export runs/photos-1 --to onnx --out photos.onnx --image-size 384
    """
    from vitral.api import export as export_model
    from vitral.console.progress import stages

    with stages(quiet=format != "human") as show_stage:
        exported = export_model(model, out, to=to, image_size=image_size, overwrite=overwrite, on_stage=show_stage)
    difference = f"maximum difference {exported.difference:.1e}, relative to the largest logit"
    verified = f"Verified on {exported.images} images: {difference}."
    lines = [f"{exported.path}: {format_bytes(exported.bytes)}", verified, *exported.notes]
    show_as(format, json=exported.as_dict(), human=lambda: show_lines(lines))
