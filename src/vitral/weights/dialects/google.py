"""Google's npz files: vit_jax (github.com/google-research/vision_transformer) and big_vision.

Both use the tanh-approximated GELU, LayerNorm epsilon 1e-6, bilinear resampling of positions between the corners, and
pixels from -1 to 1. They number the parts of a block differently. The position table of vit_jax has a row for the class
token; big_vision adds its N rows before it prepends the class token. Kernels are (inputs, outputs), and heads have an
axis of their own.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from vitral.errors import WeightsError
from vitral.model.config import ResNetStem, ViTConfig
from vitral.weights.dialects import shapes
from vitral.weights.dialects.plan import PLAIN, Content, LoadPlan, ModelSpec, Overrides, google_preprocess
from vitral.weights.dialects.rules import HEIGHT_WIDTH_IN_OUT, ROWS, VECTOR, Layout, Rule, patches, rule, token_rules
from vitral.weights.formats.npz import write_npz
from vitral.weights.formats.tensor_file import TensorFile

_TRANSPOSED = Layout(read=lambda x: x.transpose(0, 1), write=lambda x: x.transpose(0, 1))
_KERNEL = "embedding/kernel"
_PREFIXES = ("", "opt/target/", "params/", "params/img/", "img/")
_TABLES = {  # name: whether it has a row for the class token
    "Transformer/posembed_input/pos_embedding": True,
    "Transformer/pos_embedding": False,
    "pos_embedding": False,
}
_PREPROCESS = "preprocessing: mean and std 0.5, squash to the size, as in Google's code; the file does not state it"


@dataclass(frozen=True, kw_only=True)
class Style:
    """One of Google's namings."""

    old_numbers: bool
    """Number parts as MultiHeadDotProductAttention_1, LayerNorm_2, MlpBlock_3 (before Flax's linen), not as 0, 1, 0."""
    scanned: bool
    """Store all blocks in one array with a leading axis."""
    table: str | None
    class_row: bool
    """The table has a row for the class token."""
    map_prefix: str = "MAPHead_0/"
    dialect: str = "google"


def recognizes(file: TensorFile) -> bool:
    """Return whether the file has Google's patch embedding."""
    return any(prefix + _KERNEL in file.shapes for prefix in _PREFIXES)


def plan(file: TensorFile, overrides: Overrides) -> LoadPlan:
    """Return the plan for a vit_jax or big_vision file."""
    prefix = next(prefix for prefix in _PREFIXES if prefix + _KERNEL in file.shapes)
    file = file.below(prefix, _reason_outside) if prefix else file
    style = detect_style(file)
    assumed: dict[str, str] = {}
    config = infer_config(file, style, overrides, assumed)
    assumed["preprocess"] = _PREPROCESS
    spec = ModelSpec(config=config, preprocess=google_preprocess(config.image_hw), assumed=assumed)
    ignored = {name: "optimizer state" for name in file.shapes if name.startswith("opt/")}
    return LoadPlan(dialect=style.dialect, file=file, spec=spec, rules=list(rules(config, style)), ignored=ignored)


def _reason_outside(name: str) -> str:
    if "/txt/" in name:
        return "belongs to the text tower"
    return "optimizer state" if name.startswith("opt/") else "not part of the image network"


def detect_style(file: TensorFile) -> Style:
    """Return which of Google's namings the file uses."""
    tensors = file.shapes
    table = next((name for name in _TABLES if name in tensors), None)
    has_row = table is not None and _TABLES[table]
    scanned = any(name.startswith("Transformer/encoderblock/") for name in tensors)
    old = any("/MlpBlock_3/" in name for name in tensors)
    if old and table is None:
        raise WeightsError(f"{file.name} has no position table (expected Transformer/posembed_input/pos_embedding).")
    is_big_vision = scanned or "probe" in tensors or "MAPHead_0/probe" in tensors or not has_row
    return Style(
        old_numbers=old,
        scanned=scanned,
        table=table,
        class_row=has_row and "cls" in tensors,
        map_prefix="" if "probe" in tensors else "MAPHead_0/",
        dialect="big_vision" if is_big_vision else "google",
    )


def infer_config(file: TensorFile, style: Style, overrides: Overrides, assumed: dict[str, str]) -> ViTConfig:
    """Return the config that names and shapes determine."""
    tensors = file.shapes
    query = _block_shape(file, r"MultiHeadDotProductAttention_\d/query", 3 + style.scanned)
    hidden = _block_shape(file, r"MlpBlock_\d/Dense_0", 2 + style.scanned)
    patch_height, patch_width, channels, width = file.shape(_KERNEL, 4)
    stem, shrink = None, 1
    if "conv_root/kernel" in tensors:
        *_, channels, root = file.shape("conv_root/kernel", 4)
        stages = shapes.count_units(tensors, r"block(\d+)/unit(\d+)/")
        stem = ResNetStem(stages=stages, width_factor=shapes.width_factor(root))
        shrink = 2**stem.halvings
    if style.table is None:
        image = shapes.as_pair(overrides.get("image_size")) or (224, 224)
        assumed["position"] = "position=sincos-2d: the file has no position table, as with big_vision's fixed waves"
        assumed["image_size"] = f"image_size={image[0]}: the file does not state it"
        size = shapes.as_size(image)
    else:
        pixels = patch_height * shrink, patch_width * shrink
        grid, _ = shapes.infer_grid(file.shape(style.table, 3)[1], (int(style.class_row),), overrides, pixels)
        size = shapes.image_size(grid, pixels)
    has_head = "head/kernel" in tensors or "head/bias" in tensors
    return ViTConfig(
        width=width,
        depth=hidden[0] if style.scanned else shapes.count_layers(tensors, "Transformer/encoderblock_", "/"),
        heads=query[-2],
        mlp_width=hidden[-1],
        patch_size=shapes.as_size((patch_height, patch_width)),
        image_size=size,
        channels=channels,
        num_classes=file.shape("head/kernel", 2)[1] if has_head else 0,
        position="sincos-2d" if style.table is None else "learned",
        pool="map" if f"{style.map_prefix}probe" in tensors else "token" if "cls" in tensors else "mean",
        class_token="cls" in tensors,
        representation=file.shape("pre_logits/kernel", 2)[1] if "pre_logits/kernel" in tensors else None,
        stem=stem,
    )


def _block_shape(file: TensorFile, suffix: str, dimensions: int) -> tuple[int, ...]:
    """Return the shape of a kernel in the first block."""
    for name in file.shapes:
        if re.fullmatch(rf"Transformer/encoderblock(_0)?/{suffix}/kernel", name):
            return file.shape(name, dimensions)
    raise WeightsError(f"{file.name} has Google's patch embedding, but no Transformer/encoderblock_0/{suffix}.")


_GOOGLE = Style(old_numbers=True, scanned=False, table="Transformer/posembed_input/pos_embedding", class_row=True)
_BIG_VISION = Style(old_numbers=False, scanned=False, table="pos_embedding", class_row=False, dialect="big_vision")


def write(content: Content, path: Path) -> list[str]:
    """Write vit_jax's published numbering, which every reader of these files supports, or big_vision's."""
    is_big_vision = content.dialect == "big_vision"
    if is_big_vision and content.config.position == "sincos-2d" and content.config.position_at == "stem":
        style = replace(_BIG_VISION, table=None)
    else:
        content, style = content.with_learned_positions(), _BIG_VISION if is_big_vision else _GOOGLE
    config = content.config
    content.check_supported(
        activation=("gelu-tanh",),
        norm_eps=(1e-6,),
        attention=("full",),
        **PLAIN,
        representation_activation=("tanh",),
        pool=("token", "mean", "map") if is_big_vision else ("token", "mean"),
        class_token=(config.pool == "token",),
    )
    if config.stem is not None and not isinstance(config.stem, ResNetStem):
        raise content.unsupported("a ConvStem")
    write_npz(content.renamed(rules(config, style)), path, prefix="params/" if is_big_vision else "")
    return []


# ---- rules ----


def rules(config: ViTConfig, style: Style) -> Iterator[Rule]:
    """Yield the rules of all tensors."""
    kernel = HEIGHT_WIDTH_IN_OUT.then(patches(config.patch_channels, config.patch_hw))
    yield rule("patches.project.weight", _KERNEL, kernel)
    yield rule("patches.project.bias", "embedding/bias")
    names = {"class_token": "cls"} if config.has_class_token else {}
    names |= {"positions.0.table": style.table} if style.table else {}
    yield from token_rules(names, int(style.class_row))
    for block_rule in _block(config, style):
        yield from _for_all_blocks(block_rule, config, style)
    yield from _norm("norm", "Transformer/encoder_norm")
    if config.pool == "map":
        yield from _map_head(config, style.map_prefix)
    if config.representation:
        yield from _dense("representation.0", "pre_logits")
    if config.num_classes:
        yield from _dense("head", "head")
    if isinstance(config.stem, ResNetStem):
        yield from _resnet(config.stem)


def _block(config: ViTConfig, style: Style) -> Iterator[Rule]:
    """Yield the rules of one block, with names relative to it."""
    attention, second, mlp = ("1", "2", "3") if style.old_numbers else ("0", "1", "0")
    yield from _norm("norm1", "LayerNorm_0")
    yield from _norm("norm2", f"LayerNorm_{second}")
    together = {"to_qkv": ("query", "key", "value")}
    yield from _attention("attention", f"MultiHeadDotProductAttention_{attention}", together, config.heads)
    yield from _dense("mlp.expand", f"MlpBlock_{mlp}/Dense_0")
    yield from _dense("mlp.contract", f"MlpBlock_{mlp}/Dense_1")


def _for_all_blocks(block_rule: Rule, config: ViTConfig, style: Style) -> Iterator[Rule]:
    """Yield the rule of one block for every block."""

    def below(block: str) -> tuple[str, ...]:
        return tuple(f"Transformer/{block}/{name}" for name in block_rule.theirs)

    names = tuple(f"blocks.{index}.{block_rule.ours[0]}" for index in range(config.depth))
    if style.scanned:
        yield rule(names, below("encoderblock"), _scanned(block_rule))
        return
    for index, name in enumerate(names):
        yield rule(name, below(f"encoderblock_{index}"), block_rule.layout)


def _scanned(block_rule: Rule) -> Layout:
    """Return the layout of arrays that store all blocks along a first axis."""

    def write(*ours: Tensor) -> list[Tensor]:
        blocks = [block_rule.write((tensor,)) for tensor in ours]
        return [torch.stack(arrays) for arrays in zip(*blocks, strict=True)]

    return Layout(read=lambda *x: [block_rule.layout.read(*arrays) for arrays in zip(*x, strict=True)], write=write)


def _map_head(config: ViTConfig, prefix: str) -> Iterator[Rule]:
    yield rule("pool.probe", f"{prefix}probe", ROWS)
    apart = {"to_q": ("query",), "to_kv": ("key", "value")}
    yield from _attention("pool", f"{prefix}MultiHeadDotProductAttention_0", apart, config.heads)
    yield from _norm("pool.norm", f"{prefix}LayerNorm_0")
    yield from _dense("pool.mlp.expand", f"{prefix}MlpBlock_0/Dense_0")
    yield from _dense("pool.mlp.contract", f"{prefix}MlpBlock_0/Dense_1")


def _attention(ours: str, theirs: str, projections: dict[str, tuple[str, ...]], heads: int) -> Iterator[Rule]:
    for our, their in projections.items():
        for name, kind, layout in (("weight", "kernel", heads_last), ("bias", "bias", heads_bias)):
            arrays = tuple(f"{theirs}/{part}/{kind}" for part in their)
            yield rule(f"{ours}.{our}.{name}", arrays, layout(heads, len(their)))
    yield rule(f"{ours}.to_out.weight", f"{theirs}/out/kernel", heads_first(heads))
    yield rule(f"{ours}.to_out.bias", f"{theirs}/out/bias")


def _norm(ours: str, theirs: str) -> Iterator[Rule]:
    yield rule(f"{ours}.weight", f"{theirs}/scale", VECTOR)
    yield rule(f"{ours}.bias", f"{theirs}/bias", VECTOR)


def _dense(ours: str, theirs: str) -> Iterator[Rule]:
    yield rule(f"{ours}.weight", f"{theirs}/kernel", _TRANSPOSED)
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


# ---- layouts ----


def heads_last(heads: int, parts: int = 1) -> Layout:
    """Return the layout of projections (D, heads, head_dim), which we concatenate to one (parts * D, D)."""
    return Layout(
        read=lambda *x: torch.cat([kernel.flatten(1).mT for kernel in x]),
        write=lambda x: [chunk.mT.unflatten(1, (heads, -1)) for chunk in x.chunk(parts)],
    )


def heads_bias(heads: int, parts: int = 1) -> Layout:
    """Return the layout of their biases (heads, head_dim)."""
    return Layout(
        read=lambda *x: torch.cat([bias.flatten() for bias in x]),
        write=lambda x: [chunk.unflatten(0, (heads, -1)) for chunk in x.chunk(parts)],
    )


def heads_first(heads: int) -> Layout:
    """Return the layout of the output projection of attention, (heads, head_dim, D)."""
    return Layout(read=lambda x: x.flatten(0, 1).mT, write=lambda x: x.mT.unflatten(0, (heads, -1)))
