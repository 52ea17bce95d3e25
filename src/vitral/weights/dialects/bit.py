"""BiT's npz files (github.com/google-research/big_transfer), and timm's names for the same network.

The files do not state an image size; the network takes any.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vitral.errors import WeightsError
from vitral.model.bit_config import BiTConfig
from vitral.weights.dialects import shapes
from vitral.weights.dialects.plan import Content, LoadPlan, ModelSpec, Overrides, google_preprocess
from vitral.weights.dialects.rules import HEIGHT_WIDTH_IN_OUT, VECTOR, Layout, Rule, pair, rule
from vitral.weights.dialects.timm import read_config_json, stated_preprocess
from vitral.weights.formats.npz import write_npz
from vitral.weights.formats.tensor_file import TensorFile

_ROOT = re.compile(r"(?P<prefix>.*?)root_block/standardized_conv2d(_\d+)?/kernel")
_TIMM_ROOT = "stem.conv.weight"
_ASSUMED = {
    "image_size": "image_size=224: the file does not state it, and the network takes any",
    "preprocess": "preprocessing: mean and std 0.5, squash to the size, as in BiT's code",
}
_CELL = Layout(read=lambda x: x.flatten(1), write=lambda x: x[:, :, None, None])
"""A matrix, stored as a 1x1 convolution."""


def recognizes(file: TensorFile) -> bool:
    """Return whether the file has BiT's root convolution, under Google's name or timm's."""
    return any(map(_ROOT.fullmatch, file.shapes)) or (
        _TIMM_ROOT in file.shapes and "stages.0.blocks.0.conv3.weight" in file.shapes and "norm.weight" in file.shapes
    )


def plan(file: TensorFile, overrides: Overrides) -> LoadPlan:
    """Return the plan for a BiT."""
    if _TIMM_ROOT in file.shapes:
        return _plan_timm(file)
    prefix = next(match["prefix"] for name in file.shapes if (match := _ROOT.fullmatch(name)))
    names = {re.sub(r"(standardized_conv2d|group_norm|conv2d)_\d+/", r"\1/", name): name for name in file.shapes}
    stages = shapes.count_units(names, rf"{re.escape(prefix)}block(\d+)/unit(\d+)/")
    *_, channels, width = file.shape(names[f"{prefix}root_block/standardized_conv2d/kernel"], 4)
    head = names.get(f"{prefix}head/conv2d/kernel")
    config = build_config(file, stages, channels, width, classes=file.shape(head, 4)[3] if head else 0)
    spec = ModelSpec(config=config, preprocess=google_preprocess(config.image_hw), assumed=_ASSUMED)
    return LoadPlan(dialect="bit", file=file, spec=spec, rules=list(google_rules(config, names, prefix)))


def _plan_timm(file: TensorFile) -> LoadPlan:
    """Return the plan for timm's names; its config.json states size, preprocessing and labels."""
    stages = shapes.count_units(file.shapes, r"stages\.(\d+)\.blocks\.(\d+)\.")
    width, channels, *_ = file.shape(_TIMM_ROOT, 4)
    classes = file.shape("head.fc.weight", 4)[0] if "head.fc.weight" in file.shapes else 0
    config = build_config(file, stages, channels, width, classes)
    stated, assumed = read_config_json(file), dict(_ASSUMED)
    if stated.size is not None:
        config = replace(config, image_size=shapes.as_size(stated.size))
        del assumed["image_size"]
    preprocess = google_preprocess(config.image_hw)
    if (described := stated_preprocess(config, stated)) is not None:
        preprocess = described
        del assumed["preprocess"]
    spec = ModelSpec(config=config, preprocess=preprocess, labels=stated.labels, assumed=assumed)
    return LoadPlan(dialect="timm", file=file, spec=spec, rules=list(timm_rules(config)))


def build_config(file: TensorFile, stages: tuple[int, ...], channels: int, width: int, classes: int) -> BiTConfig:
    """Return the config, or raise WeightsError for a ResNet that is not a BiT."""
    if len(stages) != 4 or width % 32:
        raise WeightsError(
            f"{file.name} is not a BiT: it has {len(stages)} stages and {width} root channels (expected 4 stages and a "
            "multiple of 32 channels)."
        )
    return BiTConfig(stages=stages, width_factor=shapes.width_factor(width), channels=channels, num_classes=classes)  # type: ignore[arg-type]


def write(content: Content, path: Path) -> list[str]:
    """Write Google's npz layout."""
    config = content.network
    if not isinstance(config, BiTConfig):
        raise WeightsError("The bit dialect stores BiTs, and this model is a ViT.", hint="Use dialect='google'.")
    write_npz(content.renamed(google_rules(config, {}, "resnet/")), path)
    return []


def google_rules(config: BiTConfig, names: dict[str, str], prefix: str) -> Iterator[Rule]:
    """Yield the rules of Google's names; ``names`` maps them to those with numbers in a particular file."""

    def their(name: str) -> str:
        return names.get(prefix + name, prefix + name)

    def convolution(ours: str, theirs: str) -> Rule:
        return rule(f"{ours}.weight", their(f"{theirs}/standardized_conv2d/kernel"), HEIGHT_WIDTH_IN_OUT)

    def norm(ours: str, theirs: str) -> Iterator[Rule]:
        yield rule(f"{ours}.weight", their(f"{theirs}group_norm/gamma"), VECTOR)
        yield rule(f"{ours}.bias", their(f"{theirs}group_norm/beta"), VECTOR)

    yield convolution("root", "root_block")
    for index, (stage, unit) in enumerate(_units(config)):
        theirs = f"block{stage + 1}/unit{unit + 1:02d}"
        for number, letter in enumerate("abc", 1):
            yield from norm(f"blocks.{index}.norm{number}", f"{theirs}/{letter}/")
            yield convolution(f"blocks.{index}.conv{number}", f"{theirs}/{letter}")
        if unit == 0:
            yield convolution(f"blocks.{index}.shortcut", f"{theirs}/a/proj")
    yield from norm("norm", "")
    if config.num_classes:
        yield rule("head.weight", their("head/conv2d/kernel"), HEIGHT_WIDTH_IN_OUT.then(_CELL))
        yield rule("head.bias", their("head/conv2d/bias"), VECTOR)


def timm_rules(config: BiTConfig) -> Iterator[Rule]:
    """Yield the rules of timm's names."""
    yield rule("root.weight", _TIMM_ROOT)
    for index, (stage, unit) in enumerate(_units(config)):
        theirs = f"stages.{stage}.blocks.{unit}"
        for number in (1, 2, 3):
            yield from pair(f"blocks.{index}.norm{number}", f"{theirs}.norm{number}")
            yield rule(f"blocks.{index}.conv{number}.weight", f"{theirs}.conv{number}.weight")
        if unit == 0:
            yield rule(f"blocks.{index}.shortcut.weight", f"{theirs}.downsample.conv.weight")
    yield from pair("norm", "norm")
    if config.num_classes:
        yield from pair("head", "head.fc", _CELL)


def _units(config: BiTConfig) -> Iterator[tuple[int, int]]:
    """Yield (stage, unit) of every residual unit."""
    for stage, units in enumerate(config.stages):
        for unit in range(units):
            yield stage, unit
