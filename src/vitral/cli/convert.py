"""``vitral convert``: a checkpoint in another dialect, and the proof that it answers the same."""

from os import getpid
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from vitral.console.output import Format, show_json, show_lines
from vitral.errors import ConfigError, VitralError, WeightsError
from vitral.files import printable

Dialect = Literal["native", "google", "big_vision", "timm", "huggingface", "torchvision", "bit"]
TOLERANCE = 1e-5


def convert(
    source: str,
    target: Path,
    /,
    *,
    to: Annotated[Dialect, Parameter(help="The dialect to write.")],
    set: Annotated[
        tuple[str, ...],
        Parameter(
            help="Change it on the way, such as image_size=384, activation=gelu, preprocess.mean=(0.5,0.5,0.5).",
            consume_multiple=True,
            negative="",
            show_default=False,
        ),
    ] = (),
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Parameter(help="Round the numbers: half the size. By default they stay as they are."),
    ] = None,
    overwrite: Annotated[bool, Parameter(help="Replace the target if it exists.", negative="")] = False,
    format: Annotated[Format, Parameter(help="human: a sentence; json: everything; quiet: nothing.")] = "human",
) -> None:
    """A checkpoint in another dialect. Ends by loading what was written and comparing logits.

    Parameters
    ----------
    source
        A file, a folder, vit-cifar10 (it comes with vitral), or hf:owner/name.
    target
        The file to write: .safetensors for native, .npz for google, big_vision and bit, .safetensors or .pth for the
        others; for timm and huggingface also a folder.
    """
    result = convert_checkpoint(source, target, to, parse_fields(set), precision, overwrite=overwrite)
    if format == "json":
        show_json(result)
    elif format == "human":
        show_lines(
            printable(line)
            for line in [
                f"{source} ({result['from']}) -> {target} ({to})",
                f"Loaded again and compared on {result['images']} images: largest difference of features and logits "
                f"{result['difference']:.1e}.",
                *([] if precision is None else [f"Rounding to {precision} changed them by {result['rounding']:.1e}."]),
                *result["notes"],
                *(f"fresh: {name}: {reason}" for name, reason in result["report"]["fresh"].items()),
                *(f"assumed: {sentence}" for sentence in result["report"]["assumed"]),
                *(f"warning: {sentence}" for sentence in result["report"]["warnings"]),
            ]
        )


def convert_checkpoint(
    source: str, target: Path, to: str, asked: dict[str, Any], precision: str | None, *, overwrite: bool
) -> dict[str, Any]:
    from vitral.weights.formats.tensor_file import is_file
    from vitral.weights.load import load
    from vitral.weights.save import check_target, save

    if target.exists() and not overwrite:
        raise WeightsError(f"{target} exists, and nothing is overwritten by accident.", hint="Give --overwrite.")
    check_target(target, to)
    of_pictures = [name for name in asked if name.startswith("preprocess.")]
    changes = {name.removeprefix("preprocess."): asked.pop(name) for name in of_pictures}
    loaded = load(source, preprocess=changes or None, **asked)
    assert loaded.report is not None
    rounding = 0.0 if precision is None else round_to(loaded.model, precision)
    place = target.absolute()  # "." has no name of its own
    aside = place.with_name(f".{place.stem}.{getpid()}.new{place.suffix if is_file(place) else ''}")
    remove(aside)
    try:
        written = save(loaded, aside, dialect=to)
        difference, images = compare(loaded.model, load(aside, **written.tell).model)
        if not difference <= TOLERANCE:
            raise VitralError(
                f"What was written for {target} does not answer the same: it differs by {difference:.1e}, and "
                f"{TOLERANCE:.0e} is allowed. Nothing was kept."
            )
        put_in_place(aside, place)
    finally:
        remove(aside)
    return {
        "source": source,
        "from": loaded.report.dialect,
        "target": str(target),
        "to": to,
        "difference": difference,
        "rounding": rounding,
        "images": images,
        "notes": list(written.notes),
        "report": loaded.report.as_dict(),
    }


def round_to(model: Any, precision: str) -> float:
    """In place; how far its answers are then from those that it gave before."""
    from copy import deepcopy

    import torch

    before = deepcopy(model)
    model.to(getattr(torch, precision))
    return compare(before, deepcopy(model))[0]


def put_in_place(aside: Path, target: Path) -> None:
    """What else is in a folder stays."""
    if not aside.is_dir():
        aside.replace(target)
        return
    target.mkdir(exist_ok=True)
    for written in aside.iterdir():
        written.replace(target / written.name)


def remove(path: Path) -> None:
    from shutil import rmtree

    if path.is_dir():
        rmtree(path)
    else:
        path.unlink(missing_ok=True)


def compare(first: Any, second: Any, images: int = 2) -> tuple[float, int]:
    """The largest difference of pooled features and logits on random images, in float32, beside a scale of 1.

    Features count because a head may be all zeros, and then proves nothing."""
    import torch

    config = first.config
    pictures = torch.randn(images, config.channels, *config.image_hw, generator=torch.Generator().manual_seed(0))
    found = []
    with torch.inference_mode():
        one, other = first.float(), second.float()
        answers = [(model(pictures), model.features(pictures).pooled) for model in (one, other)]
        for a, b in zip(*answers, strict=True):
            found.append((a - b).abs().max().item() / max(1.0, a.abs().max().item()))
    return max(found), images


def parse_fields(words: tuple[str, ...]) -> dict[str, Any]:
    """image_size=384 pool=mean class_token=true -> the fields of ViTConfig."""
    from vitral.model.config import field_from_word

    fields = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--set {word!r} must be FIELD=VALUE.", hint="Such as image_size=384.")
        name = name.strip()
        fields[name] = field_from_word(name, value)
    return fields
