"""``vitral convert``: a checkpoint in another dialect, and the proof that it answers the same."""

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from vitral.errors import ConfigError, VitralError, WeightsError
from vitral.show.console import Format, show_json, show_lines

Dialect = Literal["native", "google", "big_vision", "timm", "huggingface", "torchvision"]
TOLERANCE = 1e-5


def convert(
    source: str,
    target: Path,
    /,
    *,
    to: Annotated[Dialect, Parameter(help="The dialect to write.")],
    set: Annotated[
        tuple[str, ...],
        Parameter(help="Change the network on the way: FIELD=VALUE of ViTConfig.", consume_multiple=True),
    ] = (),
    overwrite: Annotated[bool, Parameter(help="Replace the target if it exists.", negative="")] = False,
    format: Annotated[Format, Parameter(help="human: a sentence; json: everything; quiet: nothing.")] = "human",
) -> None:
    """A checkpoint in another dialect. Ends by loading what was written and comparing logits.

    Parameters
    ----------
    source
        A file, a folder, or hf:owner/name.
    target
        The file to write; for timm and huggingface also a folder.
    """
    result = convert_checkpoint(source, target, to, parse_fields(set), overwrite=overwrite)
    if format == "json":
        show_json(result)
    elif format == "human":
        show_lines(
            [
                f"{source} ({result['from']}) -> {target} ({to})",
                f"Loaded again and compared on {result['images']} images: largest difference of logits "
                f"{result['difference']:.1e}.",
                *result["notes"],
            ]
        )


def convert_checkpoint(source: str, target: Path, to: str, asked: dict[str, Any], *, overwrite: bool) -> dict[str, Any]:
    from vitral.weights.load import load
    from vitral.weights.save import save

    if target.exists() and not overwrite:
        raise WeightsError(f"{target} exists, and nothing is overwritten by accident.", hint="Give --overwrite.")
    loaded = load(source, **asked)
    assert loaded.report is not None
    notes = save(loaded, target, dialect=to)
    told = _untold(loaded.model.config, target, to)
    back = load(target, **told)
    difference, images = compare(loaded.model, back.model)
    if not difference <= TOLERANCE:
        raise VitralError(
            f"{target} was written but does not answer the same: logits differ by {difference:.1e}, and "
            f"{TOLERANCE:.0e} is allowed."
        )
    return {
        "source": source,
        "from": loaded.report.dialect,
        "target": str(target),
        "to": to,
        "difference": difference,
        "images": images,
        "notes": [*notes, *(f"Say {name}={value} when loading it: the file cannot." for name, value in told.items())],
        "report": loaded.report.as_dict(),
    }


def _untold(config: Any, target: Path, to: str) -> dict[str, Any]:
    """What a reader must be told because the dialect has no place for it."""
    told: dict[str, Any] = {"heads": config.heads} if target.suffix in (".pth", ".pt", ".bin") else {}
    if to in ("google", "big_vision") and config.table_grid[0] != config.table_grid[1]:
        told["position_grid"] = config.table_grid
    if to == "big_vision" and config.position == "sincos-2d":
        told["image_size"] = config.image_size
    return told


def compare(first: Any, second: Any, images: int = 2) -> tuple[float, int]:
    """The largest difference of logits on random images, in float32, beside a scale of 1."""
    import torch

    config = first.config
    pictures = torch.randn(images, config.channels, *config.image_hw, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        one, other = first.float()(pictures), second.float()(pictures)
    scale = max(1.0, one.abs().max().item())
    return (one - other).abs().max().item() / scale, images


def parse_fields(words: tuple[str, ...]) -> dict[str, Any]:
    """image_size=384 pool=mean class_token=true -> the fields of ViTConfig."""
    from vitral.model.config import field_from_word

    fields = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--set {word!r} must be FIELD=VALUE.", hint="Such as image_size=384.")
        fields[name.strip()] = field_from_word(value)
    return fields
