"""Google's npz files: vit_jax (github.com/google-research/vision_transformer) and big_vision.

Both have the tanh-approximated GELU, LayerNorm epsilon 1e-6, positions resampled bilinearly between the corners, and
pixels from -1 to 1. They differ in the numbering of a block's parts, and in the table of positions: that of vit_jax
has a row for the class token; big_vision adds its N rows before the class token is there.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import torch
from torch import Tensor

from vitral.errors import WeightsError
from vitral.model.config import ResNetStem, ViTConfig
from vitral.weights.checkpoint import google_preprocess
from vitral.weights.content import Content
from vitral.weights.draft import Asked, Draft, check_holds
from vitral.weights.files import TensorFile, written_aside
from vitral.weights.infer import asked_grid, count_layers, find_grid, one_or_two, pair_of
from vitral.weights.rules import (
    HEIGHT_WIDTH_IN_OUT,
    ROWS,
    SAME,
    TRANSPOSED,
    VECTOR,
    Layout,
    Rule,
    heads_bias,
    heads_first,
    heads_last,
    patches,
    rule,
)

_PREFIXES = ("", "opt/target/", "params/", "params/img/", "img/")
_KERNEL = "embedding/kernel"
_TABLES = {  # name: whether it has a row for the class token
    "Transformer/posembed_input/pos_embedding": True,
    "Transformer/pos_embedding": False,
    "pos_embedding": False,
}


@dataclass(frozen=True, kw_only=True)
class Style:
    """How this file says it."""

    old_numbers: bool
    """MultiHeadDotProductAttention_1, LayerNorm_2, MlpBlock_3, as before Flax's linen; else 0, 1, 0."""
    scanned: bool
    """All blocks in one array with a leading axis."""
    table: str | None
    class_row: bool
    """Whether the table has a row for the class token."""
    map_prefix: str = "MAPHead_0/"
    dialect: str = "google"


def recognise(file: TensorFile) -> bool:
    return any(prefix + _KERNEL in file.shapes for prefix in _PREFIXES)


def read(file: TensorFile, asked: Asked) -> Draft:
    prefix = next(prefix for prefix in _PREFIXES if prefix + _KERNEL in file.shapes)
    if prefix:
        file = file.below(prefix, _why_outside)
    style = find_style(file)
    assumed: dict[str, str] = {}
    config = find_config(file, style, asked, assumed)
    preprocess = google_preprocess(config.image_hw)
    assumed["preprocess"] = (
        "preprocessing: mean and std 0.5, squashed to the size, as Google's code does; the file does not tell"
    )
    ignored = {name: "optimiser state" for name in file.shapes if name.startswith("opt/")}
    return Draft(
        dialect=style.dialect,
        file=file,
        config=config,
        rules=list(rules(config, style)),
        preprocess=preprocess,
        ignored=ignored,
        assumed=assumed,
    )


def _why_outside(name: str) -> str:
    if "/txt/" in name:
        return "of the text tower"
    return "optimiser state" if name.startswith("opt/") else "not of the image network"


def find_style(file: TensorFile) -> Style:
    shapes = file.shapes
    table = next((name for name in _TABLES if name in shapes), None)
    scanned = any(name.startswith("Transformer/encoderblock/") for name in shapes)
    old = any("/MlpBlock_3/" in name for name in shapes)
    class_row = table is not None and _TABLES[table] and "cls" in shapes
    if old and table is None:
        raise WeightsError(f"{file.path} lacks Transformer/posembed_input/pos_embedding, its table of positions.")
    is_big_vision = scanned or "probe" in shapes or "MAPHead_0/probe" in shapes or table is None or not _TABLES[table]
    return Style(
        old_numbers=old,
        scanned=scanned,
        table=table,
        class_row=class_row,
        map_prefix="" if "probe" in shapes else "MAPHead_0/",
        dialect="big_vision" if is_big_vision else "google",
    )


def find_config(file: TensorFile, style: Style, asked: Asked, assumed: dict[str, str]) -> ViTConfig:
    shapes = file.shapes
    query = _block_shape(file, r"MultiHeadDotProductAttention_\d/query", 3 + style.scanned)
    hidden = _block_shape(file, r"MlpBlock_\d/Dense_0", 2 + style.scanned)
    patch_height, patch_width, inputs, width = file.shape(_KERNEL, 4)
    stem = find_stem(file)
    step = 1 if stem is None else 2**stem.halvings
    has_class_token, has_head = "cls" in shapes, "head/kernel" in shapes or "head/bias" in shapes
    if style.table is None:
        image = pair_of(asked.get("image_size")) or (224, 224)
        assumed["position"] = "position=sincos-2d: the file has no table of positions, as big_vision's fixed waves"
        assumed["image_size"] = f"image_size={image[0]}: the file does not tell"
    else:
        rows = file.shape(style.table, 3)[1]
        told = pair_of(asked.get("position_grid"))
        pixels = patch_height * step, patch_width * step
        grid, _ = find_grid(rows, (int(style.class_row),), told, asked_grid(asked, pixels))
        image = grid[0] * pixels[0], grid[1] * pixels[1]
    return ViTConfig(
        width=width,
        depth=_depth(file, style),
        heads=query[-2],
        mlp_width=hidden[-1],
        patch_size=one_or_two((patch_height, patch_width)),
        image_size=one_or_two(image),
        channels=file.shape("conv_root/kernel", 4)[2] if stem else inputs,
        num_classes=file.shape("head/kernel", 2)[1] if has_head else 0,
        position="sincos-2d" if style.table is None else "learned",
        pool="map" if f"{style.map_prefix}probe" in shapes else "token" if has_class_token else "mean",
        class_token=has_class_token,
        representation=file.shape("pre_logits/kernel", 2)[1] if "pre_logits/kernel" in shapes else None,
        stem=stem,
    )


def _block_shape(file: TensorFile, suffix: str, sides: int) -> tuple[int, ...]:
    """The shape of a kernel in the first block."""
    pattern = re.compile(rf"Transformer/encoderblock(_0)?/{suffix}/kernel")
    for name in file.shapes:
        if pattern.fullmatch(name):
            return file.shape(name, sides)
    raise WeightsError(f"{file.path} has Google's patch embedding, but no Transformer/encoderblock_0/{suffix}.")


def _depth(file: TensorFile, style: Style) -> int:
    if style.scanned:
        return next(
            shape[0] if shape else 0
            for name, shape in file.shapes.items()
            if name.startswith("Transformer/encoderblock/")
        )
    return count_layers(file.shapes, r"Transformer/encoderblock_(\d+)/")


def find_stem(file: TensorFile) -> ResNetStem | None:
    if "conv_root/kernel" not in file.shapes:
        return None
    units: dict[int, set[str]] = {}
    for name in file.shapes:
        if match := re.match(r"block(\d+)/unit(\d+)/", name):
            units.setdefault(int(match[1]), set()).add(match[2])
    stages = tuple(len(units[stage]) for stage in sorted(units))
    return ResNetStem(stages=stages, width_factor=max(1, file.shape("conv_root/kernel", 4)[3] // 64))


# ---- rules ----


def rules(config: ViTConfig, style: Style) -> Iterator[Rule]:
    yield rule("patches.project.weight", _KERNEL, _patch_kernel(config))
    yield rule("patches.project.bias", "embedding/bias")
    yield from token_rules(config, style)
    for ours, theirs, layout in _block(config, style):
        yield from _for_all_blocks(ours, theirs, layout, config, style)
    yield from _norm("norm", "Transformer/encoder_norm")
    if config.pool == "map":
        yield from _map_head(config, style.map_prefix)
    if config.representation:
        yield from _dense("representation.0", "pre_logits")
    if config.num_classes:
        yield from _dense("head", "head")
    if config.stem is not None:
        assert isinstance(config.stem, ResNetStem)
        yield from _resnet(config.stem)


def _patch_kernel(config: ViTConfig) -> Layout:
    return HEIGHT_WIDTH_IN_OUT.then(patches(config.patch_channels, config.patch_hw))


def token_rules(config: ViTConfig, style: Style) -> Iterator[Rule]:
    if config.has_class_token and style.table and not style.class_row:
        layout = Layout(  # a zero row for the class token; on the way back its row goes into the token, exactly
            read=lambda token, table: (token[0], torch.cat([torch.zeros_like(token[0]), table[0]])),
            write=lambda token, table: ((token + table[:1])[None], table[1:][None]),
        )
        yield rule(("class_token", "positions.0.table"), ("cls", style.table), layout)
        return
    if config.has_class_token:
        yield rule("class_token", "cls", ROWS)
    if style.table:
        yield rule("positions.0.table", style.table, ROWS)


Part = tuple[str, tuple[str, ...], Layout]


def _block(config: ViTConfig, style: Style) -> Iterator[Part]:
    attention, second, mlp = ("1", "2", "3") if style.old_numbers else ("0", "1", "0")
    attention, mlp = f"MultiHeadDotProductAttention_{attention}", f"MlpBlock_{mlp}"
    for ours, theirs in (("norm1", "LayerNorm_0"), ("norm2", f"LayerNorm_{second}")):
        yield f"{ours}.weight", (f"{theirs}/scale",), SAME
        yield f"{ours}.bias", (f"{theirs}/bias",), SAME
    yield from _attention("attention.to_qkv", attention, ("query", "key", "value"), config.heads)
    yield "attention.to_out.weight", (f"{attention}/out/kernel",), heads_first(config.heads)
    yield "attention.to_out.bias", (f"{attention}/out/bias",), SAME
    for ours, theirs in (("mlp.expand", "Dense_0"), ("mlp.contract", "Dense_1")):
        yield f"{ours}.weight", (f"{mlp}/{theirs}/kernel",), TRANSPOSED
        yield f"{ours}.bias", (f"{mlp}/{theirs}/bias",), SAME


def _attention(ours: str, theirs: str, parts: tuple[str, ...], heads: int) -> Iterator[Part]:
    kernels, biases = (tuple(f"{theirs}/{part}/{kind}" for part in parts) for kind in ("kernel", "bias"))
    yield f"{ours}.weight", kernels, heads_last(heads, len(parts))
    yield f"{ours}.bias", biases, heads_bias(heads, len(parts))


def _for_all_blocks(
    ours: str, theirs: tuple[str, ...], layout: Layout, config: ViTConfig, style: Style
) -> Iterator[Rule]:
    names = tuple(f"blocks.{index}.{ours}" for index in range(config.depth))
    if style.scanned:
        yield rule(names, tuple(f"Transformer/encoderblock/{name}" for name in theirs), scanned(layout))
        return
    for index, name in enumerate(names):
        yield rule(name, tuple(f"Transformer/encoderblock_{index}/{their}" for their in theirs), layout)


def scanned(layout: Layout) -> Layout:
    """A layout for each block, where their arrays hold all blocks along a first axis."""

    def write(*ours: Tensor) -> list[Tensor]:
        blocks = [layout.write(tensor) for tensor in ours]
        blocks = [(block,) if isinstance(block, Tensor) else block for block in blocks]
        return [torch.stack(arrays) for arrays in zip(*blocks, strict=True)]

    return Layout(read=lambda *x: [layout.read(*parts) for parts in zip(*x, strict=True)], write=write)


def _map_head(config: ViTConfig, prefix: str) -> Iterator[Rule]:
    attention = f"{prefix}MultiHeadDotProductAttention_0"
    yield rule("pool.probe", f"{prefix}probe", ROWS)
    for ours, parts in (("pool.to_q", ("query",)), ("pool.to_kv", ("key", "value"))):
        for name, theirs, layout in _attention(ours, attention, parts, config.heads):
            yield rule(name, theirs, layout)
    yield rule("pool.to_out.weight", f"{attention}/out/kernel", heads_first(config.heads))
    yield rule("pool.to_out.bias", f"{attention}/out/bias")
    yield from _norm("pool.norm", f"{prefix}LayerNorm_0")
    yield from _dense("pool.mlp.expand", f"{prefix}MlpBlock_0/Dense_0")
    yield from _dense("pool.mlp.contract", f"{prefix}MlpBlock_0/Dense_1")


def _norm(ours: str, theirs: str) -> Iterator[Rule]:
    yield rule(f"{ours}.weight", f"{theirs}/scale", VECTOR)
    yield rule(f"{ours}.bias", f"{theirs}/bias", VECTOR)


def _dense(ours: str, theirs: str) -> Iterator[Rule]:
    yield rule(f"{ours}.weight", f"{theirs}/kernel", TRANSPOSED)
    yield rule(f"{ours}.bias", f"{theirs}/bias")


def _resnet(stem: ResNetStem) -> Iterator[Rule]:
    yield rule("patches.stem.root.weight", "conv_root/kernel", HEIGHT_WIDTH_IN_OUT)
    yield from _norm("patches.stem.root_norm", "gn_root")
    for stage, units in enumerate(stem.stages):
        for unit in range(units):
            ours, theirs = f"patches.stem.stages.{stage}.{unit}", f"block{stage + 1}/unit{unit + 1}"
            for i in (1, 2, 3):
                yield rule(f"{ours}.conv{i}.weight", f"{theirs}/conv{i}/kernel", HEIGHT_WIDTH_IN_OUT)
                yield from _norm(f"{ours}.norm{i}", f"{theirs}/gn{i}")
            if unit == 0:
                yield rule(f"{ours}.shortcut.weight", f"{theirs}/conv_proj/kernel", HEIGHT_WIDTH_IN_OUT)
                yield from _norm(f"{ours}.shortcut_norm", f"{theirs}/gn_proj")


# ---- writing ----

_GOOGLE = Style(old_numbers=True, scanned=False, table="Transformer/posembed_input/pos_embedding", class_row=True)
_BIG_VISION = Style(old_numbers=False, scanned=False, table="pos_embedding", class_row=False, dialect="big_vision")


def write(content: Content, path: Path) -> list[str]:
    """Google's own numbering is the published, old one, which every reader of these files knows."""
    is_big_vision = content.dialect == "big_vision"
    if is_big_vision and content.config.position == "sincos-2d" and content.config.position_at == "stem":
        style = replace(_BIG_VISION, table=None)
    else:
        content, style = content.with_learned_positions(), _BIG_VISION if is_big_vision else _GOOGLE
    config = content.config
    check_holds(
        config,
        content.dialect,
        activation=("gelu-tanh",),
        norm_eps=(1e-6,),
        attention=("full",),
        registers=(0,),
        layer_scale=(None,),
        norm_after_pool=(False,),
        representation_activation=("tanh",),
        pool=("token", "mean", "map") if is_big_vision else ("token", "mean"),
        class_token=(config.pool == "token",),
    )
    if config.stem is not None and not isinstance(config.stem, ResNetStem):
        raise WeightsError(f"The {content.dialect} layout cannot hold a convolutional stem.")
    prefix = "params/" if is_big_vision else ""
    arrays = content.renamed(list(rules(config, style)))
    with written_aside(path) as aside, ZipFile(aside, "w") as archive:
        for name, tensor in arrays.items():
            with archive.open(f"{prefix}{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, _as_array(tensor), allow_pickle=False)
    return []


def _as_array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:  # which NumPy does not have: two bytes without a meaning
        return tensor.view(torch.int16).numpy().view("V2")
    return tensor.numpy()
