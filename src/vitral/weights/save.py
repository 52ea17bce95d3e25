"""The way out: a model, with its preprocessing and labels, in our format or in anybody else's."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from vitral.errors import ConfigError, WeightsError, did_you_mean
from vitral.files import as_text
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.model.network import Network
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import Checkpoint, default_preprocess
from vitral.weights.dialects import WRITERS, draft_of
from vitral.weights.dialects.content import Content
from vitral.weights.dialects.draft import Draft
from vitral.weights.formats.detect import open_tensors
from vitral.weights.formats.tensor_file import is_file
from vitral.weights.load import build_without_memory, shapes_of

_ENDINGS = {
    "native": (".safetensors",),
    "google": (".npz",),
    "big_vision": (".npz",),
    "bit": (".npz",),
    "torchvision": (".safetensors", ".pth", ".pt"),
}
# What a reader needs no telling of: rates and initial values of training, and spellings of the same thing.
_OF_TRAINING = ("dropout", "attention_dropout", "drop_path", "head_bias", "layer_scale", "position_resample")


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What ``save`` wrote, and what its reader should know."""

    path: Path
    tell: dict[str, Any] = field(default_factory=dict)
    """Fields that the file cannot hold: keywords for ``vitral.load``."""
    notes: tuple[str, ...] = ()


def save(
    what: Checkpoint | Network,
    path: str | Path,
    *,
    dialect: str = "native",
    preprocess: Preprocess | None = None,
    labels: Sequence[str] | None = None,
) -> Written:
    """Writes a Checkpoint or a bare model. Other dialects than our own: google, big_vision, timm, huggingface,
    torchvision; a path without a known ending is a folder, for those that have one.

    A file appears whole or not at all."""
    if not isinstance(dialect, str) or dialect not in WRITERS:
        hint = did_you_mean(str(dialect), WRITERS)
        raise ConfigError(f"dialect={dialect!r} must be one of {', '.join(WRITERS)}.", hint=hint)
    if not isinstance(path, str | Path) or not str(path):
        raise WeightsError(f"A checkpoint is written to a path, and this is {path!r}.")
    target = Path(path)
    checkpoint = as_checkpoint(what, preprocess, labels)
    check_model(checkpoint.model)
    check_target(target, dialect)
    report = checkpoint.report
    content = Content(
        dialect=dialect,
        network=checkpoint.model.config,
        state=checkpoint.model.state_dict(),
        preprocess=checkpoint.preprocess,
        labels=checkpoint.labels,
        multi_label=checkpoint.multi_label,
        provenance={} if report is None else {"source": Path(report.source).name},
        assumed=() if report is None else report.assumed,
    )
    notes = WRITERS[dialect].write(content, target)
    tell, lost = what_is_lost(content, target)
    notes += [f"The file cannot say {name}={value!r}: say it when loading." for name, value in tell.items()]
    notes += [f"The {thing} are not in the file: {dialect} has no place for them." for thing in lost]
    return Written(path=target, tell=tell, notes=tuple(notes))


def what_is_lost(content: Content, path: Path) -> tuple[dict[str, Any], list[str]]:
    """What somebody who reads the file gets otherwise: fields of the config; labels and preprocessing."""
    config = content.network
    if isinstance(config, BiTConfig):
        draft = draft_of(open_tensors(path), {})
        is_same = draft.config.image_hw == config.image_hw
        return {} if is_same else {"image_size": config.image_hw}, _differences(draft, content)
    draft = None
    asked: dict[str, Any] = {}
    for told in ({}, {"heads": config.heads}, {"heads": config.heads, "position_grid": config.table_grid}):
        try:
            draft, asked = draft_of(open_tensors(path), told), told
            break
        except WeightsError:
            continue
    if draft is None:
        raise WeightsError(f"{path} was written, but cannot be read again.")
    tell = dict(asked)
    for one in fields(ViTConfig):
        assert isinstance(draft.config, ViTConfig)
        mine, theirs = (_spelled(each, one.name) for each in (config, draft.config))
        if one.name not in (*_OF_TRAINING, "position_grid") and mine != theirs and not _is_baked(one.name, config):
            tell[one.name] = mine
    return tell, _differences(draft, content)


def _differences(draft: Draft, content: Content) -> list[str]:
    lost = [] if draft.labels == content.labels else ["labels"]
    lost += ["words that a picture may have several labels"] if content.multi_label and not draft.multi_label else []
    return lost + ([] if draft.preprocess == content.preprocess else ["settings of the preprocessing"])


def _spelled(config: ViTConfig, name: str) -> Any:
    special = {"class_token": config.has_class_token, "image_size": config.image_hw, "patch_size": config.patch_hw}
    return special.get(name, getattr(config, name))


def _is_baked(name: str, config: ViTConfig) -> bool:
    """Positions that were written as the table that they make."""
    return name == "position" and config.position in ("none", "learned-2d", "sincos-2d")


def as_checkpoint(
    what: Checkpoint | Network, preprocess: Preprocess | None, labels: Sequence[str] | None
) -> Checkpoint:
    if isinstance(what, Network):
        what = Checkpoint(model=what, preprocess=default_preprocess(what))
    if not isinstance(what, Checkpoint) or not isinstance(what.model, Network):
        raise ConfigError(f"This takes a Checkpoint or a model, not something of type {type(what).__name__}.")
    what = replace(what, preprocess=what.preprocess if preprocess is None else preprocess)
    if not isinstance(what.preprocess, Preprocess):
        raise ConfigError(f"preprocess={what.preprocess!r} must be a Preprocess.")
    config = what.model.config
    if what.preprocess.channels != config.channels:
        seen = f"{what.preprocess.channels} channels, and the model {config.channels}"
        raise ConfigError(f"The preprocessing has {seen}.", hint="preprocess.with_channels(...) mends it.")
    labels = what.labels if labels is None else labels
    if labels is None:
        return what
    if not isinstance(labels, list | tuple) or len(labels) != config.num_classes:
        seen = (
            f"{len(labels)} labels" if isinstance(labels, list | tuple) else f"labels of type {type(labels).__name__}"
        )
        raise ConfigError(f"There are {seen} for {config.num_classes} classes.", hint="Give a list with one for each.")
    return replace(what, labels=tuple(as_text(str(label)) for label in labels))


def check_model(model: Network) -> None:
    """Whether it is what its config says, with numbers in it."""
    state = model.state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        raise WeightsError("The model has no numbers yet: it was built on the meta device.")
    expected = shapes_of(build_without_memory(model.config))
    for name in expected.keys() | state.keys():
        if name not in state or name not in expected or tuple(state[name].shape) != expected[name]:
            seen = tuple(state[name].shape) if name in state else "missing"
            raise WeightsError(f"The model is not what its config says: {name} is {seen}, not {expected.get(name)}.")
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.numel() and not all(bound.isfinite() for bound in tensor.aminmax()):
            raise WeightsError(f"{name} holds numbers that are not finite; nothing was written.")


def check_target(path: Path, dialect: str) -> None:
    allowed = _ENDINGS.get(dialect, (".safetensors", ".pth", ".pt", ".bin", ""))
    ending = path.suffix if is_file(path) else ""
    if ending not in allowed:
        endings = " or ".join(ending or "nothing (a folder)" for ending in allowed)
        raise WeightsError(f"{path} must end in {endings} for the {dialect} dialect.")
    try:
        if ending and path.is_dir():
            raise WeightsError(f"{path} is a folder, and a file should be written there.")
        if not ending and path.is_file():
            raise WeightsError(f"{path} is a file, and a folder should be written there.")
    except (OSError, ValueError) as error:
        raise WeightsError(f"{str(path)[:200]} cannot be written: {error}.") from error
