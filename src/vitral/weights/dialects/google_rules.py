"""Map our tensor names to those of Google's npz files.

Their kernels are (inputs, outputs), and heads have an axis of their own. Blocks use one of two numberings, or all
blocks share one array (Style).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vitral.model.config import ResNetStem, ViTConfig
from vitral.weights.dialects.rules import (
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

KERNEL = "embedding/kernel"


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


def rules(config: ViTConfig, style: Style) -> Iterator[Rule]:
    """Yield the rules of all tensors."""
    kernel = HEIGHT_WIDTH_IN_OUT.then(patches(config.patch_channels, config.patch_hw))
    yield rule("patches.project.weight", KERNEL, kernel)
    yield rule("patches.project.bias", "embedding/bias")
    yield from token_rules(config, style)
    for block_rule in _block(config, style):
        yield from _for_all_blocks(block_rule, config, style)
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


def token_rules(config: ViTConfig, style: Style) -> Iterator[Rule]:
    """Yield the rules of class token and position table."""
    if config.has_class_token and style.table and not style.class_row:
        layout = Layout(  # read a zero row for the class token; write its row into the token, which is exact
            read=lambda token, table: (token[0], torch.cat([torch.zeros_like(token[0]), table[0]])),
            write=lambda token, table: ((token + table[:1])[None], table[1:][None]),
        )
        yield rule(("class_token", "positions.0.table"), ("cls", style.table), layout)
        return
    if config.has_class_token:
        yield rule("class_token", "cls", ROWS)
    if style.table:
        yield rule("positions.0.table", style.table, ROWS)


def _block(config: ViTConfig, style: Style) -> Iterator[Rule]:
    """Yield the rules of one block, with names relative to it."""
    attention, second, mlp = ("1", "2", "3") if style.old_numbers else ("0", "1", "0")
    yield from _norm("norm1", "LayerNorm_0", SAME)
    yield from _norm("norm2", f"LayerNorm_{second}", SAME)
    together = {"to_qkv": ("query", "key", "value")}
    yield from _attention("attention", f"MultiHeadDotProductAttention_{attention}", together, config.heads)
    yield from _mlp("mlp", f"MlpBlock_{mlp}")


def _for_all_blocks(block_rule: Rule, config: ViTConfig, style: Style) -> Iterator[Rule]:
    """Yield the rule of one block for every block."""
    names = tuple(f"blocks.{index}.{block_rule.ours[0]}" for index in range(config.depth))
    if style.scanned:
        theirs = tuple(f"Transformer/encoderblock/{name}" for name in block_rule.theirs)
        yield rule(names, theirs, scanned(block_rule.layout))
        return
    for index, name in enumerate(names):
        theirs = tuple(f"Transformer/encoderblock_{index}/{their}" for their in block_rule.theirs)
        yield rule(name, theirs, block_rule.layout)


def scanned(layout: Layout) -> Layout:
    """Return the layout of arrays that store all blocks along a first axis."""

    def write(*ours: Tensor) -> list[Tensor]:
        blocks = [layout.write(tensor) for tensor in ours]
        blocks = [(block,) if isinstance(block, Tensor) else block for block in blocks]
        return [torch.stack(arrays) for arrays in zip(*blocks, strict=True)]

    return Layout(read=lambda *x: [layout.read(*arrays) for arrays in zip(*x, strict=True)], write=write)


def _map_head(config: ViTConfig, prefix: str) -> Iterator[Rule]:
    yield rule("pool.probe", f"{prefix}probe", ROWS)
    apart = {"to_q": ("query",), "to_kv": ("key", "value")}
    yield from _attention("pool", f"{prefix}MultiHeadDotProductAttention_0", apart, config.heads)
    yield from _norm("pool.norm", f"{prefix}LayerNorm_0")
    yield from _mlp("pool.mlp", f"{prefix}MlpBlock_0")


def _attention(ours: str, theirs: str, projections: dict[str, tuple[str, ...]], heads: int) -> Iterator[Rule]:
    for ours_name, theirs_names in projections.items():
        kernels, biases = (tuple(f"{theirs}/{name}/{kind}" for name in theirs_names) for kind in ("kernel", "bias"))
        yield rule(f"{ours}.{ours_name}.weight", kernels, heads_last(heads, len(theirs_names)))
        yield rule(f"{ours}.{ours_name}.bias", biases, heads_bias(heads, len(theirs_names)))
    yield rule(f"{ours}.to_out.weight", f"{theirs}/out/kernel", heads_first(heads))
    yield rule(f"{ours}.to_out.bias", f"{theirs}/out/bias")


def _mlp(ours: str, theirs: str) -> Iterator[Rule]:
    yield from _dense(f"{ours}.expand", f"{theirs}/Dense_0")
    yield from _dense(f"{ours}.contract", f"{theirs}/Dense_1")


def _norm(ours: str, theirs: str, layout: Layout = VECTOR) -> Iterator[Rule]:
    yield rule(f"{ours}.weight", f"{theirs}/scale", layout)
    yield rule(f"{ours}.bias", f"{theirs}/bias", layout)


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
