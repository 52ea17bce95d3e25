"""`vitral inspect`: where a model looks and what it learned."""

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import vitral
from vitral.cli.launch import check_single_process
from vitral.cli.parameters import Device, Format, Image, ImageSize, Model, Switch, option
from vitral.console.output import show_as, show_lines
from vitral.console.progress import stages
from vitral.console.results import describe_inspection
from vitral.files import printable


def inspect(
    model: Model,
    /,
    *images: Image,
    out: Annotated[
        Path | None, option("Write to this folder. Default: inspect-NAME.", "DIR", show_default=False)
    ] = None,
    label: Annotated[
        tuple[str, ...],
        option(
            "Show the relevance for this class instead of the most probable ones. Repeat for several.",
            "LABEL",
            negative="",
            show_default=False,
        ),
    ] = (),
    faithfulness: Annotated[
        Switch, option("Delete the patches that the maps rank highest, to test whether they matter.")
    ] = False,
    open: Annotated[Switch, option("Open the page in the web browser.")] = False,
    overwrite: Annotated[Switch, option("Replace the files of an earlier inspection.")] = False,
    image_size: ImageSize = None,
    device: Device = "auto",
    format: Format = "human",
) -> None:
    """Show where a model looks and what it learned.

    Writes inspect.html, which works offline, PNGs of its figures, and inspect.json with the numbers. The page shows
    the first eight images; attention distances are averaged over all of them. Unreadable images are left out with
    a warning.

    Examples
    --------
    vitral inspect vit-cifar10 photo.jpg --out inside
    vitral inspect runs/pets-1 photos/ --out inside --faithfulness --open
    vitral inspect runs/pets-1 photo.jpg --label beagle --label pug
    """
    from vitral.data.sources.image_files import find_images

    check_single_process("inspect")
    files = find_images(images, sys.stdin)
    with stages(quiet=format != "human") as show:
        result = vitral.inspect(
            model,
            files,
            out=out,
            labels=label,
            faithfulness=faithfulness,
            image_size=image_size,
            device=device,
            overwrite=overwrite,
            on_stage=lambda stage: show(stage.capitalize()),
        )
    page = Path(result.out) / "inspect.html"
    for name, reason in result.skipped:
        print(f"vitral: warning: skipped {printable(name)}: {printable(reason)}", file=sys.stderr)
    facts = {"page": str(page)} | result.as_dict()
    show_as(format, json=facts, quiet=[str(page)], human=lambda: show_lines(describe_inspection(facts)))
    if open:
        webbrowser.open(page.resolve().as_uri())
