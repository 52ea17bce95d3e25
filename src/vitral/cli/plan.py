"""`vitral plan`: estimate the cost of a training run."""

from typing import Annotated

from cyclopts import Parameter

from vitral.cli.parameters import FORMAT, ImageSize, Integer, OptionalInt, OptionalNumber
from vitral.console.output import Format, show_as
from vitral.console.tables import show_plan
from vitral.planning import DEVICES, parse_count
from vitral.planning import plan as make_plan


def plan(
    *,
    model: Annotated[str, Parameter(help="Architecture, such as vit-l16, r50-vit-b16 or bit-r50x1.", metavar="MODEL")],
    images: Annotated[str, Parameter(help="Number of training images: 50000, 1.28M or 303M.", metavar="N")],
    epochs: Annotated[float, Parameter(help="Number of passes over the training images.", metavar="N")] = 1,
    image_size: Annotated[
        ImageSize,
        Parameter(help="Input size, such as 384 or 320x480 (height x width).", show_default="that of the model"),
    ] = None,
    num_classes: Annotated[OptionalInt, Parameter(help="Number of classes.", show_default="1000")] = None,
    batch_size: Annotated[Integer, Parameter(help="Images per device and step; sets the memory.")] = 32,
    device: Annotated[
        str | None,
        Parameter(
            help=f"{', '.join(DEVICES)}, or here to time a step on this machine.",
            metavar="DEVICE",
            show_default="all of them",
        ),
    ] = None,
    devices: Annotated[Integer, Parameter(help="Number of devices.")] = 1,
    images_per_second: Annotated[
        OptionalNumber, Parameter(help="Training speed of one device, if you know it.")
    ] = None,
    price: Annotated[OptionalNumber, Parameter(help="Price of one device per hour.")] = None,
    format: Annotated[Format, FORMAT, Parameter(help="human, json or quiet (exaFLOPs only).")] = "human",
) -> None:
    """Estimate operations, memory, time and price of a training run.

    Operations are counted as in the paper: a training step is three forward passes, a multiply-add is two operations.

    Examples
    --------
    vitral plan --model vit-b16 --images 1.28M --epochs 300
    vitral plan --model vit-l16 --images 303M --epochs 7 --device a100 --price 2
    vitral plan --model vit-s16 --images 50k --epochs 20 --device here
    """
    result = make_plan(
        model,
        images=parse_count(images, "--images"),
        epochs=epochs,
        image_size=image_size,
        num_classes=num_classes,
        batch_size=batch_size,
        device=device,
        devices=devices,
        images_per_second=images_per_second,
        price=price,
    )
    exaflops = f"{result.training_exaflops:.6g}"
    show_as(format, json=result.as_dict(), quiet=[exaflops], human=lambda: show_plan(result))
