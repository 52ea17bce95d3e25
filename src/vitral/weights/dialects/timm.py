"""timm's layout, and its relatives DeiT, MAE and DINOv2, which share its names.

Their code has the exact GELU, LayerNorm epsilon 1e-6, and resamples positions bicubically. A norm called ``fc_norm``
comes after pooling. A table of positions may have rows for the class token and registers, for the class token only, or
for none of them; rows of tokens that we give no position are added to the tokens themselves, which is the same.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.model.config import ViTConfig
from vitral.preprocess import HALF, Preprocess
from vitral.weights.checkpoint import imagenet_preprocess
from vitral.weights.content import Content
from vitral.weights.draft import Asked, Draft, check_holds, refuse
from vitral.weights.files import TensorFile, written_aside
from vitral.weights.hints import read_hints, write_state
from vitral.weights.infer import asked_grid, count_layers, find_grid, is_square, pair_of, settle_heads
from vitral.weights.rules import ROWS, Layout, Rule, pair, patches, rule

IMPLIED = {"activation": "gelu", "norm_eps": 1e-6}
_REGISTERS = ("reg_token", "register_tokens")
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu-tanh", "relu": "relu"}


def recognise(file: TensorFile) -> bool:
    return "patch_embed.proj.weight" in file.shapes and "blocks.0.attn.qkv.weight" in file.shapes


def read(file: TensorFile, asked: Asked) -> Draft:
    told = file.beside.get("config.json", {})
    told = told if "architecture" in told else {}
    _check_architecture(told)
    relative = find_relative(file)
    assumed: dict[str, str] = {}
    hinted = read_hints(file)
    ahead = rows_ahead(file, asked, told)
    if hinted:
        config, preprocess, labels = hinted
    else:
        config = find_config(file, relative, ahead, asked, told, assumed)
        preprocess, labels = find_preprocess(config, relative, told, assumed), find_labels(told)
    return Draft(
        dialect=relative,
        file=file,
        config=config,
        rules=list(rules(config, ahead=ahead[1], file=file)),
        preprocess=preprocess,
        labels=labels,
        ignored=find_ignored(file),
        assumed=assumed,
    )


def _check_architecture(told: dict[str, Any]) -> None:
    name = str(told.get("architecture", ""))
    if "_rpn_" in name or "post" in str((told.get("model_args") or {}).get("block_fn", "")).lower():
        raise refuse("timm", f"architecture {name} is post-norm, and a ViT of the paper is pre-norm")


def find_relative(file: TensorFile) -> str:
    """Which member of the family: by what only they have."""
    shapes = file.shapes
    if any(name.startswith("decoder_") for name in shapes):
        return "mae"
    is_14 = shapes["patch_embed.proj.weight"][-1] == 14
    if "register_tokens" in shapes or ("blocks.0.ls1.gamma" in shapes and ("mask_token" in shapes or is_14)):
        return "dinov2"
    return "mae" if "mask_token" in shapes else "timm"


def find_ignored(file: TensorFile) -> dict[str, str]:
    reasons = {r"mask_token": "only for masked pre-training", r"decoder_": "of the decoder, only for pre-training"}
    return {name: reason for name in file.shapes for pattern, reason in reasons.items() if re.match(pattern, name)}


def rows_ahead(file: TensorFile, asked: Asked, told: dict[str, Any]) -> tuple[tuple[int, int] | None, int]:
    """The grid of the table, and its rows that are not of patches; (None, 0) without a table."""
    shapes = file.shapes
    if "pos_embed" not in shapes:
        return None, 0
    rows, class_token = shapes["pos_embed"][1], int("cls_token" in shapes)
    patch = _patch(file)
    registers = next((shapes[name][1] for name in _REGISTERS if name in shapes), 0)
    arguments = told.get("model_args") or {}
    size = pair_of(arguments.get("img_size"))
    grid = pair_of(asked.get("position_grid")) or (size and (size[0] // patch[0], size[1] // patch[1]))
    if "register_tokens" in shapes:
        possible = (class_token,)
    elif registers and is_square(rows):
        possible = (0, class_token, class_token + registers)  # as timm's published files with registers
    else:
        possible = (class_token + registers, class_token, 0)
    return find_grid(rows, possible, grid or None, asked_grid(asked, patch))


def find_config(
    file: TensorFile,
    relative: str,
    table: tuple[tuple[int, int] | None, int],
    asked: Asked,
    told: dict[str, Any],
    assumed: dict[str, str],
) -> ViTConfig:
    shapes, arguments = file.shapes, told.get("model_args") or {}
    width, channels, *_ = shapes["patch_embed.proj.weight"]
    patch = _patch(file)
    grid = table[0] or asked_grid(asked, patch) or (224 // patch[0], 224 // patch[1])
    if table[0] is None:
        assumed["image_size"] = f"image_size={grid[0] * patch[0]}: the file has no positions and does not tell"
    fields: dict[str, Any] = dict(
        width=width,
        depth=count_layers(shapes, r"blocks\.(\d+)\."),
        mlp_width=shapes["blocks.0.mlp.fc1.weight"][0] if "blocks.0.mlp.fc1.weight" in shapes else 1,
        patch_size=patch[0] if patch[0] == patch[1] else patch,
        image_size=(grid[0] * patch[0], grid[1] * patch[1]),
        channels=channels,
        num_classes=shapes["head.weight"][0] if "head.weight" in shapes else 0,
        position="none" if table[0] is None else "learned",
        class_token="cls_token" in shapes,
        norm_after_pool="fc_norm.weight" in shapes,
        registers=next((shapes[name][1] for name in _REGISTERS if name in shapes), 0),
        layer_scale=1e-5 if "blocks.0.ls1.gamma" in shapes else None,
        activation=_ACTIVATIONS.get(str(arguments.get("act_layer", "gelu")), "gelu"),
        position_resample="bicubic"
        if relative == "dinov2" and "register_tokens" not in shapes
        else "bicubic-antialias",
    )
    if fields["image_size"][0] == fields["image_size"][1]:
        fields["image_size"] = fields["image_size"][0]
    fields["pool"] = find_pool(file, told)
    settle_heads(fields, arguments.get("num_heads"), asked, assumed)
    return ViTConfig(**fields)


def _patch(file: TensorFile) -> tuple[int, int]:
    height, width = file.shapes["patch_embed.proj.weight"][-2:]
    return height, width


def find_pool(file: TensorFile, told: dict[str, Any]) -> str:
    if "attn_pool.latent" in file.shapes:
        return "map"
    if "cls_token" not in file.shapes or "fc_norm.weight" in file.shapes:
        return "mean"
    return {"avg": "mean", "token": "token", "": "none"}.get(str(told.get("global_pool", "token")), "token")


def find_preprocess(config: ViTConfig, relative: str, told: dict[str, Any], assumed: dict[str, str]) -> Preprocess:
    described = told.get("pretrained_cfg") or told
    if isinstance(described.get("mean"), list) and isinstance(described.get("std"), list):
        crop = described.get("crop_pct") or 1.0
        squashes = described.get("crop_mode") == "squash"
        interpolation = described.get("interpolation")
        return Preprocess(
            size=config.image_hw,
            resize="squash" if squashes else "crop",
            crop_fraction=float(crop),
            interpolation=interpolation if interpolation in ("nearest", "bilinear", "bicubic") else "bicubic",
            mean=tuple(described["mean"]),
            std=tuple(described["std"]),
        ).with_channels(config.channels)
    if relative != "timm":
        assumed["preprocess"] = f"preprocessing: ImageNet's mean and std, bicubic, centre crop, as {relative} has it"
        return imagenet_preprocess(config.image_hw, "bicubic").with_channels(config.channels)
    assumed["preprocess"] = (
        "preprocessing: mean and std 0.5, as timm's AugReg models; DeiT's files look the same and use ImageNet's "
        "(preprocess=dict(mean=..., std=...) overrides)"
    )
    half = Preprocess(
        size=config.image_hw, resize="crop", crop_fraction=0.9, interpolation="bicubic", mean=HALF, std=HALF
    )
    return half.with_channels(config.channels)


def find_labels(told: dict[str, Any]) -> tuple[str, ...] | None:
    names = (told.get("pretrained_cfg") or told).get("label_names")
    return tuple(map(str, names)) if isinstance(names, list) else None


# ---- rules ----


def rules(config: ViTConfig, *, ahead: int, file: TensorFile | None = None) -> Iterator[Rule]:
    """``file`` decides between the names that the family has for one thing."""
    has = (lambda name: name in file.shapes) if file else (lambda name: False)
    yield from pair("patches.project", "patch_embed.proj", patches(config.channels, config.patch_hw))
    yield from token_rules(config, ahead, "register_tokens" if has("register_tokens") else "reg_token")
    for index in range(config.depth):
        block = f"blocks.{index}"
        for ours, theirs in _BLOCK.items():
            yield from pair(f"{block}.{ours}", f"{block}.{theirs}")
        yield rule(f"{block}.attention.to_qkv.weight", f"{block}.attn.qkv.weight")
        if file and not has(f"{block}.attn.qkv.bias"):
            zeros = Layout(read=lambda: torch.zeros(3 * config.width), write=lambda bias: ())
            yield rule(f"{block}.attention.to_qkv.bias", (), zeros)
        else:
            yield rule(f"{block}.attention.to_qkv.bias", f"{block}.attn.qkv.bias")
        if config.layer_scale is not None:
            yield rule(f"{block}.after_attention.scale", f"{block}.ls1.gamma")
            yield rule(f"{block}.after_mlp.scale", f"{block}.ls2.gamma")
    yield from pair("norm", "fc_norm" if config.norm_after_pool else "norm")
    if config.pool == "map":
        yield rule("pool.probe", "attn_pool.latent", ROWS)
        for ours, theirs in _MAP.items():
            yield from pair(f"pool.{ours}", f"attn_pool.{theirs}")
    if config.num_classes:
        yield from pair("head", "head")


_BLOCK = {
    "norm1": "norm1",
    "attention.to_out": "attn.proj",
    "norm2": "norm2",
    "mlp.expand": "mlp.fc1",
    "mlp.contract": "mlp.fc2",
}
_MAP = {
    "to_q": "q",
    "to_kv": "kv",
    "to_out": "proj",
    "norm": "norm",
    "mlp.expand": "mlp.fc1",
    "mlp.contract": "mlp.fc2",
}


def token_rules(config: ViTConfig, ahead: int, registers: str) -> Iterator[Rule]:
    """Class token, registers and table: all that the rows ahead of the patches may be shared among."""
    table = config.position == "learned"
    ours = {"class_token": config.has_class_token, "registers": config.registers > 0, "positions.0.table": table}
    theirs = {"cls_token": config.has_class_token, registers: config.registers > 0, "pos_embed": table}
    here = tuple(name for name, there in ours.items() if there)
    if here:
        yield rule(here, tuple(name for name, there in theirs.items() if there), _tokens(config, ahead, table))


def _tokens(config: ViTConfig, ahead: int, has_table: bool) -> Layout:
    class_rows = int(config.has_class_token)

    def read(*theirs: Tensor) -> list[Tensor]:
        parts = [part[0] for part in theirs]
        if not has_table:
            return parts
        *tokens, table = parts
        rows, patches = table[:ahead], table[ahead:]
        if ahead > class_rows:  # registers' rows go into the registers
            tokens[-1] = tokens[-1] + rows[class_rows:]
        class_row = rows[:class_rows] if ahead else table.new_zeros(class_rows, table.shape[1])
        return [*tokens, torch.cat([class_row, patches])] if ahead != class_rows else [*tokens, table]

    def write(*ours: Tensor) -> list[Tensor]:
        if has_table and ahead == 0 and class_rows:  # the class token's row goes into the token
            token, *registers, table = ours
            ours = token + table[:1], *registers, table[1:]
        return [part[None] for part in ours]

    return Layout(read=read, write=write)


# ---- writing ----


def write(content: Content, path: Path) -> list[str]:
    if content.config.position != "none" or content.config.position_at != "stem":
        content = content.with_learned_positions()
    config = content.config
    check_holds(config, "timm", attention=("full",), representation=(None,), stem=(None,))
    ahead = 0 if config.registers else int(config.has_class_token)  # timm gives registers no rows
    tensors = content.renamed(list(rules(config, ahead=ahead)))
    if path.suffix:
        write_state(content, tensors, path, IMPLIED)
    else:
        write_state(content, tensors, path / "model.safetensors", {})
        with written_aside(path / "config.json") as aside:
            aside.write_text(json.dumps(describe(content), indent=2, ensure_ascii=False), encoding="utf-8")
    return notes(config, path)


def notes(config: ViTConfig, path: Path) -> list[str]:
    """What a reader of the file must tell timm."""
    told = {name: value for name, value in arguments(config).items() if name not in ("embed_dim", "depth", "mlp_ratio")}
    found = [] if not path.suffix else [f"timm's VisionTransformer needs these arguments for it: {told}"]
    if config.norm_eps != 1e-6:
        found.append(f"timm's own norms use epsilon 1e-6, and this network {config.norm_eps}.")
    return found


def arguments(config: ViTConfig) -> dict[str, Any]:
    """Those of timm's VisionTransformer for this network."""
    return dict(
        img_size=config.image_hw,
        patch_size=config.patch_size,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_width / config.width,
        class_token=config.has_class_token,
        no_embed_class=bool(config.registers),
        reg_tokens=config.registers,
        pos_embed="none" if config.position == "none" else "learn",
        init_values=config.layer_scale,
        global_pool={"token": "token", "mean": "avg", "map": "map", "none": ""}[config.pool],
        fc_norm=config.norm_after_pool,
        act_layer={"gelu": "gelu", "gelu-tanh": "gelu_tanh", "relu": "relu"}[config.activation],
    )


def describe(content: Content) -> dict[str, Any]:
    """The config.json of a folder that timm opens as ``local-dir:``."""
    config, preprocess = content.config, content.preprocess
    described: dict[str, Any] = dict(
        input_size=[config.channels, *config.image_hw],
        interpolation=preprocess.interpolation,
        crop_pct=preprocess.crop_fraction,
        crop_mode="squash" if preprocess.resize == "squash" else "center",
        mean=list(preprocess.mean),
        std=list(preprocess.std),
        num_classes=config.num_classes,
        first_conv="patch_embed.proj",
        classifier="head",
    )
    if content.labels:
        described["label_names"] = list(content.labels)
    return {
        "architecture": "vit_base_patch16_224",  # the class; every size is in model_args
        "num_classes": config.num_classes,
        "num_features": config.width,
        "global_pool": arguments(config)["global_pool"],
        "pretrained_cfg": described,
        "model_args": {**arguments(config), "in_chans": config.channels},
    }
