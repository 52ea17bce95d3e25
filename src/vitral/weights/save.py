"""The way out: a model, with its preprocessing and labels, in our format or in anybody else's."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vitral.errors import ConfigError, WeightsError, did_you_mean
from vitral.model.vit import ViT
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import Checkpoint, default_preprocess
from vitral.weights.content import Content
from vitral.weights.dialects import WRITERS


def save(
    what: Checkpoint | ViT,
    path: str | Path,
    *,
    dialect: str = "native",
    preprocess: Preprocess | None = None,
    labels: Sequence[str] | None = None,
) -> list[str]:
    """Writes a Checkpoint or a bare model. Other dialects than our own: google, big_vision, timm, huggingface,
    torchvision; a path without a suffix is a folder, for those that have one.

    Gives back what the reader of the file should know, in sentences. A file appears whole or not at all."""
    if dialect not in WRITERS:
        hint = did_you_mean(str(dialect), WRITERS)
        raise ConfigError(f"dialect={dialect!r} must be one of {', '.join(WRITERS)}.", hint=hint)
    target = Path(path)
    checkpoint = _as_checkpoint(what, preprocess, labels)
    model = checkpoint.model
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise WeightsError("The model has no numbers yet: it was built on the meta device.")
    content = Content(
        dialect=dialect,
        config=model.config,
        state=model.state_dict(),
        preprocess=checkpoint.preprocess,
        labels=checkpoint.labels,
        provenance={} if checkpoint.report is None else {"source": Path(checkpoint.report.source).name},
    )
    _check_target(target, dialect)
    return WRITERS[dialect].write(content, target)


def _as_checkpoint(what: Checkpoint | ViT, preprocess: Preprocess | None, labels: Sequence[str] | None) -> Checkpoint:
    if isinstance(what, ViT):
        what = Checkpoint(model=what, preprocess=default_preprocess(what))
    if not isinstance(what, Checkpoint):
        raise ConfigError(f"save takes a Checkpoint or a ViT, and this is of type {type(what).__name__}.")
    what = replace(what, preprocess=preprocess or what.preprocess)
    classes = what.model.config.num_classes
    if labels is not None:
        if isinstance(labels, str) or len(labels) != classes:
            raise ConfigError(f"There are {len(labels)} labels for {classes} classes.", hint="Give one for each class.")
        what = replace(what, labels=tuple(map(str, labels)))
    return what


def _check_target(path: Path, dialect: str) -> None:
    allowed = {
        "native": (".safetensors",),
        "google": (".npz",),
        "big_vision": (".npz",),
        "torchvision": (".safetensors", ".pth", ".pt"),
    }.get(dialect, (".safetensors", ".pth", ".pt", ".bin", ""))
    if path.suffix not in allowed:
        endings = " or ".join(ending or "nothing (a folder)" for ending in allowed)
        raise WeightsError(f"{path} must end in {endings} for the {dialect} dialect.")
    if path.suffix and path.is_dir():
        raise WeightsError(f"{path} is a folder, and a file should be written there.")
    if not path.suffix and path.is_file():
        raise WeightsError(f"{path} is a file, and a folder should be written there.")
