"""timm's layout, and those of DeiT, MAE and DINOv2, which share its names.

Their code uses the exact GELU, LayerNorm epsilon 1e-6, and bicubic resampling of positions. A norm called ``fc_norm``
follows the pooling. A position table may have rows for the class token and registers, for the class token only, or for
neither; rows of tokens without a position in our network are added to the tokens, which is equivalent.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral.errors import ConfigError, WeightsError, short_repr
from vitral.files import write_json
from vitral.model.config import ViTConfig
from vitral.preprocess import Preprocess
from vitral.weights.dialects import shapes
from vitral.weights.dialects.native import read_hints, write_state
from vitral.weights.dialects.plan import (
    Config,
    Content,
    LoadPlan,
    ModelSpec,
    Overrides,
    imagenet_preprocess,
    unsupported,
)
from vitral.weights.dialects.rules import ROWS, Rule, pair, pairs, patches, rule, token_rules, without_qkv_bias
from vitral.weights.formats.tensor_file import TensorFile, is_file_name

_REGISTERS = ("register_tokens", "reg_token")
_MLP = {"mlp.expand": "mlp.fc1", "mlp.contract": "mlp.fc2"}
_BLOCK = {"norm1": "norm1", "attention.to_out": "attn.proj", "norm2": "norm2"} | _MLP | {"attention.to_qkv": "attn.qkv"}
_MAP = {"to_q": "q", "to_kv": "kv", "to_out": "proj", "norm": "norm"} | _MLP
_PRETRAINING = {r"mask_token": "only for masked pre-training", r"decoder_": "decoder, only for pre-training"}
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu-tanh", "relu": "relu"}
_POOLS = {"avg": "mean", "token": "token", "": "none", "map": "map"}
_TANH_MODELS = r"base_patch32_siglip|large_patch16_siglip(_gap)?_512|(so400m|giantopt)_patch16_siglip"
# fields that timm's names imply and its files do not state
_ARCHITECTURES = {_TANH_MODELS: {"activation": "gelu-tanh"}, r"vit_base_patch16_gap_224": {"heads": 16}}
_SUPPORTED_ARGUMENTS = (  # used, visible in the tensors, or irrelevant to inference
    {"img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads", "mlp_ratio"}
    | {"class_token", "no_embed_class", "reg_tokens", "pos_embed", "init_values", "global_pool", "fc_norm", "act_layer"}
    | {"qkv_bias", "dynamic_img_size", "dynamic_img_pad", "strict_img_size", "output_fmt", "embed_norm_layer"}
    | {"drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"}
    | {"weight_init", "fix_init"}
)


def recognizes(file: TensorFile) -> bool:
    """Return whether the file has timm's names."""
    return "patch_embed.proj.weight" in file.shapes and "blocks.0.attn.qkv.weight" in file.shapes


def plan(file: TensorFile, overrides: Overrides) -> LoadPlan:
    """Return the plan for a checkpoint of timm's family."""
    stated, family, spec = read_config_json(file), detect_family(file), read_hints(file)
    if spec:
        token_rows = written_token_rows(spec.vit)
    else:
        spec, token_rows = infer_spec(file, family, overrides, stated)
    registers = next((name for name in _REGISTERS if name in file.shapes), "reg_token")
    names = rules(spec.vit, token_rows=token_rows, registers=registers)
    if not any(name.endswith("attn.qkv.bias") for name in file.shapes):
        names = without_qkv_bias(names, spec.vit.width)
    ignored = shapes.unused_tensors(file, _PRETRAINING)
    return LoadPlan(dialect=family, file=file, spec=spec, rules=list(names), ignored=ignored)


def detect_family(file: TensorFile) -> str:
    """Return timm, mae or dinov2, by tensors that only one of them has."""
    tensors = file.shapes
    if any(name.startswith("decoder_") for name in tensors):
        return "mae"
    rows = file.shape("pos_embed", 3)[1] if "pos_embed" in tensors else 0
    is_bare_14 = file.shape("patch_embed.proj.weight", 4)[-1] == 14 and "head.weight" not in tensors
    is_like_dino = "mask_token" in tensors or (is_bare_14 and shapes.is_square(rows - 1))
    if "register_tokens" in tensors or ("blocks.0.ls1.gamma" in tensors and is_like_dino):
        return "dinov2"
    return "mae" if "mask_token" in tensors else "timm"


def infer_spec(file: TensorFile, family: str, overrides: Overrides, stated: "ConfigJson") -> tuple[ModelSpec, int]:
    """Return the model that names, shapes and config.json determine, and the table rows that belong to tokens."""
    tensors, assumed = file.shapes, dict[str, str]()
    *_, height, width = file.shape("patch_embed.proj.weight", 4)
    patch = height, width
    registers = next((file.shape(name, 3)[1] for name in _REGISTERS if name in tensors), 0)
    if "pos_embed" in tensors:
        grid, token_rows = infer_table(file, patch, registers, overrides, stated.size)
        if "cls_token" in tensors and not token_rows and not registers:
            rows = f"all {grid[0] * grid[1]} rows are patches, none is the class token"
            assumed["position_grid"] = f"position_grid={grid}: {rows}"
    else:
        grid, token_rows = shapes.requested_grid(overrides, patch) or (max(1, 224 // height), max(1, 224 // width)), 0
        assumed["position"] = "position=none: the file has no pos_embed"
        assumed["image_size"] = f"image_size={grid[0] * height}: the file has no positions and does not state it"
    if stated.activation is None:
        assumed["activation"] = "activation=gelu, norm_eps=1e-6: timm's defaults; the file does not state them"
    has_head = "head.weight" in tensors or "head.bias" in tensors
    fields: dict[str, Any] = dict(
        **shapes.infer_sizes(file, "patch_embed.proj", "blocks.", "mlp.fc1"),
        image_size=shapes.image_size(grid, patch),
        num_classes=file.shape("head.weight", 2)[0] if has_head else 0,
        position="none",
        class_token="cls_token" in tensors,
        norm_after_pool="fc_norm.weight" in tensors,
        registers=registers,
        layer_scale=1e-5 if "blocks.0.ls1.gamma" in tensors else None,
        activation=stated.activation or "gelu",
        pool=infer_pool(file, stated),
    )
    if "pos_embed" in tensors:
        is_plain_dino = family == "dinov2" and "register_tokens" not in tensors
        fields |= dict(position="learned", position_resample="bicubic" if is_plain_dino else "bicubic-antialias")
    shapes.add_heads(fields, stated.heads, overrides, assumed)
    config = ViTConfig(**fields)
    preprocess = infer_preprocess(config, family, stated, assumed)
    return ModelSpec(config=config, preprocess=preprocess, labels=stated.labels, assumed=assumed), token_rows


def infer_table(
    file: TensorFile, patch: shapes.Pair, registers: int, overrides: Overrides, size: shapes.Pair | None
) -> tuple[shapes.Pair, int]:
    """Return the grid of the position table and its rows for tokens; ``size`` is that of the images, if stated."""
    rows, class_token = file.shape("pos_embed", 3)[1], int("cls_token" in file.shapes)
    if "register_tokens" in file.shapes:
        possible = (class_token,)
    elif registers and shapes.is_square(rows):
        possible = (0, class_token, class_token + registers)  # as in timm's published files with registers
    else:
        possible = (class_token + registers, class_token, 0)
    grid = size and (size[0] // patch[0], size[1] // patch[1])
    if grid and not any(rows - extra == grid[0] * grid[1] for extra in possible):
        grid = None  # the size at which the model is used, not that of its training
    return shapes.infer_grid(rows, possible, overrides, patch, grid)


def infer_pool(file: TensorFile, stated: "ConfigJson") -> str:
    """Return the pooling that tensors and config.json determine."""
    if "attn_pool.latent" in file.shapes:
        return "map"
    averages = stated.pool is None and "fc_norm.weight" in file.shapes
    return "mean" if averages or "cls_token" not in file.shapes else stated.pool or "token"


def rules(config: ViTConfig, *, token_rows: int, registers: str = "reg_token") -> Iterator[Rule]:
    """Yield the rules of all tensors; ``token_rows`` of the position table belong to tokens."""
    yield from pair("patches.project", "patch_embed.proj", patches(config.channels, config.patch_hw))
    names = {"class_token": "cls_token"} if config.has_class_token else {}
    names |= {"registers": registers} if config.registers else {}
    names |= {"positions.0.table": "pos_embed"} if config.position == "learned" else {}
    yield from token_rules(names, token_rows)
    for block in (f"blocks.{index}" for index in range(config.depth)):
        yield from pairs(block, block, _BLOCK)
        if config.layer_scale is not None:
            yield rule(f"{block}.after_attention.scale", f"{block}.ls1.gamma")
            yield rule(f"{block}.after_mlp.scale", f"{block}.ls2.gamma")
    yield from pair("norm", "fc_norm" if config.norm_after_pool else "norm")
    if config.pool == "map":
        yield rule("pool.probe", "attn_pool.latent", ROWS)
        yield from pairs("pool", "attn_pool", _MAP)
    if config.num_classes:
        yield from pair("head", "head")


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


# ---- config.json: ``architecture``, ``model_args`` and ``pretrained_cfg`` ----


@dataclass(frozen=True, kw_only=True)
class ConfigJson:
    """Facts that config.json states or its architecture implies; None for the rest."""

    size: shapes.Pair | None
    """(height, width) of the images."""
    activation: str | None
    heads: object
    pool: str | None
    labels: tuple[str, ...] | None
    pretrained: dict[str, Any]
    """The section that has the preprocessing."""


def read_config_json(file: TensorFile) -> ConfigJson:
    """Return timm's config.json beside a file; raise WeightsError for an unsupported architecture."""
    content = file.sidecars.get("config.json", {})
    content = content if "architecture" in content else {}
    arguments, pretrained = content.get("model_args") or {}, content.get("pretrained_cfg") or content
    if not isinstance(arguments, dict) or not isinstance(pretrained, dict):
        raise WeightsError(f"{file.name}: model_args and pretrained_cfg in its config.json must be objects.")
    architecture = str(content.get("architecture", ""))
    pool, activation = arguments.get("global_pool", content.get("global_pool")), arguments.get("act_layer")
    _check(architecture[:100], arguments, pool, activation)
    implied = next((fields for name, fields in _ARCHITECTURES.items() if re.search(name, architecture)), {})
    size, labels = pretrained.get("input_size"), pretrained.get("label_names")
    used = shapes.as_pair(size[1:]) if isinstance(size, list) and len(size) == 3 else None
    return ConfigJson(
        size=shapes.as_pair(arguments.get("img_size")) or used,
        activation=_ACTIVATIONS.get(str(activation), implied.get("activation")),
        heads=arguments.get("num_heads", implied.get("heads")),
        pool=None if pool is None else _POOLS[str(pool)],
        labels=tuple(map(str, labels)) if isinstance(labels, list) else None,
        pretrained=pretrained,
    )


def _check(name: str, arguments: dict[str, Any], pool: object, activation: object) -> None:
    if "_rpn_" in name or "post" in str(arguments.get("block_fn", "")).lower():
        raise unsupported("timm", f"architecture {name} is post-norm, and a ViT of the paper is pre-norm")
    if re.search(r"rope|^eva|dinov3", name):
        raise unsupported("timm", f"architecture {name} rotates queries and keys by their position")
    for key, value, choices in (("global_pool", pool, _POOLS), ("act_layer", activation, _ACTIVATIONS)):
        if value is not None and str(value) not in choices:
            raise unsupported("timm", f"{key} is {short_repr(value)} (expected {', '.join(map(repr, choices))})")
    for key, value in arguments.items():
        if key not in _SUPPORTED_ARGUMENTS and value not in (None, False, 0, ""):
            raise unsupported("timm", f"it was built with {key}={short_repr(value)}")


def infer_preprocess(config: ViTConfig, family: str, stated: ConfigJson, assumed: dict[str, str]) -> Preprocess:
    """Return the stated preprocessing, or else that of the family, noted as assumed."""
    if (preprocess := stated_preprocess(config, stated)) is not None:
        return preprocess
    is_newer = not config.has_class_token or config.registers > 0  # timm's own recipes use 0.5
    if family == "timm" and not is_newer and (config.layer_scale is not None or config.norm_after_pool):
        family = "DeiT III or a fine-tuned MAE"
    if family != "timm":
        assumed["preprocess"] = f"preprocessing: ImageNet's mean and std, bicubic, center crop, as in {family}"
        return imagenet_preprocess(config.image_hw, "bicubic").with_channels(config.channels)
    assumed["preprocess"] = (
        "preprocessing: mean and std 0.5, as in timm's AugReg models; DeiT's files look the same but use ImageNet's "
        "(override with preprocess=dict(mean=..., std=...))"
    )
    half = Preprocess(size=config.image_hw, resize="crop", crop_fraction=0.9, interpolation="bicubic")
    return half.with_channels(config.channels)


def stated_preprocess(config: Config, stated: ConfigJson) -> Preprocess | None:
    """Return the preprocessing in config.json, if it has mean and std."""
    described = stated.pretrained
    if not isinstance(described.get("mean"), list) or not isinstance(described.get("std"), list):
        return None
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
        raise WeightsError(f"The preprocessing in config.json is invalid: {error}") from error
    return preprocess.with_channels(config.channels)


def model_args(config: ViTConfig) -> dict[str, Any]:
    """Return the arguments of timm's VisionTransformer for this network."""
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
        global_pool={ours: theirs for theirs, ours in _POOLS.items()}[config.pool],
        fc_norm=config.norm_after_pool,
        act_layer={ours: theirs for theirs, ours in _ACTIVATIONS.items()}[config.activation],
    )


def config_json(content: Content) -> dict[str, Any]:
    """Return the config.json of a folder that timm opens as ``local-dir:``."""
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
        "architecture": "vit_base_patch16_224",  # stands for the class; model_args has every size
        "num_classes": config.num_classes,
        "num_features": config.width,
        "global_pool": model_args(config)["global_pool"],
        "pretrained_cfg": described,
        "model_args": {**model_args(config), "in_chans": config.channels},
    }
