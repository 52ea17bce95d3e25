"""timm's layout, and those of DeiT, MAE and DINOv2, which share its names.

Their code uses the exact GELU, LayerNorm epsilon 1e-6, and bicubic resampling of positions. A norm called ``fc_norm``
follows the pooling. A position table may have rows for the class token and registers, for the class token only, or for
neither; rows of tokens without a position in our network are added to the tokens, which is equivalent.
timm_config.py reads and writes config.json.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.files import write_json
from vitral.model.config import ViTConfig
from vitral.weights.dialects.content import Content
from vitral.weights.dialects.metadata import read_hints, write_state
from vitral.weights.dialects.plan import LoadPlan, ModelSpec, Overrides, Pair, as_size
from vitral.weights.dialects.rules import ROWS, Layout, Rule, pair, pairs, patches, rule, zeros
from vitral.weights.dialects.shapes import add_heads, image_of, infer_grid, infer_sizes, is_square, requested_grid
from vitral.weights.dialects.timm_config import ConfigJson, config_json, infer_preprocess, model_args, read_config_json
from vitral.weights.formats.tensor_file import TensorFile, is_file_name

_REGISTERS = ("reg_token", "register_tokens")
_MLP = {"mlp.expand": "mlp.fc1", "mlp.contract": "mlp.fc2"}
_BLOCK = {"norm1": "norm1", "attention.to_out": "attn.proj", "norm2": "norm2"} | _MLP
_MAP = {"to_q": "q", "to_kv": "kv", "to_out": "proj", "norm": "norm"} | _MLP


def recognizes(file: TensorFile) -> bool:
    """Return whether the file has timm's names."""
    return "patch_embed.proj.weight" in file.shapes and "blocks.0.attn.qkv.weight" in file.shapes


def plan(file: TensorFile, overrides: Overrides) -> LoadPlan:
    """Return the plan for a checkpoint of timm's family."""
    stated = read_config_json(file)
    family = detect_family(file)
    if spec := read_hints(file):
        token_rows = written_token_rows(spec.vit)
    else:
        spec, token_rows = infer_spec(file, family, overrides, stated)
    names = list(rules(spec.vit, token_rows=token_rows, file=file))
    return LoadPlan(dialect=family, file=file, spec=spec, rules=names, ignored=pretraining_tensors(file))


def detect_family(file: TensorFile) -> str:
    """Return timm, mae or dinov2, by tensors that only one of them has."""
    shapes = file.shapes
    if any(name.startswith("decoder_") for name in shapes):
        return "mae"
    rows = file.shape("pos_embed", 3)[1] if "pos_embed" in shapes else 0
    is_bare_14 = file.shape("patch_embed.proj.weight", 4)[-1] == 14 and "head.weight" not in shapes
    is_like_dino = "mask_token" in shapes or (is_bare_14 and is_square(rows - 1))
    if "register_tokens" in shapes or ("blocks.0.ls1.gamma" in shapes and is_like_dino):
        return "dinov2"
    return "mae" if "mask_token" in shapes else "timm"


def pretraining_tensors(file: TensorFile) -> dict[str, str]:
    """Return the tensors that only pre-training needs, with the reason."""
    reasons = {r"mask_token": "only for masked pre-training", r"decoder_": "decoder, only for pre-training"}
    return {name: reason for name in file.shapes for pattern, reason in reasons.items() if re.match(pattern, name)}


def infer_spec(file: TensorFile, family: str, overrides: Overrides, stated: ConfigJson) -> tuple[ModelSpec, int]:
    """Return the model of a file without hints, and the number of table rows that belong to tokens."""
    assumed: dict[str, str] = {}
    grid, token_rows = infer_table(file, overrides, stated, assumed)
    config = infer_config(file, family, grid, overrides, stated, assumed)
    preprocess = infer_preprocess(config, family, stated, assumed)
    return ModelSpec(config=config, preprocess=preprocess, labels=stated.labels, assumed=assumed), token_rows


def infer_table(
    file: TensorFile, overrides: Overrides, stated: ConfigJson, assumed: dict[str, str]
) -> tuple[Pair | None, int]:
    """Return the grid of the position table and its rows for tokens; (None, 0) without a table."""
    shapes = file.shapes
    if "pos_embed" not in shapes:
        assumed["position"] = "position=none: the file has no pos_embed"
        return None, 0
    rows, class_token, patch = file.shape("pos_embed", 3)[1], int("cls_token" in shapes), _patch_size(file)
    registers = _count_registers(file)
    if "register_tokens" in shapes:
        possible = (class_token,)
    elif registers and is_square(rows):
        possible = (0, class_token, class_token + registers)  # as in timm's published files with registers
    else:
        possible = (class_token + registers, class_token, 0)
    grid = stated.size and (stated.size[0] // patch[0], stated.size[1] // patch[1])
    if grid and not any(rows - extra == grid[0] * grid[1] for extra in possible):
        grid = None  # the size at which the model is used, not that of its training
    grid, token_rows = infer_grid(rows, possible, overrides, patch, grid)
    if class_token and not token_rows and not registers:
        assumed["position_grid"] = f"position_grid={grid}: all {rows} rows are patches, none is the class token"
    return grid, token_rows


def _count_registers(file: TensorFile) -> int:
    return next((file.shape(name, 3)[1] for name in _REGISTERS if name in file.shapes), 0)


def _patch_size(file: TensorFile) -> Pair:
    *_, height, width = file.shape("patch_embed.proj.weight", 4)
    return height, width


def infer_config(
    file: TensorFile, family: str, grid: Pair | None, overrides: Overrides, stated: ConfigJson, assumed: dict[str, str]
) -> ViTConfig:
    """Return the config that names, shapes and config.json determine."""
    shapes, patch = file.shapes, _patch_size(file)
    if grid is None:
        grid = requested_grid(overrides, patch) or (max(1, 224 // patch[0]), max(1, 224 // patch[1]))
        side = image_of(grid, patch)[0]
        assumed["image_size"] = f"image_size={side}: the file has no positions and does not state it"
    if stated.activation is None:
        assumed["activation"] = "activation=gelu, norm_eps=1e-6: timm's defaults; the file does not state them"
    has_head = "head.weight" in shapes or "head.bias" in shapes
    is_plain_dino = family == "dinov2" and "register_tokens" not in shapes
    fields: dict[str, Any] = dict(
        **infer_sizes(file, "patch_embed.proj", "blocks.", "mlp.fc1"),
        image_size=as_size(image_of(grid, patch)),
        num_classes=file.shape("head.weight", 2)[0] if has_head else 0,
        position="none",
        class_token="cls_token" in shapes,
        norm_after_pool="fc_norm.weight" in shapes,
        registers=_count_registers(file),
        layer_scale=1e-5 if "blocks.0.ls1.gamma" in shapes else None,
        activation=stated.activation or "gelu",
        pool=infer_pool(file, stated),
    )
    if "pos_embed" in shapes:
        fields["position"] = "learned"
        fields["position_resample"] = "bicubic" if is_plain_dino else "bicubic-antialias"
    add_heads(fields, stated.heads, overrides, assumed)
    return ViTConfig(**fields)


def infer_pool(file: TensorFile, stated: ConfigJson) -> str:
    """Return the pooling that tensors and config.json determine."""
    if "attn_pool.latent" in file.shapes:
        return "map"
    averages = stated.global_pool is None and "fc_norm.weight" in file.shapes
    return "mean" if averages or "cls_token" not in file.shapes else stated.pool


def rules(config: ViTConfig, *, token_rows: int, file: TensorFile | None = None) -> Iterator[Rule]:
    """Yield the rules of all tensors; ``file`` decides between alternative names within the family."""
    names = () if file is None else file.shapes
    yield from pair("patches.project", "patch_embed.proj", patches(config.channels, config.patch_hw))
    yield from token_rules(config, token_rows, "register_tokens" if "register_tokens" in names else "reg_token")
    has_bias = file is None or any(name.endswith("attn.qkv.bias") for name in names)
    for index in range(config.depth):
        block = f"blocks.{index}"
        yield from pairs(block, block, _BLOCK)
        yield rule(f"{block}.attention.to_qkv.weight", f"{block}.attn.qkv.weight")
        if has_bias:
            yield rule(f"{block}.attention.to_qkv.bias", f"{block}.attn.qkv.bias")
        else:
            yield rule(f"{block}.attention.to_qkv.bias", (), zeros(3 * config.width))
        if config.layer_scale is not None:
            yield rule(f"{block}.after_attention.scale", f"{block}.ls1.gamma")
            yield rule(f"{block}.after_mlp.scale", f"{block}.ls2.gamma")
    yield from pair("norm", "fc_norm" if config.norm_after_pool else "norm")
    if config.pool == "map":
        yield rule("pool.probe", "attn_pool.latent", ROWS)
        yield from pairs("pool", "attn_pool", _MAP)
    if config.num_classes:
        yield from pair("head", "head")


def token_rules(config: ViTConfig, token_rows: int, registers: str) -> Iterator[Rule]:
    """Yield the rules of class token, registers and table: one joint rule if the tables have rows for other tokens."""
    has_table = config.position == "learned"
    names = {"class_token": "cls_token"} if config.has_class_token else {}
    names |= {"registers": registers} if config.registers else {}
    names |= {"positions.0.table": "pos_embed"} if has_table else {}
    if not has_table or token_rows == int(config.has_class_token):
        for ours, theirs in names.items():
            yield rule(ours, theirs, ROWS)
    else:
        yield rule(tuple(names), tuple(names.values()), _joint_layout(config, token_rows))


def _joint_layout(config: ViTConfig, token_rows: int) -> Layout:
    """Return the layout that moves rows of the table into the tokens that they belong to."""
    class_rows = int(config.has_class_token)

    def read(*theirs: Tensor) -> list[Tensor]:
        *tokens, table = (ROWS.read(tensor) for tensor in theirs)
        rows, patch_rows = table[:token_rows], table[token_rows:]
        if token_rows > class_rows:  # add the registers' rows to the registers
            tokens[-1] = tokens[-1] + rows[class_rows:]
        class_row = rows[:class_rows] if token_rows else table.new_zeros(class_rows, table.shape[1])
        return [*tokens, torch.cat([class_row, patch_rows])]

    def write(*ours: Tensor) -> list[Tensor]:
        if token_rows == 0 and class_rows:  # add the class token's row to the token
            token, *registers, table = ours
            ours = token + table[:1], *registers, table[1:]
        return [tensor[None] for tensor in ours]

    return Layout(read=read, write=write)


def written_token_rows(config: ViTConfig) -> int:
    """Return the table rows for tokens in the files that we write: with registers, timm has none."""
    return 0 if config.registers else int(config.has_class_token)


def write(content: Content, path: Path) -> list[str]:
    """Write a state dict, or a folder that timm opens as ``local-dir:``."""
    if content.config.position != "none":
        content = content.with_learned_positions()
    config = content.config
    content.check_supported(attention=("full",), representation=(None,), stem=(None,))
    tensors = content.renamed(rules(config, token_rows=written_token_rows(config)))
    if not is_file_name(path):
        write_state(content, tensors, path / "model.safetensors")
        write_json(path / "config.json", config_json(content))
        return []
    write_state(content, tensors, path)
    inferred = ("embed_dim", "depth", "mlp_ratio")
    arguments = {name: value for name, value in model_args(config).items() if name not in inferred}
    return [f"Build timm's VisionTransformer for this file with these arguments: {arguments}"]
