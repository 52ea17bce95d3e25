"""Save a model with its preprocessing and labels, in our own format or another dialect."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vitral.errors import ConfigError, WeightsError, check_choice, short_repr
from vitral.model.config import ViTConfig
from vitral.model.network import Config, Network
from vitral.model.vit import ViT
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import Checkpoint, default_preprocess
from vitral.weights.dialects import BARE_FILE_DEFAULTS, CONSTANTS, WRITERS, plan_load
from vitral.weights.dialects.plan import Content, ModelSpec
from vitral.weights.formats.opening import open_tensors
from vitral.weights.formats.tensor_file import is_file_name
from vitral.weights.state_dict import build_on_meta, is_finite, shapes_of

_SUFFIXES = {
    "native": (".safetensors",),
    **dict.fromkeys(("google", "big_vision", "bit"), (".npz",)),
    "torchvision": (".safetensors", ".pth", ".pt"),
}
# Fields that do not change what a loaded model computes: rates and initial values, and the grid of other sizes.
_SKIPPED_FIELDS = {"dropout", "attention_dropout", "drop_path", "head_bias", "layer_scale", "position_resample"}
_AS_TABLE = ("learned-2d", "sincos-2d")
"""Positions that other dialects store as the table that they amount to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """The file that ``save`` wrote, and what its reader should know."""

    path: Path
    load_options: dict[str, Any] = field(default_factory=dict)
    """Config fields that the file cannot store: pass them to ``vitral.load`` as keywords."""
    constants: dict[str, Any] = field(default_factory=dict)
    """Config fields that the library of the dialect sets to another value than this model has."""
    notes: tuple[str, ...] = ()


def save(
    model: Checkpoint | Network,
    path: str | Path,
    *,
    dialect: str = "native",
    preprocess: Preprocess | None = None,
    labels: Sequence[str] | None = None,
) -> SaveReport:
    """Save a Checkpoint or a bare model, and return what the file cannot store.

    ``dialect`` is native, google, big_vision, bit, timm, huggingface or torchvision. A path without a known suffix is a
    folder, for timm and huggingface. The write is atomic. A warning is issued if the library of the dialect computes
    with other constants than this model.
    """
    report = write_checkpoint(as_checkpoint(model, preprocess, labels), path, dialect=dialect)
    fixed = {name: value for name, value in report.constants.items() if name in CONSTANTS.get(dialect, {})}
    if fixed:
        warnings.warn(describe_constants(fixed, dialect), stacklevel=2)
    return report


def write_checkpoint(checkpoint: Checkpoint, path: str | Path, *, dialect: str) -> SaveReport:
    """Save a checkpoint without issuing warnings; the report contains them."""
    check_choice("dialect", dialect, WRITERS)
    model, report = checkpoint.model, checkpoint.report
    hooked = check_modules(model)
    state = plain_state(model)
    check_state(model, state)
    target = check_target(path, dialect)
    content = Content(
        dialect=dialect,
        network=model.config,
        state=state,
        preprocess=checkpoint.preprocess,
        labels=checkpoint.labels,
        multi_label=checkpoint.multi_label,
        position_table=position_table(model),
        provenance={} if report is None else {"source": Path(report.source).name},
        assumed=() if report is None else report.assumed,
    )
    notes = WRITERS[dialect].write(content, target)
    options, lost = find_losses(content, target)
    defaults = CONSTANTS.get(dialect, {}) | (BARE_FILE_DEFAULTS.get(dialect, {}) if is_file_name(target) else {})
    constants = {name: value for name, value in defaults.items() if getattr(model.config, name) != value}
    notes += [f"The file cannot store {name}={value!r}: pass it to vitral.load." for name, value in options.items()]
    notes += [f"The file does not contain the {item}: the {dialect} dialect cannot store it." for item in lost]
    notes += [f"The file does not contain the forward hooks of {hooked}."] if hooked else []
    notes += [describe_constants(constants, dialect)] if constants else []
    return SaveReport(path=target, load_options=options, constants=constants, notes=tuple(notes))


def describe_constants(constants: dict[str, Any], dialect: str) -> str:
    """Return the warning for a library that computes with other constants than the model."""
    values = ", ".join(f"{name}={value!r}" for name, value in constants.items())
    return f"{dialect} computes with {values} by default, unlike this model, so its outputs differ."


def as_checkpoint(
    model: Checkpoint | Network, preprocess: Preprocess | None = None, labels: Sequence[str] | None = None
) -> Checkpoint:
    """Return a Checkpoint of a model, with other preprocessing or labels if they are passed."""
    network = model.model if isinstance(model, Checkpoint) else model
    if isinstance(network, nn.Module) and "_orig_mod" in network._modules:
        network = network._orig_mod  # inside the wrapper of torch.compile
    if not isinstance(network, Network):
        raise ConfigError(f"Expected a ViT or a BiT, or a Checkpoint of one (got {type(network).__name__}).")
    if isinstance(model, Checkpoint):
        checkpoint = replace(model, model=network)
    else:
        checkpoint = Checkpoint(model=network, preprocess=default_preprocess(network))
    if preprocess is not None:
        checkpoint = replace(checkpoint, preprocess=preprocess)
    return checkpoint if labels is None else replace(checkpoint, labels=labels)  # type: ignore[arg-type]


def plain_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by name, without the wrappers of torch.compile and the insides of parametrizations."""
    return {
        _plain_name(name): module
        for name, module in model.named_modules()
        if "_orig_mod" not in module._modules and "parametrizations" not in name.split(".")
    }


def _plain_name(name: str) -> str:
    return ".".join(word for word in name.split(".") if word != "_orig_mod")


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict under plain names; a parametrized tensor has the value that the model computes with."""
    state = {
        _plain_name(name): tensor for name, tensor in model.state_dict().items() if ".parametrizations." not in name
    }
    for name, module in plain_modules(model).items():
        if parametrize.is_parametrized(module):
            for tensor in module.parametrizations:  # type: ignore[union-attr]
                state[f"{name}.{tensor}"] = getattr(module, tensor).detach()
    return state


def check_modules(model: Network) -> str | None:
    """Raise WeightsError if the file would load as other modules; return the name of a module with forward hooks."""
    actual, expected = plain_modules(model), plain_modules(build_on_meta(model.config))
    for name in actual | expected:
        ours = parametrize.type_before_parametrizations(actual[name]) if name in actual else None
        loaded = type(expected[name]) if name in expected else None
        if ours is not loaded or (ours is not None and "forward" in vars(actual[name])):
            raise WeightsError(
                f"Cannot save this model: {name or 'the model itself'} is {_kind(ours)}, but the file would load it as "
                f"{_kind(loaded)}.",
                hint="Replace the module, or save the weights alone with torch.save(model.state_dict(), path).",
            )
    hooked = (name for name, module in actual.items() if module._forward_hooks or module._forward_pre_hooks)
    return next(hooked, None)


def _kind(module: type | None) -> str:
    return "missing" if module is None else f"{module.__module__}.{module.__qualname__}"


def check_state(model: Network, state: dict[str, Tensor]) -> None:
    """Raise WeightsError unless the tensors match the config and are finite."""
    if any(tensor.is_meta for tensor in state.values()):
        raise WeightsError("The model is on the meta device, so it has no weights to save.")
    expected = shapes_of(build_on_meta(model.config))
    for name in expected.keys() | state.keys():
        shape = tuple(state[name].shape) if name in state else None
        if shape != expected.get(name):
            raise WeightsError(
                f"The model does not match its config: {name} has shape {shape}; expected {expected.get(name)}.",
                hint="Change the config, too, or save the weights alone with torch.save(model.state_dict(), path).",
            )
    for name, tensor in state.items():
        if not is_finite(tensor):
            raise WeightsError(f"{name} contains NaN or Inf. Nothing was written.")


def position_table(model: Network) -> Tensor | None:
    """Return the table that fixed or factorized positions amount to, for dialects with learned tables only."""
    if not isinstance(model, ViT) or model.config.position_at != "stem" or model.config.position not in _AS_TABLE:
        return None
    positions = model.positions[0]
    like = next(iter(model.state_dict().values())).new_empty(0)
    with torch.no_grad():
        return torch.cat([positions.class_rows(like), positions.patch_rows(like)])  # type: ignore[operator]


def check_target(path: str | Path, dialect: str) -> Path:
    """Return the path, or raise WeightsError if the dialect cannot be written to it."""
    if not isinstance(path, str | Path) or not str(path):
        raise WeightsError(f"The target must be a path (got {short_repr(path)}).")
    path = Path(path)
    allowed = _SUFFIXES.get(dialect, (".safetensors", ".pth", ".pt", ".bin", ""))
    suffix = path.suffix if is_file_name(path) else ""
    if suffix not in allowed:
        suffixes = " or ".join(suffix or "nothing (a folder)" for suffix in allowed)
        raise WeightsError(f"{path} must end in {suffixes} for the {dialect} dialect.")
    try:
        if suffix and path.is_dir():
            raise WeightsError(f"{path} is a folder; expected a file.")
        if not suffix and path.is_file():
            raise WeightsError(f"{path} is a file; expected a folder.")
    except (OSError, ValueError) as error:
        raise WeightsError(f"Cannot write {str(path)[:200]}: {error}.") from error
    return path


def find_losses(content: Content, path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return config fields that a reader of the file gets wrong, and other content that the file does not store."""
    config = content.network
    spec, options = _read_back(config, path)
    skipped = _SKIPPED_FIELDS | {"position_grid"}
    if isinstance(config, ViTConfig) and config.position in ("none", *_AS_TABLE):
        skipped.add("position")
    for name in (entry.name for entry in fields(config) if entry.name not in skipped):
        if (ours := _comparable(config, name)) != _comparable(spec.config, name):
            options[name] = ours
    lost = {
        "labels": spec.labels != content.labels,
        "multi-label flag (several labels per image)": content.multi_label and not spec.multi_label,
        "preprocessing": spec.preprocess != content.preprocess,
    }
    return options, [item for item, is_lost in lost.items() if is_lost]


def _read_back(config: Config, path: Path) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the model in a written file, and the options without which it cannot be read."""
    attempts: list[dict[str, Any]] = [{}]
    if isinstance(config, ViTConfig):
        attempts += [{"heads": config.heads}, {"heads": config.heads, "position_grid": config.table_grid}]
    failure: WeightsError | None = None
    for options in attempts:
        try:
            return plan_load(open_tensors(path), options).spec, options
        except WeightsError as error:
            failure = error
    raise WeightsError(f"vitral wrote {path}, but cannot read it: {failure}") from failure


def _comparable(config: Config, name: str) -> object:
    """Return a field in one spelling."""
    spellings = {"class_token": "has_class_token", "image_size": "image_hw", "patch_size": "patch_hw"}
    return getattr(config, spellings.get(name, name))
