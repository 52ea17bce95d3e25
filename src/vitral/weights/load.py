"""Load any checkpoint.

    source -> hub: path -> formats: names and shapes -> dialect: LoadPlan -> overrides -> tensors, one by one

The model is built on the meta device and receives each tensor as it is read, so there is never a second copy.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from vitral.errors import ConfigError, VitralError, WeightsError, check_field_names, short_repr
from vitral.files import as_text
from vitral.model.bit_config import BiTConfig
from vitral.model.config import MAX_SIDE, ViTConfig
from vitral.model.network import Config
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.dialects import plan_load
from vitral.weights.dialects.native import verify_file
from vitral.weights.dialects.plan import LoadPlan, ModelSpec, Overrides
from vitral.weights.dialects.shapes import PUBLISHED_HEADS
from vitral.weights.formats.opening import open_state_dict, open_tensors
from vitral.weights.formats.tensor_file import TensorFile
from vitral.weights.hub import locate
from vitral.weights.state_dict import StateDictBuilder, build_on_meta

MAX_PIXELS = 2**26
"""Largest image size that a checkpoint or a caller may set: 8192 x 8192."""
MAX_PATCHES = 2**20


def load(
    source: str | Path | Mapping[str, Tensor],
    *,
    config: Config | None = None,
    preprocess: Preprocess | Mapping[str, Any] | None = None,
    verify: bool | Literal["once"] = False,
    **config_overrides: Any,
) -> Checkpoint:
    """Load a checkpoint of any dialect, and return it with its model in evaluation mode.

    ``source`` is a file, a folder, ``hf:owner/name``, a shipped or pretrained name (``vit-cifar10``, ``dinov2-s14``),
    or a state dict in memory.
    ``config`` describes the network where names and shapes do not; a state dict of vitral's own names needs it.
    ``preprocess`` is a Preprocess, or a dict of its fields to change.
    ``verify=True`` checks the SHA-256 in files of our own format; ``"once"`` skips files that passed before.

    A keyword is a field of ViTConfig to change. ``num_classes`` initializes a new zero head, ``image_size`` resamples
    the positions, ``patch_size`` resamples the patch kernel, and ``heads`` is used as passed.
    """
    check_field_names(config_overrides, of=ViTConfig)
    if config is not None and not isinstance(config, ViTConfig | BiTConfig):
        raise ConfigError(f"config must be a ViTConfig or BiTConfig (got {type(config).__name__}).")
    if verify not in (True, False, "once"):
        raise ConfigError(f"verify must be True, False or 'once' (got {short_repr(verify)}).")
    file = open_source(source)
    if verify:
        verify_file(file, once=verify == "once")
    plan = plan_load(file, config_overrides, config)
    name = "state dict" if file.path is None else str(source)
    return load_plan(plan, name, preprocess, config_overrides)


def load_in_parts(
    source: str | Path, keep: Callable[[Tensor], Tensor], **config_overrides: Any
) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Load what ``keep`` returns of each tensor, one by one, with the checkpoint of a model on the meta device."""
    check_field_names(config_overrides, of=ViTConfig)
    plan = plan_load(open_source(source), config_overrides, None)
    parts: dict[str, Tensor] = {}
    return load_plan(plan, str(source), None, config_overrides, keep=keep, parts=parts), parts


def peek(source: str | Path) -> ModelSpec:
    """Return the config, preprocessing and labels of a checkpoint, without reading its tensors."""
    return plan_load(open_source(source), {}).spec


def verify_checksum(source: str | Path) -> None:
    """Raise WeightsError if a file of ours does not match its checksum; files of other dialects have none."""
    verify_file(open_source(source))


def open_source(source: str | Path | Mapping[str, Tensor]) -> TensorFile:
    """Return names and shapes of a checkpoint, or raise WeightsError."""
    return open_state_dict(source) if isinstance(source, Mapping) else open_tensors(locate(source))


def load_plan(
    plan: LoadPlan,
    source: str,
    preprocess: Preprocess | Mapping[str, Any] | None,
    overrides: Overrides,
    *,
    keep: Callable[[Tensor], Tensor] | None = None,
    parts: dict[str, Tensor] | None = None,
) -> Checkpoint:
    """Return the checkpoint that a plan describes, with the caller's changes.

    With ``keep``, the model stays on the meta device, and ``parts`` receives what is kept of its tensors.
    """
    spec = plan.spec
    check_size(spec.config, spec.preprocess, WeightsError, prefix=f"{plan.file.name}: ")
    config = resolve_config(spec.config, overrides)
    check_size(config, spec.preprocess, ConfigError)
    builder = StateDictBuilder(build_on_meta(config), plan, overrides, keep)
    builder.check_coverage()
    resolved = resolve_preprocess(spec, config, preprocess)
    check_size(config, resolved, ConfigError)
    report = builder.build(source)
    if parts is not None:
        parts |= builder.state
    changed = {*overrides} if preprocess is None else {*overrides, "preprocess"}
    report = replace(
        report,
        assumed=tuple(sentence for field, sentence in spec.assumed.items() if field not in changed),
        warnings=(
            *plan.warnings,
            *report.warnings,
            *changed_normalization(spec.preprocess, resolved),
            *guessed_heads(spec, changed),
        ),
    )
    keeps_head = "num_classes" not in overrides
    labels = spec.labels if keeps_head and len(spec.labels or ()) == config.num_classes else None
    return Checkpoint(
        model=builder.model.eval(),
        preprocess=resolved,
        labels=tuple(map(as_text, labels)) if labels else None,
        multi_label=spec.multi_label and keeps_head,
        report=report,
    )


def check_size(config: Config, preprocess: Preprocess, error: type[VitralError], prefix: str = "") -> None:
    """Raise an error for sizes that no memory holds, before anything is built."""
    sizes = (config.image_hw, preprocess.size)
    for height, width in sizes:
        if max(height, width) > MAX_SIDE or height * width > MAX_PIXELS:
            limit = f"at most {MAX_SIDE:,} pixels per side and {MAX_PIXELS:,} in all"
            raise error(f"{prefix}The image size {height} x {width} is too large (expected {limit}).")
    if not isinstance(config, ViTConfig):
        return
    maps = (config.feature_map(*size) for size in sizes)
    grids = ((height // config.patch_hw[0], width // config.patch_hw[1]) for height, width in maps)
    for rows, columns in (config.table_grid, *grids):
        if rows * columns > MAX_PATCHES:
            limit = f"at most {MAX_PATCHES:,}"
            raise error(f"{prefix}The grid of {rows} x {columns} patches is too large (expected {limit}).")


def resolve_config(config: Config, overrides: Overrides) -> Config:
    """Return the config of the file with the caller's changes."""
    if isinstance(config, BiTConfig):
        check_field_names(overrides, of=BiTConfig)
        return replace(config, **overrides)
    fields = dict(overrides)
    moves_grid = ("image_size" in fields or "patch_size" in fields) and "position_grid" not in fields
    if moves_grid and config.position in ("learned", "learned-2d"):
        fields["position_grid"] = None  # resample the table to the new grid
    elif moves_grid and config.position == "relative":
        fields["position_grid"] = config.table_grid  # the network scales its offsets itself
    if fields.get("position") in ("none", "relative"):
        fields.setdefault("position_resample", "bilinear-corners")  # the file's value would have no effect
    return replace(config, **fields)


def resolve_preprocess(spec: ModelSpec, config: Config, changes: Preprocess | Mapping[str, Any] | None) -> Preprocess:
    """Return the preprocessing of the file for the resolved config, with the caller's changes."""
    preprocess = spec.preprocess.with_channels(config.channels)
    if config.image_hw != spec.config.image_hw:
        preprocess = replace(preprocess, size=config.image_hw)
    return preprocess if changes is None else preprocess.with_changes(changes)


def guessed_heads(spec: ModelSpec, changed: Collection[str]) -> list[str]:
    """Return a warning if the number of heads is a guess that no published model supports."""
    if "heads" in changed or "heads" not in spec.assumed or not isinstance(spec.config, ViTConfig):
        return []
    if (spec.config.width, spec.config.depth, spec.config.mlp_width) in PUBLISHED_HEADS:
        return []
    return [f"The file does not state its number of heads; {spec.config.heads} is a guess. Pass heads if it is wrong."]


def changed_normalization(before: Preprocess, after: Preprocess) -> list[str]:
    """Return a warning if mean or std differ from the file's."""
    if after.channels != before.channels or (after.mean, after.std) == (before.mean, before.std):
        return []
    old, new = (f"mean {preprocess.mean}, std {preprocess.std}" for preprocess in (before, after))
    return [f"The normalization was changed from {old} to {new}."]
