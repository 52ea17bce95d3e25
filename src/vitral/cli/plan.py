"""``vitral plan``: what a training run costs, before it is begun."""

from typing import Annotated

from cyclopts import Parameter

from vitral.cli.numbers import WHOLE, parse_size
from vitral.console.output import Format, show_json, show_lines
from vitral.console.plan import show_plan
from vitral.planning import DEVICES, count_from_word, make_plan


def plan(
    *,
    model: Annotated[str, Parameter(help="Its name, such as vit-l16, r50-vit-b16 or bit-r50x1.")],
    images: Annotated[str, Parameter(help="How many images the data have: 50000, 1.28M, 303M.")],
    epochs: Annotated[float, Parameter(help="How often each is seen.")] = 1.0,
    image_size: Annotated[str | None, Parameter(help="384, or 384x256 for height x width.")] = None,
    num_classes: Annotated[int | None, WHOLE, Parameter(help="Number of logits.")] = None,
    batch_size: Annotated[int, WHOLE, Parameter(help="Images on one device at once, for the memory.")] = 32,
    device: Annotated[
        str | None,
        Parameter(help=f"{', '.join(DEVICES)}, or here: forward and backward are timed. All, if left out."),
    ] = None,
    devices: Annotated[int, WHOLE, Parameter(help="How many of them.")] = 1,
    images_per_second: Annotated[float | None, Parameter(help="What one device was seen to train at.")] = None,
    price: Annotated[float | None, Parameter(help="Of one device for an hour.")] = None,
    format: Annotated[Format, Parameter(help="human: a table; json: all numbers; quiet: exaFLOPs.")] = "human",
) -> None:
    """Operations, memory, time and price of a training run, counted as the paper counts."""
    found = make_plan(
        model,
        images=count_from_word(images, "--images"),
        epochs=epochs,
        image_size=parse_size(image_size),
        num_classes=num_classes,
        batch_size=batch_size,
        device=device,
        devices=devices,
        images_per_second=images_per_second,
        price=price,
    )
    if format == "json":
        show_json(found.as_dict())
    elif format == "quiet":
        show_lines([f"{found.training_exaflops:.6g}"])
    else:
        show_plan(found)
