"""`vitral models`: list the models and their cost."""

from typing import Annotated, Any

from cyclopts import Parameter

from vitral.cli.parameters import FORMAT, ImageSize
from vitral.console.output import Format, show_as
from vitral.console.tables import TRAINING_BATCH, show_models
from vitral.errors import ConfigError, DataError, did_you_mean
from vitral.model.config import ViTConfig
from vitral.model.cost import count_cost
from vitral.model.sizes import NAMES, canonical_name, named_config
from vitral.weights.shipped import SHIPPED


def models(
    *words: str,
    image_size: Annotated[
        ImageSize, Parameter(help="Count the cost at this size, such as 384 or 320x480 (height x width).")
    ] = None,
    format: Annotated[Format, FORMAT, Parameter(help="human, json (exact numbers) or quiet (names only).")] = "human",
) -> None:
    """List the models with their parameters, FLOPs and memory.

    Every name works with `vitral train --model` and `vitral.create`. The shipped models also work wherever a command
    takes a MODEL.

    Parameters
    ----------
    words
        List only models with all these words in their name or description, such as hybrid, small or b16.

    Examples
    --------
    vitral models
    vitral models hybrid b16
    vitral models vit-b16 --image-size 384 --format json
    """
    names = find_models(words)
    rows = [row for row in (model_row(name, image_size) for name in names) if row is not None]
    if image_size is not None and not rows:
        named_config(names[0]).grid(*image_size)  # raises the error that explains what is wrong with the size
    shown = (row["name"] for row in rows)
    show_as(format, json=rows, quiet=shown, human=lambda: show_models(rows, SHIPPED, omitted=len(names) - len(rows)))


def find_models(words: tuple[str, ...]) -> list[str]:
    """Return one model by its whole name in any spelling, or all models that match every word."""
    try:
        return [canonical_name(" ".join(words))]
    except ConfigError:
        pass
    names = [name for name in NAMES if all(word.lower() in f"{name} {_description(name)}".lower() for word in words)]
    if not names:
        vocabulary = {word for name in NAMES for word in (name, *_description(name).split())}
        hint = next(filter(None, (did_you_mean(word, vocabulary) for word in words)), None)
        hint = hint or "Run `vitral models` to list them all."
        raise ConfigError(f"No model matches {' '.join(map(repr, words))}.", hint=hint)
    return names


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
