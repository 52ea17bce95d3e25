"""``vitral models``: the table of names, with what each costs."""

from typing import Annotated

from cyclopts import Parameter

from vitral.errors import ConfigError, did_you_mean
from vitral.model.cost import count_cost
from vitral.model.sizes import NAMES, canonical_name, named_config
from vitral.show.console import Format, show_json, show_lines
from vitral.show.models import TRAINING_BATCH, ModelRow, models_table


def models(
    *words: str,
    image_size: Annotated[int | None, Parameter(help="Cost at this size, instead of each model's own.")] = None,
    format: Annotated[Format, Parameter(help="human: a table; json: all numbers; quiet: names.")] = "human",
) -> None:
    """Names of models, with parameters, FLOPs and memory.

    Parameters
    ----------
    words
        Show only models that have all these words in their name or description, such as: hybrid, small, b16.
    """
    names = find_models(words)
    rows = [model_row(name, image_size) for name in names]
    if format == "json":
        show_json([row.as_dict() for row in rows])
    elif format == "quiet":
        show_lines(names)
    else:
        models_table(rows)


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
        raise ConfigError(f"No model matches {' '.join(words)!r}.", hint=hint or "`vitral models` lists them all.")
    return found


def _description(name: str) -> str:
    if name.startswith("r"):
        return "hybrid"
    return "small" if any(size in name for size in ("pico", "nano", "micro")) else "paper"


def model_row(name: str, image_size: int | None) -> ModelRow:
    config = named_config(name)
    size = config.image_hw if image_size is None else (image_size, image_size)
    cost = count_cost(config, size)
    return ModelRow(
        name=name,
        image_size=size,
        tokens=cost.tokens,
        parameters=cost.parameters,
        forward_flops=cost.forward_flops,
        inference_bytes=cost.inference_bytes,
        training_bytes=cost.training_bytes(TRAINING_BATCH),
    )
