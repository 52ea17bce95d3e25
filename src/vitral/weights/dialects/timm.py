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

from vitral.errors import ConfigError, WeightsError
from vitral.model.config import ViTConfig
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import imagenet_preprocess
from vitral.weights.content import Content
from vitral.weights.draft import Asked, Draft, check_holds, refuse
from vitral.weights.files import TensorFile, is_file, written_aside
from vitral.weights.hints import read_hints, write_state
from vitral.weights.infer import (
    asked_grid,
    count_layers,
    find_grid,
    is_square,
    one_or_two,
    pair_of,
    settle_heads,
)
from vitral.weights.rules import ROWS, Layout, Rule, pair, patches, rule, zeros

_REGISTERS = ("reg_token", "register_tokens")
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu-tanh", "relu": "relu"}
_POOLS = {"avg": "mean", "token": "token", "": "none", "map": "map"}
_ARCHITECTURES: tuple[tuple[str, dict[str, Any]], ...] = (  # what timm's names imply and its files do not say
    (
        r"(base_patch32|large_patch16|so400m_patch16|giantopt_patch16)_siglip.*(256|384|512)",
        {"activation": "gelu-tanh"},
    ),
    (r"vit_base_patch16_gap_224", {"heads": 16}),
)
_ARGUMENTS = frozenset(
    [
        "img_size",
        "patch_size",
        "in_chans",
        "num_classes",
        "embed_dim",
        "depth",
        "num_heads",
        "mlp_ratio",
        "class_token",
        "no_embed_class",
        "reg_tokens",
        "pos_embed",
        "init_values",
        "global_pool",
        "fc_norm",
        "act_layer",
        "qkv_bias",
        "dynamic_img_size",
        "dynamic_img_pad",
        "strict_img_size",
        "weight_init",
        "fix_init",
        "drop_rate",
        "pos_drop_rate",
        "patch_drop_rate",
        "proj_drop_rate",
        "attn_drop_rate",
        "drop_path_rate",
        "output_fmt",
        "embed_norm_layer",
    ]
)


def recognise(file: TensorFile) -> bool:
    return "patch_embed.proj.weight" in file.shapes and "blocks.0.attn.qkv.weight" in file.shapes


def read(file: TensorFile, asked: Asked) -> Draft:
    told = file.beside.get("config.json", {})
    told = told if "architecture" in told else {}
    check_told(told)
    relative = find_relative(file)
    assumed: dict[str, str] = {}
    if hinted := read_hints(file):
        config, preprocess, labels, assumed = hinted.config, hinted.preprocess, hinted.labels, hinted.assumed
        ahead = written_ahead(config)
    else:
        grid, ahead = rows_ahead(file, asked, told, assumed)
        config = find_config(file, relative, grid, asked, told, assumed)
        preprocess, labels = find_preprocess(config, relative, told, assumed), find_labels(told)
    return Draft(
        dialect=relative,
        file=file,
        config=config,
        rules=list(rules(config, ahead=ahead, file=file)),
        preprocess=preprocess,
        labels=labels,
        ignored=find_ignored(file),
        assumed=assumed,
    )


def check_told(told: dict[str, Any]) -> None:
    """Refuses what a config.json says and we have no place for."""
    name = str(told.get("architecture", ""))
    arguments, described = told.get("model_args") or {}, told.get("pretrained_cfg") or {}
    if not isinstance(arguments, dict) or not isinstance(described, dict):
        raise WeightsError("config.json: model_args and pretrained_cfg must be objects.")
    if "_rpn_" in name or "post" in str(arguments.get("block_fn", "")).lower():
        raise refuse("timm", f"architecture {name} is post-norm, and a ViT of the paper is pre-norm")
    if re.search(r"rope|^eva|dinov3", name):
        raise refuse("timm", f"architecture {name} turns queries and keys by their position")
    for key, known in (("global_pool", _POOLS), ("act_layer", _ACTIVATIONS)):
        value = arguments.get(key, told.get(key) if key == "global_pool" else None)
        if value is not None and str(value) not in known:
            raise refuse("timm", f"{key} is {value!r}, and there are {', '.join(map(repr, known))}")
    unknown = [key for key, value in arguments.items() if key not in _ARGUMENTS and value not in (None, False, 0, "")]
    if unknown:
        raise refuse("timm", f"it was built with {unknown[0]}={arguments[unknown[0]]!r}, which is not known here")


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


def rows_ahead(
    file: TensorFile, asked: Asked, told: dict[str, Any], assumed: dict[str, str]
) -> tuple[tuple[int, int] | None, int]:
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
    size = pair_of((told.get("model_args") or {}).get("img_size")) or _input_size(told)
    grid = size and (size[0] // patch[0], size[1] // patch[1])
    if grid and not any(rows - extras == grid[0] * grid[1] for extras in possible):
        grid = None  # the size that it is used at, not the one that it was trained at
    grid, ahead = find_grid(rows, possible, pair_of(asked.get("position_grid")) or grid, asked_grid(asked, patch))
    if class_token and not ahead and not registers:
        assumed["position_grid"] = f"position_grid={grid}: all {rows} rows are of patches, and none of the class token"
    return grid, ahead


def _input_size(told: dict[str, Any]) -> tuple[int, int] | None:
    size = (told.get("pretrained_cfg") or told).get("input_size")
    return pair_of(size[1:]) if isinstance(size, list) and len(size) == 3 else None


def _registers(file: TensorFile) -> int:
    return next((file.shape(name, 3)[1] for name in _REGISTERS if name in file.shapes), 0)


def _patch(file: TensorFile) -> tuple[int, int]:
    *_, height, width = file.shape("patch_embed.proj.weight", 4)
    return height, width


def find_config(
    file: TensorFile,
    relative: str,
    grid: tuple[int, int] | None,
    asked: Asked,
    told: dict[str, Any],
    assumed: dict[str, str],
) -> ViTConfig:
    shapes, arguments, name = file.shapes, told.get("model_args") or {}, str(told.get("architecture"))
    implied = next((fields for pattern, fields in _ARCHITECTURES if re.search(pattern, name)), {})
    width, channels, *_ = file.shape("patch_embed.proj.weight", 4)
    patch = _patch(file)
    if grid is None:
        grid = asked_grid(asked, patch) or (max(1, 224 // patch[0]), max(1, 224 // patch[1]))
        assumed["image_size"] = f"image_size={grid[0] * patch[0]}: the file has no positions and does not tell"
    activation = _ACTIVATIONS.get(str(arguments.get("act_layer")), implied.get("activation"))
    if activation is None:
        activation = "gelu"
        assumed["activation"] = "activation=gelu, norm_eps=1e-6: timm's defaults; the file does not tell"
    has_head = "head.weight" in shapes or "head.bias" in shapes
    is_plain_dino = relative == "dinov2" and "register_tokens" not in shapes
    fields: dict[str, Any] = dict(
        width=width,
        depth=count_layers(shapes, r"blocks\.(\d+)\."),
        mlp_width=file.shape("blocks.0.mlp.fc1.weight", 2)[0],
        patch_size=one_or_two(patch),
        image_size=one_or_two((grid[0] * patch[0], grid[1] * patch[1])),
        channels=channels,
        num_classes=file.shape("head.weight", 2)[0] if has_head else 0,
        position="learned" if "pos_embed" in shapes else "none",
        class_token="cls_token" in shapes,
        norm_after_pool="fc_norm.weight" in shapes,
        registers=_registers(file),
        layer_scale=1e-5 if "blocks.0.ls1.gamma" in shapes else None,
        activation=activation,
        position_resample="bicubic" if is_plain_dino else "bicubic-antialias",
        pool=find_pool(file, told),
    )
    settle_heads(fields, arguments.get("num_heads", implied.get("heads")), asked, assumed)
    return ViTConfig(**fields)


def find_pool(file: TensorFile, told: dict[str, Any]) -> str:
    if "attn_pool.latent" in file.shapes:
        return "map"
    if "cls_token" not in file.shapes or "fc_norm.weight" in file.shapes:
        return "mean"
    arguments = told.get("model_args") or {}
    told_pool = arguments.get("global_pool", told.get("global_pool"))
    return "token" if told_pool is None else _POOLS[str(told_pool)]


def find_preprocess(config: ViTConfig, relative: str, told: dict[str, Any], assumed: dict[str, str]) -> Preprocess:
    described = told.get("pretrained_cfg") or told
    if isinstance(described.get("mean"), list) and isinstance(described.get("std"), list):
        return _told_preprocess(config, described)
    if relative != "timm":
        assumed["preprocess"] = f"preprocessing: ImageNet's mean and std, bicubic, centre crop, as {relative} has it"
        return imagenet_preprocess(config.image_hw, "bicubic").with_channels(config.channels)
    assumed["preprocess"] = (
        "preprocessing: mean and std 0.5, as timm's AugReg models; DeiT's files look the same and use ImageNet's "
        "(preprocess=dict(mean=..., std=...) overrides)"
    )
    half = Preprocess(size=config.image_hw, resize="crop", crop_fraction=0.9, interpolation="bicubic")
    return half.with_channels(config.channels)


def _told_preprocess(config: ViTConfig, described: dict[str, Any]) -> Preprocess:
    crop, interpolation = described.get("crop_pct"), described.get("interpolation")
    try:
        preprocess = Preprocess(
            size=config.image_hw,
            resize="squash" if described.get("crop_mode") == "squash" else "crop",
            crop_fraction=crop if isinstance(crop, int | float) and 0 < crop <= 1 else 1.0,
            interpolation=interpolation if interpolation in ("nearest", "bilinear", "bicubic") else "bicubic",
            mean=tuple(described["mean"]),
            std=tuple(described["std"]),
            channels=len(described["mean"]),
        )
    except ConfigError as error:
        raise WeightsError(f"config.json: its preprocessing cannot be used: {error}") from error
    return preprocess.with_channels(config.channels)


def find_labels(told: dict[str, Any]) -> tuple[str, ...] | None:
    names = (told.get("pretrained_cfg") or told).get("label_names")
    return tuple(map(str, names)) if isinstance(names, list) else None


# ---- rules ----


def rules(config: ViTConfig, *, ahead: int, file: TensorFile | None = None) -> Iterator[Rule]:
    """``file`` decides between the names that the family has for one thing."""
    names = () if file is None else file.shapes
    yield from pair("patches.project", "patch_embed.proj", patches(config.channels, config.patch_hw))
    yield from token_rules(config, ahead, "register_tokens" if "register_tokens" in names else "reg_token")
    has_bias = file is None or any(name.endswith("attn.qkv.bias") for name in names)
    for index in range(config.depth):
        block = f"blocks.{index}"
        for ours, theirs in _BLOCK.items():
            yield from pair(f"{block}.{ours}", f"{block}.{theirs}")
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
    """Class token, registers and table; together where rows of the table belong to tokens that have none here."""
    has_table = config.position == "learned"
    names = [
        (ours, theirs)
        for ours, theirs, there in (
            ("class_token", "cls_token", config.has_class_token),
            ("registers", registers, config.registers > 0),
            ("positions.0.table", "pos_embed", has_table),
        )
        if there
    ]
    if not has_table or ahead == int(config.has_class_token):
        for ours, theirs in names:
            yield rule(ours, theirs, ROWS)
    else:
        yield rule(tuple(ours for ours, _ in names), tuple(theirs for _, theirs in names), _tokens(config, ahead))


def _tokens(config: ViTConfig, ahead: int) -> Layout:
    class_rows = int(config.has_class_token)

    def read(*theirs: Tensor) -> list[Tensor]:
        *tokens, table = (ROWS.read(part) for part in theirs)
        rows, of_patches = table[:ahead], table[ahead:]
        if ahead > class_rows:  # registers' rows go into the registers
            tokens[-1] = tokens[-1] + rows[class_rows:]
        class_row = rows[:class_rows] if ahead else table.new_zeros(class_rows, table.shape[1])
        return [*tokens, torch.cat([class_row, of_patches])]

    def write(*ours: Tensor) -> list[Tensor]:
        if ahead == 0 and class_rows:  # the class token's row goes into the token
            token, *registers, table = ours
            ours = token + table[:1], *registers, table[1:]
        return [part[None] for part in ours]

    return Layout(read=read, write=write)


# ---- writing ----


def written_ahead(config: ViTConfig) -> int:
    """Rows ahead of the patches in what we write: timm gives registers none, and then the class token neither."""
    return 0 if config.registers else int(config.has_class_token)


def write(content: Content, path: Path) -> list[str]:
    if content.config.position != "none":
        content = content.with_learned_positions()
    config = content.config
    check_holds(config, "timm", attention=("full",), representation=(None,), stem=(None,))
    tensors = content.renamed(list(rules(config, ahead=written_ahead(config))))
    if is_file(path):
        write_state(content, tensors, path)
    else:
        write_state(content, tensors, path / "model.safetensors")
        with written_aside(path / "config.json") as aside:
            aside.write_text(json.dumps(describe(content), indent=2, ensure_ascii=False), encoding="utf-8")
    return notes(config, path)


def notes(config: ViTConfig, path: Path) -> list[str]:
    """What a reader of the file must tell timm."""
    told = {name: value for name, value in arguments(config).items() if name not in ("embed_dim", "depth", "mlp_ratio")}
    found = [f"timm's VisionTransformer needs these arguments for it: {told}"] if is_file(path) else []
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
