"""`vitral models` and `vitral plan`: list the models with their cost, and estimate the cost of a training run."""

from collections.abc import Mapping
from typing import Annotated, Any

import vitral
from vitral.cli.parameters import Format, ImageSize, Integer, OptionalInt, OptionalNumber, Switch, Text, option
from vitral.console.output import show_as
from vitral.console.plan import show_plan
from vitral.console.tables import TRAINING_BATCH, show_models, show_pretrained
from vitral.errors import ConfigError, DataError, did_you_mean
from vitral.model.config import ViTConfig
from vitral.model.cost import count_cost
from vitral.model.sizes import NAMES, canonical_name, named_config
from vitral.planning import DEVICES, parse_bytes, parse_count
from vitral.weights.pretrained import PRETRAINED
from vitral.weights.shipped import SHIPPED


def models(
    *words: str,
    pretrained: Annotated[Switch, option("List published checkpoints instead, with license and accuracy.")] = False,
    image_size: Annotated[
        ImageSize, option("Count the cost at this size, such as 384 or 320x480 (height x width).")
    ] = None,
    format: Annotated[Format, option("human, json (exact numbers) or quiet (names only).")] = "human",
) -> None:
    """List the models with their parameters, FLOPs and memory.

    Every name works with `vitral train --model` and `vitral.create`. The shipped models, and the checkpoints that
    --pretrained lists, also work wherever a command takes a MODEL.

    Parameters
    ----------
    words
        List only models with all these words in their name or description, such as hybrid, small, b16 or dinov2.

    Examples
    --------
    vitral models
    vitral models hybrid b16
    vitral models vit-b16 --image-size 384 --format json
    vitral models --pretrained dinov2
    """
    names = find_checkpoints(words) if pretrained else find_models(words)
    all_rows = (PRETRAINED[name].as_dict(image_size) if pretrained else model_row(name, image_size) for name in names)
    rows = [row for row in all_rows if row is not None]
    if image_size is not None and not rows:
        config = PRETRAINED[names[0]].config if pretrained else named_config(names[0])
        config.grid(*image_size)  # raises the error that explains what is wrong with the size
    omitted = len(names) - len(rows)

    def show() -> None:
        show_pretrained(rows, omitted) if pretrained else show_models(rows, SHIPPED, omitted)

    show_as(format, json=rows, quiet=(row["name"] for row in rows), human=show)


def find_models(words: tuple[str, ...]) -> list[str]:
    """Return one model by its whole name in any spelling, or all models that match every word."""
    try:
        return [canonical_name(" ".join(words))]
    except ConfigError:
        pass
    if names := _matching({name: f"{name} {_description(name)}" for name in NAMES}, words):
        return names
    vocabulary = {word for name in NAMES for word in (name, *_description(name).split())}
    hint = "Pass --pretrained to list published checkpoints." if _matching(_CHECKPOINT_WORDS, words) else None
    raise _no_match("model", words, vocabulary, hint, "vitral models")


def find_checkpoints(words: tuple[str, ...]) -> list[str]:
    """Return the pretrained names that match every word."""
    if names := [name for name in PRETRAINED if [name] == [*words]] or _matching(_CHECKPOINT_WORDS, words):
        return names
    raise _no_match("pretrained checkpoint", words, set(PRETRAINED), None, "vitral models --pretrained")


_CHECKPOINT_WORDS = {name: f"{name} {row.hub} {row.dialect} {row.license}" for name, row in PRETRAINED.items()}
"""The words that find a checkpoint."""


def _matching(texts: Mapping[str, str], words: tuple[str, ...]) -> list[str]:
    return [name for name, text in texts.items() if all(word.lower() in text.lower() for word in words)]


def _no_match(kind: str, words: tuple[str, ...], vocabulary: set[str], hint: str | None, command: str) -> ConfigError:
    hint = hint or next(filter(None, (did_you_mean(word, vocabulary) for word in words)), None)
    hint = hint or f"Run `{command}` to list them all."
    return ConfigError(f"No {kind} matches {' '.join(map(repr, words))}.", hint=hint)


def _description(name: str) -> str:
    """Return the words that find a model besides its name."""
    if name.startswith("bit"):
        return "baseline resnet"
    if name.startswith("r"):
        return "hybrid"
    return "small" if any(size in name for size in ("pico", "nano", "micro")) else ""


def model_row(name: str, image_size: tuple[int, int] | None) -> dict[str, Any] | None:
    """Return the sizes and the cost of a model, or None if its patch size does not divide the image size."""
    config = named_config(name)
    size = image_size or config.image_hw
    try:
        cost = count_cost(config, size)
    except DataError:
        return None
    is_vit = isinstance(config, ViTConfig)
    return {
        "name": name,
        "width": config.width,
        "depth": config.depth if is_vit else config.blocks,
        "heads": config.heads if is_vit else None,
        "mlp_width": config.mlp_width if is_vit else None,
        "patch_size": config.patch_hw if is_vit else None,
        "image_size": size,
        "tokens": cost.tokens,
        "parameters": cost.parameters,
        "forward_flops": cost.forward_flops,
        "inference_bytes": cost.inference_bytes,
        "training_batch": TRAINING_BATCH,
        "training_bytes": cost.training_bytes(TRAINING_BATCH),
    }


def plan(
    *,
    model: Annotated[str, option("Architecture, such as vit-l16, r50-vit-b16 or bit-r50x1.", "MODEL")],
    images: Annotated[str, option("Number of training images: 50000, 1.28M or 303M.", "N")] = "1.28M",
    epochs: Annotated[float, option("Number of passes over the training images.", "N")] = 1,
    image_size: Annotated[
        ImageSize, option("Input size, such as 384 or 320x480 (height x width).", show_default="that of the model")
    ] = None,
    num_classes: Annotated[OptionalInt, option("Number of classes.", show_default="1000")] = None,
    batch_size: Annotated[Integer, option("Images per device and step; sets the memory.")] = 32,
    device: Annotated[
        Text,
        option(f"{', '.join(DEVICES)}, or here to time a step on this machine.", "DEVICE", show_default="all of them"),
    ] = None,
    devices: Annotated[Integer, option("Number of devices.")] = 1,
    images_per_second: Annotated[OptionalNumber, option("Training speed of one device, if you know it.")] = None,
    price: Annotated[OptionalNumber, option("Price of one device per hour.")] = None,
    memory: Annotated[
        Text, option("Memory of one device, such as 80GB or 24GiB.", "SIZE", show_default="that of the data sheet")
    ] = None,
    precision: Annotated[str, option("float32 or bfloat16 (mixed), for the strategy.", "PRECISION")] = "bfloat16",
    parallel: Annotated[str, option("auto, ddp or fsdp.", "KIND")] = "auto",
    optimizer: Annotated[str, option("adamw, muon or sgd.", "NAME")] = "adamw",
    attention: Annotated[str, option("fused, recorded (keeps attention weights) or axial.", "KIND")] = "fused",
    format: Annotated[Format, option("human, json or quiet (exaFLOPs only).")] = "human",
) -> None:
    """Estimate operations, memory, time and price of a training run.

    Operations are counted as in the paper: a training step is three forward passes, a multiply-add is two operations.
    Memory is that of each way to train (DDP, FSDP, gradient checkpointing). The speed of many devices is a prediction
    from data sheets. Sizes up to vit-22b can be planned.

    Examples
    --------
    vitral plan --model vit-b16 --images 1.28M --epochs 300
    vitral plan --model vit-l16 --images 303M --epochs 7 --device a100 --price 2
    vitral plan --model vit-s16 --images 50k --epochs 20 --device here
    vitral plan --model vit-g14 --devices 64 --memory 80GB --batch-size 64
    """
    options: dict[str, Any] = dict(epochs=epochs, image_size=image_size, num_classes=num_classes, batch_size=batch_size)
    options |= dict(device=device, devices=devices, images_per_second=images_per_second, price=price)
    options |= dict(memory=None if memory is None else parse_bytes(memory, "--memory"), precision=precision)
    options |= dict(parallel=parallel, optimizer=optimizer, attention=attention)
    result = vitral.plan(model, images=parse_count(images, "--images"), **options)
    exaflops = f"{result.training_exaflops:.6g}"
    show_as(format, json=result.as_dict(), quiet=[exaflops], human=lambda: show_plan(result))
