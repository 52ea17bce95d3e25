"""The way in: any checkpoint becomes a Checkpoint of ours.

    source -> hub: a path -> files: names and shapes -> dialect: a Draft -> the asked changes -> numbers, one by one

The model is built without memory and takes each tensor as it comes, so there is never a second copy of it.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitral.errors import ConfigError, WeightsError, first_line
from vitral.files import as_text
from vitral.model.bit_config import BiTConfig
from vitral.model.config import check_field_names
from vitral.model.network import Config, Network, build
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import Checkpoint, LoadReport
from vitral.weights.dialects import draft_of
from vitral.weights.dialects.config_json import MOST_PATCHES
from vitral.weights.dialects.draft import Asked, Draft
from vitral.weights.dialects.rules import Rule
from vitral.weights.formats.detect import open_tensors
from vitral.weights.hub import locate
from vitral.weights.resizing import adapt

Shapes = dict[str, tuple[int, ...]]
_WEIGHTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load(
    source: str | Path, *, preprocess: Preprocess | Mapping[str, Any] | None = None, **config_overrides: Any
) -> Checkpoint:
    """A checkpoint of any dialect, from a file, a folder, ``hf:owner/name`` or a name of ``SHIPPED``.

    A keyword is a field of ViTConfig: ``num_classes`` gives a fresh zero head, ``image_size`` resamples the positions,
    ``patch_size`` the patch kernel, ``heads`` is believed. ``preprocess`` is a Preprocess, or a dict of fields to
    change. The model comes back in evaluation mode."""
    check_field_names(config_overrides)
    draft = draft_of(open_tensors(locate(source)), config_overrides)
    config = settle_config(draft, config_overrides)
    model = build_without_memory(config)
    filling = _Filling(model, draft, config_overrides)
    check_both_sides(draft, filling.held)
    prepared = settle_preprocess(draft, config, preprocess)
    report = filling.run(str(source))
    keeps_labels = draft.labels and len(draft.labels) == config.num_classes and "num_classes" not in config_overrides
    topics = {*config_overrides, *(("preprocess",) if preprocess is not None else ())}
    report = replace(
        report,
        assumed=tuple(sentence for topic, sentence in draft.assumed.items() if topic not in topics),
        warnings=(*report.warnings, *changed_normalisation(draft.preprocess, prepared)),
    )
    labels = tuple(map(as_text, draft.labels)) if draft.labels and keeps_labels else None
    multi_label = draft.multi_label and "num_classes" not in config_overrides
    return Checkpoint(model=model.eval(), preprocess=prepared, labels=labels, multi_label=multi_label, report=report)


def peek(source: str | Path) -> Config:
    """The network that a checkpoint holds, without its numbers."""
    return draft_of(open_tensors(locate(source)), {}).config


def settle_config(draft: Draft, asked: Asked) -> Config:
    """The network that is wanted: the file's, with the asked fields changed."""
    if isinstance(draft.config, BiTConfig):
        check_field_names(asked, of=BiTConfig)
        return replace(draft.config, **asked)
    fields = dict(asked)
    moved = ("image_size" in asked or "patch_size" in asked) and "position_grid" not in asked
    if moved and draft.config.position in ("learned", "learned-2d"):
        fields["position_grid"] = None  # the table moves to the new grid
    elif moved and draft.config.position == "relative":
        fields["position_grid"] = draft.config.table_grid  # the network scales its offsets itself
    config = replace(draft.config, **fields)
    if config.table_grid[0] * config.table_grid[1] > MOST_PATCHES:
        raise ConfigError(
            f"image_size={config.image_size} makes a grid of {config.table_grid} patches, which is too many."
        )
    return config


def settle_preprocess(draft: Draft, config: Config, changes: Preprocess | Mapping[str, Any] | None) -> Preprocess:
    preprocess = draft.preprocess.with_channels(config.channels)
    if config.image_hw != draft.config.image_hw:
        preprocess = replace(preprocess, size=config.image_hw)
    return preprocess if changes is None else preprocess.changed(changes)


def changed_normalisation(told: Preprocess, now: Preprocess) -> tuple[str, ...]:
    if now.channels != told.channels or (now.mean, now.std) == (told.mean, told.std):
        return ()
    return (f"The normalisation was changed from mean {told.mean}, std {told.std} to mean {now.mean}, std {now.std}.",)


def build_without_memory(config: Config) -> Network:
    try:
        with torch.device("meta"):
            return build(config)
    except RuntimeError as error:
        raise WeightsError(f"A network of width {config.width} and these sizes cannot be built: {error}.") from error


def shapes_of(model: nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


class _Filling:
    """One pass over the rules of a draft, filling a model that has no memory yet."""

    def __init__(self, model: Network, draft: Draft, asked: Asked):
        self.model, self.draft, self.asked = model, draft, asked
        self.wanted = shapes_of(model)
        same = draft.config == model.config
        self.held = self.wanted if same else shapes_of(build_without_memory(draft.config))
        if "num_classes" in asked:
            self.wanted = {name: shape for name, shape in self.wanted.items() if not name.startswith("head.")}
        self.state: dict[str, Tensor] = {}
        self.taken: list[str] = []
        self.renamed: dict[str, str] = {}
        self.resized: dict[str, str] = {}
        own = {draft.file.prefix + name: reason for name, reason in draft.ignored.items()}
        self.ignored = {**draft.file.ignored, **own}
        self.fresh: dict[str, str] = {}
        self.widened: set[torch.dtype] = set()

    def run(self, source: str) -> LoadReport:
        for rule in self.draft.rules:
            self.apply(rule)
        self.refresh()
        self.model.load_state_dict(self.state, strict=False, assign=True)
        return LoadReport(
            source=source,
            dialect=self.draft.dialect,
            format=self.draft.file.format,
            taken=tuple(self.taken),
            renamed=self.renamed,
            resized=self.resized,
            fresh=self.fresh,
            ignored=self.ignored,
            warnings=tuple(self.warnings()),
        )

    def apply(self, rule: Rule) -> None:
        theirs = [self.draft.file.prefix + name for name in rule.theirs]
        if not any(name in self.wanted for name in rule.ours):
            self.ignored |= {name: self.why_left_out(rule.ours[0]) for name in theirs}
            return
        tensors = self.read(rule)
        notes = [self.take(name, tensor, rule) for name, tensor in zip(rule.ours, tensors, strict=True)]
        ours = ", ".join(rule.ours)
        if not theirs:
            self.fresh |= dict.fromkeys(rule.ours, "zero: the file has none, which is the same")
        elif any(notes):
            self.resized |= {name: f"{ours}: {'; '.join(filter(None, notes))}" for name in theirs}
        elif tuple(theirs) == rule.ours:
            self.taken += theirs
        else:
            self.renamed |= dict.fromkeys(theirs, ours)

    def read(self, rule: Rule) -> tuple[Tensor, ...]:
        file = self.draft.file
        try:
            tensors = rule.read(tuple(self.number(name, file.read(name)) for name in rule.theirs))
            if len(tensors) == len(rule.ours):
                return tensors
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            reason = first_line(error)
        else:
            reason = f"they make {len(tensors)} tensors instead of {len(rule.ours)}"
        seen = ", ".join(f"{file.prefix}{name} {tuple(file.shapes[name])}" for name in rule.theirs)
        raise WeightsError(f"{file.path}: {rule.ours[0]} cannot be made of {seen}: {reason}.")

    def number(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of weights; counters of BatchNorm are whole numbers."""
        if tensor.dtype in _WEIGHTS or (tensor.dtype == torch.int64 and name.endswith("num_batches_tracked")):
            return tensor
        if tensor.is_floating_point():  # eight bits, which hardly anything can be done with
            self.widened.add(tensor.dtype)
            return tensor.float()
        kind = str(tensor.dtype).removeprefix("torch.")
        raise WeightsError(
            f"{self.draft.file.path}: {self.draft.file.prefix}{name} holds {kind}, which are no weights."
        )

    def take(self, name: str, tensor: Tensor, rule: Rule) -> str | None:
        """Puts one tensor into the state; what was done to it, if anything."""
        their = " and ".join(self.draft.file.prefix + part for part in rule.theirs)
        if tuple(tensor.shape) != self.held[name]:
            raise WeightsError(
                f"{self.draft.file.path}: {their} gives {name} the shape {tuple(tensor.shape)}, and a network of this "
                f"size has {self.held[name]}."
            )
        if name not in self.wanted:
            return None
        if tensor.is_floating_point() and tensor.numel():
            if not all(bound.isfinite() for bound in tensor.aminmax()):
                raise WeightsError(f"{self.draft.file.path}: {their} holds numbers that are not finite.")
            if tensor.dtype != torch.float32 and not self.draft.keeps_dtype:
                self.widened.add(tensor.dtype)
                tensor = tensor.float()
        tensor, note = adapt(name, tensor, self.draft.config, self.model.config, self.wanted[name])
        self.state[name] = tensor.contiguous()
        return note

    def refresh(self) -> None:
        """Gives memory and initial values to what the file does not have and the asked changes brought."""
        for name in self.model.state_dict():
            if name not in self.state:
                self.fresh[name] = "as num_classes asks" if name.startswith("head.") else self.why_new()
        modules = {name.rpartition(".")[0] for name in self.fresh if name not in self.state}
        kinds = {tensor.dtype for tensor in self.state.values() if tensor.is_floating_point()}
        dtype = kinds.pop() if len(kinds) == 1 else torch.float32
        for module in map(self.model.get_submodule, sorted(modules)):
            try:
                module.to_empty(device="cpu", recurse=False)
            except RuntimeError as error:
                raise WeightsError(f"There is no memory for what {self.changes()} asks for.") from error
            module.reset_parameters()  # type: ignore[operator]
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)

    def why_left_out(self, ours: str) -> str:
        if ours.startswith("head.") and "num_classes" in self.asked:
            return "num_classes asks for a fresh head"
        return f"not in the network with {self.changes()}"

    def why_new(self) -> str:
        return f"new with {self.changes()}"

    def changes(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.asked.items())

    def warnings(self) -> list[str]:
        found = [*self.draft.file.notes]
        head = self.state.get("head.weight")
        if head is not None and not head.any():
            found.append(
                "The head is all zeros, as in Google's ImageNet-21k files, so every class comes out equal. It is there "
                "to be fine-tuned: num_classes=... gives a fresh one."
            )
        found += [
            f"The file's numbers were {str(dtype).removeprefix('torch.')}; they are float32 now."
            for dtype in self.widened
        ]
        return found


def check_both_sides(draft: Draft, held: Shapes) -> None:
    """Stops the load where the file and the network that it should be do not cover each other."""
    there, used = set(draft.file.shapes), {name for rule in draft.rules for name in rule.theirs}
    prefix = draft.file.prefix
    missing = sorted(used - there)
    filled = {name: rule for rule in draft.rules for name in rule.ours}
    strange = {name for ours, rule in filled.items() if ours not in held for name in rule.theirs}
    unknown = sorted((there - used - set(draft.ignored)) | strange)
    unfilled = sorted(set(held) - set(filled))
    if not missing and not unknown and not unfilled:
        return
    sides = []
    if missing:
        sides.append(f"missing from the file: {_few(missing, prefix)}")
    if unknown:
        sides.append(f"in the file but not in such a network: {_few(unknown, prefix)}")
    if unfilled:
        sides.append(f"in the network but in no tensor of the file: {_few(unfilled)}")
    raise WeightsError(
        f"{draft.file.path} looks like a {draft.dialect} checkpoint, but does not fit: {'; '.join(sides)}."
    )


def _few(names: list[str], prefix: str = "") -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(prefix + name for name in names[:6]) + more
