"""``vitral models``: the table of names, with what each costs."""

from typing import Annotated

from cyclopts import Parameter

from vitral.cli.numbers import parse_size
from vitral.console.models import TRAINING_BATCH, ModelRow, models_table
from vitral.console.output import Format, show_json, show_lines
from vitral.errors import ConfigError, DataError, did_you_mean
from vitral.model.config import ViTConfig
from vitral.model.cost import count_cost
from vitral.model.sizes import NAMES, canonical_name, named_config
from vitral.weights.shipped import SHIPPED


def models(
    *words: str,
    image_size: Annotated[str | None, Parameter(help="Cost at this size: 384, or 384x256 for height x width.")] = None,
    format: Annotated[Format, Parameter(help="human: a table; json: all numbers; quiet: names.")] = "human",
) -> None:
    """Names of models, with parameters, FLOPs and memory.

    Parameters
    ----------
    words
        Show only models that have all these words in their name or description, such as: hybrid, small, b16.
    """
    names = find_models(words)
    size = parse_size(image_size)
    rows = [row for row in (model_row(name, size) for name in names) if row is not None]
    if size is not None and not rows:
        named_config(names[0]).grid(*size)  # says what is wrong with the size
    if format == "json":
        show_json([row.as_dict() for row in rows])
    elif format == "quiet":
        show_lines(row.name for row in rows)
    else:
        models_table(rows, SHIPPED, left_out=len(names) - len(rows))


def find_models(words: tuple[str, ...]) -> list[str]:
    """One model by its whole name in any spelling, or all that have every word."""
    try:
        return [canonical_name(" ".join(words))]
    except ConfigError:
        pass
    found = [name for name in NAMES if all(word.lower() in f"{name} {_description(name)}".lower() for word in words)]
    if not found:
        vocabulary = {word for name in NAMES for word in (name, *_description(name).split())}
        hint = next(filter(None, (did_you_mean(word, vocabulary) for word in words)), None)
        wanted = " ".join(map(repr, words))
        raise ConfigError(
            f"No model {'has all of' if len(words) > 1 else 'matches'} {wanted}.",
            hint=hint or "`vitral models` lists them all.",
        )
    return found


def _description(name: str) -> str:
    if name.startswith("bit"):
        return "baseline resnet"
    if name.startswith("r"):
        return "hybrid"
    return "small" if any(size in name for size in ("pico", "nano", "micro")) else ""


def model_row(name: str, image_size: tuple[int, int] | None) -> ModelRow | None:
    """None where the patch does not divide the size."""
    config = named_config(name)
    size = image_size or config.image_hw
    try:
        cost = count_cost(config, size)
    except DataError:
        return None
    is_vit = isinstance(config, ViTConfig)
    return ModelRow(
        name=name,
        width=config.width,
        depth=config.depth if is_vit else config.blocks,
        heads=config.heads if is_vit else None,
        mlp_width=config.mlp_width if is_vit else None,
        patch_size=config.patch_hw if is_vit else None,
        image_size=size,
        tokens=cost.tokens,
        parameters=cost.parameters,
        forward_flops=cost.forward_flops,
        inference_bytes=cost.inference_bytes,
        training_batch=TRAINING_BATCH,
        training_bytes=cost.training_bytes(TRAINING_BATCH),
    )
