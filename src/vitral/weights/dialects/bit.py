"""BiT's npz files (github.com/google-research/big_transfer), and the names that timm has for the same network.

The files say nothing about the size of the pictures; the network takes any.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vitral.errors import WeightsError
from vitral.model.bit_config import BiTConfig
from vitral.weights.checkpoint import google_preprocess
from vitral.weights.dialects.content import Content
from vitral.weights.dialects.draft import Asked, Draft
from vitral.weights.dialects.rules import HEIGHT_WIDTH_IN_OUT, VECTOR, Layout, Rule, pair, rule
from vitral.weights.dialects.shapes import one_or_two
from vitral.weights.dialects.timm_json import read_config_json, told_preprocess
from vitral.weights.formats.npz import write_npz
from vitral.weights.formats.tensor_file import TensorFile

_ROOT = re.compile(r"(?P<prefix>.*?)root_block/standardized_conv2d(_\d+)?/kernel")
_TIMM_ROOT = "stem.conv.weight"
SIZE = "image_size=224: the file does not tell, and the network takes any"
PREPROCESS = "preprocessing: mean and std 0.5, squashed to the size, as BiT's own code has it"
_CELL = Layout(read=lambda x: x.flatten(1), write=lambda x: x[:, :, None, None])
"""A matrix, as a convolution of one pixel."""


def recognise(file: TensorFile) -> bool:
    return any(map(_ROOT.fullmatch, file.shapes)) or (
        _TIMM_ROOT in file.shapes and "stages.0.blocks.0.conv3.weight" in file.shapes and "norm.weight" in file.shapes
    )


def read(file: TensorFile, asked: Asked) -> Draft:
    if _TIMM_ROOT in file.shapes:
        return read_timm(file)
    prefix = next(match["prefix"] for name in file.shapes if (match := _ROOT.fullmatch(name)))
    config, found = find_google(file, prefix)
    rules = list(google_rules(config, found, prefix))
    preprocess = google_preprocess(config.image_hw)
    assumed = {"image_size": SIZE, "preprocess": PREPROCESS}
    return Draft(dialect="bit", file=file, config=config, rules=rules, preprocess=preprocess, assumed=assumed)


def write(content: Content, path: Path) -> list[str]:
    config = content.network
    if not isinstance(config, BiTConfig):
        raise WeightsError("The bit layout holds BiTs, and this is a ViT.", hint="Use google for a ViT's npz.")
    write_npz(content.renamed(google_rules(config, {}, "resnet/")), path)
    return []


# ---- Google's ----


def find_google(file: TensorFile, prefix: str) -> tuple[BiTConfig, dict[str, str]]:
    """The network, and the names in the file by those without a number behind the layer."""
    names = {re.sub(r"(standardized_conv2d|group_norm|conv2d)_\d+/", r"\1/", name): name for name in file.shapes}
    units: dict[int, set[str]] = {}
    for name in names:
        if match := re.match(rf"{re.escape(prefix)}block(\d+)/unit(\d+)/", name):
            units.setdefault(int(match[1]), set()).add(match[2])
    root = file.shape(names[f"{prefix}root_block/standardized_conv2d/kernel"], 4)
    head = names.get(f"{prefix}head/conv2d/kernel")
    return _config(file, [len(units[stage]) for stage in sorted(units)], root[2], root[3], head, last=3), names


def google_rules(config: BiTConfig, names: dict[str, str], prefix: str) -> Iterator[Rule]:
    def their(name: str) -> str:
        return names.get(prefix + name, prefix + name)

    def convolution(ours: str, theirs: str) -> Rule:
        return rule(f"{ours}.weight", their(f"{theirs}/standardized_conv2d/kernel"), HEIGHT_WIDTH_IN_OUT)

    def norm(ours: str, theirs: str) -> Iterator[Rule]:
        yield rule(f"{ours}.weight", their(f"{theirs}group_norm/gamma"), VECTOR)
        yield rule(f"{ours}.bias", their(f"{theirs}group_norm/beta"), VECTOR)

    yield convolution("root", "root_block")
    for index, (stage, unit) in enumerate(_places(config)):
        place = f"block{stage + 1}/unit{unit + 1:02d}"
        for number, part in enumerate("abc", 1):
            yield from norm(f"blocks.{index}.norm{number}", f"{place}/{part}/")
            yield convolution(f"blocks.{index}.conv{number}", f"{place}/{part}")
        if unit == 0:
            yield convolution(f"blocks.{index}.shortcut", f"{place}/a/proj")
    yield from norm("norm", "")
    if config.num_classes:
        yield rule("head.weight", their("head/conv2d/kernel"), HEIGHT_WIDTH_IN_OUT.then(_CELL))
        yield rule("head.bias", their("head/conv2d/bias"), VECTOR)


# ---- timm's ----


def read_timm(file: TensorFile) -> Draft:
    """A config.json beside it tells the size, the preprocessing and the labels."""
    told, config, assumed = read_config_json(file), find_timm(file), {"image_size": SIZE, "preprocess": PREPROCESS}
    preprocess = google_preprocess(config.image_hw)
    if told.size is not None:
        config = replace(config, image_size=one_or_two(told.size))
        preprocess = replace(preprocess, size=told.size)
        del assumed["image_size"]
    if (described := told_preprocess(config, told)) is not None:
        preprocess = described
        del assumed["preprocess"]
    rules = list(timm_rules(config))
    return Draft(
        dialect="timm",
        file=file,
        config=config,
        rules=rules,
        preprocess=preprocess,
        labels=told.labels,
        assumed=assumed,
    )


def find_timm(file: TensorFile) -> BiTConfig:
    units: dict[int, set[str]] = {}
    for name in file.shapes:
        if match := re.match(r"stages\.(\d+)\.blocks\.(\d+)\.", name):
            units.setdefault(int(match[1]), set()).add(match[2])
    root = file.shape(_TIMM_ROOT, 4)
    head = "head.fc.weight" if "head.fc.weight" in file.shapes else None
    return _config(file, [len(units[stage]) for stage in sorted(units)], root[1], root[0], head, last=0)


def timm_rules(config: BiTConfig) -> Iterator[Rule]:
    yield rule("root.weight", _TIMM_ROOT)
    for index, (stage, unit) in enumerate(_places(config)):
        theirs = f"stages.{stage}.blocks.{unit}"
        for number in (1, 2, 3):
            yield from pair(f"blocks.{index}.norm{number}", f"{theirs}.norm{number}")
            yield rule(f"blocks.{index}.conv{number}.weight", f"{theirs}.conv{number}.weight")
        if unit == 0:
            yield rule(f"blocks.{index}.shortcut.weight", f"{theirs}.downsample.conv.weight")
    yield from pair("norm", "norm")
    if config.num_classes:
        yield from pair("head", "head.fc", _CELL)


def _config(
    file: TensorFile, stages: list[int], channels: int, width: int, head: str | None, *, last: int
) -> BiTConfig:
    if len(stages) != 4 or width % 64:
        raise WeightsError(f"{file.path} has {len(stages)} stages and a root of {width} channels, and no BiT has.")
    return BiTConfig(
        stages=tuple(stages),  # type: ignore[arg-type]
        width_factor=width // 64,
        channels=channels,
        num_classes=file.shape(head, 4)[last] if head else 0,
    )


def _places(config: BiTConfig) -> Iterator[tuple[int, int]]:
    for stage, units in enumerate(config.stages):
        for unit in range(units):
            yield stage, unit
