"""``vitral export``: a file that other programs run, and the proof that it answers the same."""

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from vitral.cli.numbers import parse_size
from vitral.console.output import Format, in_bytes, show_json, show_lines


def export(
    run: str,
    /,
    *,
    to: Annotated[Literal["onnx", "pt2"], Parameter(help="onnx: for most programs; pt2: torch.export's, for C++.")],
    out: Annotated[Path | None, Parameter(help="Where to; by default NAME.onnx in the current folder.")] = None,
    image_size: Annotated[str | None, Parameter(help="Another size than it was trained at: 224, or HxW.")] = None,
    overwrite: Annotated[bool, Parameter(help="Replace the file if it exists.", negative="")] = False,
    format: Annotated[Format, Parameter(help="human: a few lines; json: the same; quiet: nothing.")] = "human",
) -> None:
    """A file that other programs run. It takes pixels (uint8, images x channels x height x width), holds its
    preprocessing and labels as JSON, and is kept only if it answers as the network does.

    Parameters
    ----------
    run
        A run folder, a weights file, vit-cifar10 (it comes with vitral), or hf:owner/name.
    """
    from vitral.console.progress import stages
    from vitral.exporting.exporter import check_target
    from vitral.exporting.exporter import export as export_checkpoint
    from vitral.inference.loaded_model import open_checkpoint

    path = out or Path(f"{name_of(run)}.{to}")
    check_target(to, path, overwrite)
    with stages(quiet=format != "human") as tell:
        tell("loading")
        checkpoint, _ = open_checkpoint(run, parse_size(image_size))
        done = export_checkpoint(checkpoint, path, to=to, overwrite=overwrite, tell=tell)
    if format == "json":
        show_json(done.as_dict())
    elif format == "human":
        compared = f"Asked about {done.images} pictures, it answers as the network does"
        how_well = f"the largest difference is {done.difference:.1e} of the largest logit."
        show_lines([f"{done.path}: {in_bytes(done.bytes)}", f"{compared}: {how_well}", *done.notes])


def name_of(run: str) -> str:
    """runs/photos -> photos, vit.safetensors -> vit, hf:google/vit -> vit."""
    path = Path(os.path.abspath(run.removeprefix("hf:").removesuffix(":img")))  # not what a link of a cache points to
    return path.stem if path.is_file() else path.name
