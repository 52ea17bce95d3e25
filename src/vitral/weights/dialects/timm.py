"""timm's layout, and its relatives DeiT, MAE and DINOv2, which share its names.

Their code has the exact GELU, LayerNorm epsilon 1e-6, and resamples positions bicubically. A norm called ``fc_norm``
comes after pooling. A table of positions may have rows for the class token and registers, for the class token only, or
for none of them; rows of tokens that we give no position are added to the tokens themselves, which is the same. What
they call each tensor is in timm_rules.py; what stands in a config.json, in timm_json.py.
"""

import json
import re
from pathlib import Path
from typing import Any

from vitral.files import atomic_path
from vitral.model.config import ViTConfig
from vitral.weights.dialects.content import Content
from vitral.weights.dialects.draft import Asked, Draft, Told
from vitral.weights.dialects.metadata import read_hints, write_state
from vitral.weights.dialects.shapes import (
    Pair,
    asked_grid,
    find_grid,
    find_sizes,
    image_of,
    is_square,
    one_or_two,
    settle_heads,
)
from vitral.weights.dialects.timm_json import ConfigJson, arguments, describe, find_preprocess, read_config_json
from vitral.weights.dialects.timm_rules import rules, written_ahead
from vitral.weights.formats.tensor_file import TensorFile, is_file

_REGISTERS = ("reg_token", "register_tokens")


def recognise(file: TensorFile) -> bool:
    return "patch_embed.proj.weight" in file.shapes and "blocks.0.attn.qkv.weight" in file.shapes


def read(file: TensorFile, asked: Asked) -> Draft:
    described = read_config_json(file)
    relative = find_relative(file)
    if told := read_hints(file):
        ahead = written_ahead(told.vit)
    else:
        told, ahead = find_told(file, relative, asked, described)
    names = list(rules(told.vit, ahead=ahead, file=file))
    return Draft(dialect=relative, file=file, rules=names, ignored=find_ignored(file), **vars(told))


def find_relative(file: TensorFile) -> str:
    """Which member of the family: by what only they have."""
    shapes = file.shapes
    if any(name.startswith("decoder_") for name in shapes):
        return "mae"
    rows = file.shape("pos_embed", 3)[1] if "pos_embed" in shapes else 0
    is_bare_14 = file.shape("patch_embed.proj.weight", 4)[-1] == 14 and "head.weight" not in shapes
    is_like_dino = "mask_token" in shapes or (is_bare_14 and is_square(rows - 1))
    if "register_tokens" in shapes or ("blocks.0.ls1.gamma" in shapes and is_like_dino):
        return "dinov2"
    return "mae" if "mask_token" in shapes else "timm"


def find_ignored(file: TensorFile) -> dict[str, str]:
    reasons = {r"mask_token": "only for masked pre-training", r"decoder_": "of the decoder, only for pre-training"}
    return {name: reason for name in file.shapes for pattern, reason in reasons.items() if re.match(pattern, name)}


def find_told(file: TensorFile, relative: str, asked: Asked, described: ConfigJson) -> tuple[Told, int]:
    """Without hints; and how many rows of the table come ahead of the patches."""
    assumed: dict[str, str] = {}
    grid, ahead = rows_ahead(file, asked, described, assumed)
    config = find_config(file, relative, grid, asked, described, assumed)
    preprocess = find_preprocess(config, relative, described, assumed)
    return Told(config=config, preprocess=preprocess, labels=described.labels, assumed=assumed), ahead


def rows_ahead(file: TensorFile, asked: Asked, told: ConfigJson, assumed: dict[str, str]) -> tuple[Pair | None, int]:
    """The grid of the table, and its rows that are not of patches; (None, 0) without a table."""
    shapes = file.shapes
    if "pos_embed" not in shapes:
        assumed["position"] = "position=none: the file has no pos_embed"
        return None, 0
    rows, class_token, patch = file.shape("pos_embed", 3)[1], int("cls_token" in shapes), _patch(file)
    registers = _registers(file)
    if "register_tokens" in shapes:
        possible = (class_token,)
    elif registers and is_square(rows):
        possible = (0, class_token, class_token + registers)  # as timm's published files with registers
    else:
        possible = (class_token + registers, class_token, 0)
    grid = told.size and (told.size[0] // patch[0], told.size[1] // patch[1])
    if grid and not any(rows - extras == grid[0] * grid[1] for extras in possible):
        grid = None  # the size that it is used at, not the one that it was trained at
    grid, ahead = find_grid(rows, possible, asked, patch, grid)
    if class_token and not ahead and not registers:
        assumed["position_grid"] = f"position_grid={grid}: all {rows} rows are of patches, and none of the class token"
    return grid, ahead


def _registers(file: TensorFile) -> int:
    return next((file.shape(name, 3)[1] for name in _REGISTERS if name in file.shapes), 0)


def _patch(file: TensorFile) -> Pair:
    *_, height, width = file.shape("patch_embed.proj.weight", 4)
    return height, width


def find_config(
    file: TensorFile,
    relative: str,
    grid: Pair | None,
    asked: Asked,
    told: ConfigJson,
    assumed: dict[str, str],
) -> ViTConfig:
    shapes, patch = file.shapes, _patch(file)
    if grid is None:
        grid = asked_grid(asked, patch) or (max(1, 224 // patch[0]), max(1, 224 // patch[1]))
        assumed["image_size"] = f"image_size={image_of(grid, patch)[0]}: the file has no positions and does not tell"
    if told.activation is None:
        assumed["activation"] = "activation=gelu, norm_eps=1e-6: timm's defaults; the file does not tell"
    has_head = "head.weight" in shapes or "head.bias" in shapes
    is_plain_dino = relative == "dinov2" and "register_tokens" not in shapes
    fields: dict[str, Any] = dict(
        **find_sizes(file, "patch_embed.proj", "blocks.", "mlp.fc1"),
        image_size=one_or_two(image_of(grid, patch)),
        num_classes=file.shape("head.weight", 2)[0] if has_head else 0,
        position="learned" if "pos_embed" in shapes else "none",
        class_token="cls_token" in shapes,
        norm_after_pool="fc_norm.weight" in shapes,
        registers=_registers(file),
        layer_scale=1e-5 if "blocks.0.ls1.gamma" in shapes else None,
        activation=told.activation or "gelu",
        position_resample="bicubic" if is_plain_dino else "bicubic-antialias",
        pool=find_pool(file, told),
    )
    settle_heads(fields, told.heads, asked, assumed)
    return ViTConfig(**fields)


def find_pool(file: TensorFile, told: ConfigJson) -> str:
    if "attn_pool.latent" in file.shapes:
        return "map"
    if "cls_token" not in file.shapes:
        return "mean"
    if told.global_pool is None and "fc_norm.weight" in file.shapes:
        return "mean"
    return told.pool


# ---- writing ----


def write(content: Content, path: Path) -> list[str]:
    if content.config.position != "none":
        content = content.with_learned_positions()
    config = content.config
    content.check_holds(attention=("full",), representation=(None,), stem=(None,))
    tensors = content.renamed(rules(config, ahead=written_ahead(config)))
    if is_file(path):
        write_state(content, tensors, path)
    else:
        write_state(content, tensors, path / "model.safetensors")
        with atomic_path(path / "config.json") as aside:
            aside.write_text(json.dumps(describe(content), indent=2, ensure_ascii=False), encoding="utf-8")
    return notes(config, path)


def notes(config: ViTConfig, path: Path) -> list[str]:
    """What a reader of the file must tell timm."""
    told = {name: value for name, value in arguments(config).items() if name not in ("embed_dim", "depth", "mlp_ratio")}
    found = [f"timm's VisionTransformer needs these arguments for it: {told}"] if is_file(path) else []
    if config.norm_eps != 1e-6:
        found.append(f"timm's own norms use epsilon 1e-6, and this network {config.norm_eps}.")
    return found
