"""transformers' ViT: a folder with config.json, or a bare state dict, under its names on disk or in memory.

config.json states every field. Without it, vitral assumes transformers' defaults: exact GELU,
epsilon 1e-12. Networks with layer scale have the layout of transformers' Dinov2, with or without registers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitral.errors import ConfigError, WeightsError, short_repr
from vitral.files import write_json
from vitral.model.config import ViTConfig
from vitral.preprocess import Preprocess
from vitral.weights.dialects import shapes
from vitral.weights.dialects.native import read_hints, write_state
from vitral.weights.dialects.plan import (
    PLAIN,
    Content,
    LoadPlan,
    ModelSpec,
    Overrides,
    imagenet_preprocess,
    unsupported,
)
from vitral.weights.dialects.rules import ROWS, Rule, pair, pairs, patches, rule, without_qkv_bias
from vitral.weights.formats.tensor_file import TensorFile, is_file_name

_PROJECTION = "embeddings.patch_embeddings.projection"
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_new": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "relu": "relu",
}
_RESAMPLING = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers


@dataclass(frozen=True, kw_only=True)
class Style:
    """One of transformers' namings."""

    prefix: str = "vit."
    layers: str = "encoder.layer"
    norms: tuple[str, str] = ("layernorm_before", "layernorm_after")
    qkv: tuple[str, str, str] = ("attention.attention.query", "attention.attention.key", "attention.attention.value")
    out: str = "attention.output.dense"
    mlp: tuple[str, str] = ("intermediate.dense", "output.dense")


def recognizes(file: TensorFile) -> bool:
    """Return whether the file has transformers' patch embedding."""
    return any(name.endswith(f"{_PROJECTION}.weight") for name in file.shapes)


def plan(file: TensorFile, overrides: Overrides) -> LoadPlan:
    """Return the plan for a checkpoint of transformers."""
    style = detect_style(file)
    spec = read_hints(file) or infer_spec(file, style, overrides)
    dialect = "huggingface" if spec.vit.layer_scale is None else "dinov2"
    names = rules(spec.vit, style)
    if not any(name.endswith(f"{style.qkv[0]}.bias") for name in file.shapes):
        names = without_qkv_bias(names, spec.vit.width)
    unused = {
        rf"{style.prefix}pooler\.": "pooler, not used by the classifier",
        rf"{style.prefix}embeddings\.mask_token": "only for masked pre-training",
        r"decoder\.": "decoder, only for pre-training",
    }
    return LoadPlan(
        dialect=dialect, file=file, spec=spec, rules=list(names), ignored=shapes.unused_tensors(file, unused)
    )


def detect_style(file: TensorFile) -> Style:
    """Return which of transformers' namings the file uses."""
    name = next(name for name in file.shapes if name.endswith(f"{_PROJECTION}.weight"))
    prefix = name.removesuffix(f"{_PROJECTION}.weight")

    def has(fragment: str) -> bool:
        return any(name.startswith(prefix) and fragment in name for name in file.shapes)

    layers = "encoder.layer" if has("encoder.layer.0.") else "layers" if has("layers.0.") else "layer"
    memory = has("attention.q_proj.")
    return Style(
        prefix=prefix,
        layers=layers,
        norms=("norm1", "norm2") if has(f"{layers}.0.norm1.") else Style.norms,
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj") if memory else Style.qkv,
        out="attention.o_proj" if memory else Style.out,
        mlp=("mlp.fc1", "mlp.fc2") if has(".mlp.fc1.") else Style.mlp,
    )


def infer_spec(file: TensorFile, style: Style, overrides: Overrides) -> ModelSpec:
    """Return the model that names, shapes and config.json determine."""
    stated, prefix, assumed = file.sidecars.get("config.json", {}), style.prefix, dict[str, str]()
    width, _, *patch = file.shape(f"{prefix}{_PROJECTION}.weight", 4)
    rows = file.shape(f"{prefix}embeddings.position_embeddings", 3)[1]
    size = shapes.as_pair(stated.get("image_size"))
    grid = size and (size[0] // patch[0], size[1] // patch[1])
    grid, _ = shapes.infer_grid(rows, (1,), overrides, (patch[0], patch[1]), grid)
    block, tokens = f"{prefix}{style.layers}.0", f"{prefix}embeddings.register_tokens"
    if f"{block}.{style.mlp[0]}.weight" not in file.shapes:
        raise unsupported("huggingface", f"its first layer has no MLP named {style.mlp[0]}")
    registers = file.shape(tokens, 3)[1] if tokens in file.shapes else 0
    has_scale = f"{block}.layer_scale1.lambda1" in file.shapes
    epsilon = 1e-6 if has_scale else 1e-12
    for name, key, default in (("norm_eps", "layer_norm_eps", f"{epsilon:g}"), ("activation", "hidden_act", "gelu")):
        if key not in stated:
            assumed[name] = f"{name}={default}: transformers' default; no config.json states {key}"
    fields: dict[str, Any] = dict(
        **shapes.infer_sizes(file, f"{prefix}{_PROJECTION}", f"{prefix}{style.layers}.", style.mlp[0]),
        image_size=shapes.image_size(grid, (patch[0], patch[1])),
        **_infer_head(file, width, overrides),
        registers=registers,
        class_token=True,
        activation=stated_activation(stated),
        norm_eps=stated.get("layer_norm_eps", epsilon),
        layer_scale=1e-5 if has_scale else None,
        position_resample="bicubic-antialias" if registers else "bicubic",
    )
    shapes.add_heads(fields, stated.get("num_attention_heads"), overrides, assumed)
    try:
        config = ViTConfig(**fields)
    except ConfigError as error:
        raise WeightsError(f"{file.name}: its config.json does not match its tensors: {error}") from error
    return ModelSpec(
        config=config,
        preprocess=infer_preprocess(config, file, assumed),
        labels=stated_labels(stated),
        multi_label=stated.get("problem_type") == "multi_label_classification",
        assumed=assumed,
    )


def _infer_head(file: TensorFile, width: int, overrides: Overrides) -> dict[str, Any]:
    """Return num_classes and pool. The classifier of Dinov2 reads the class token and the mean of the patches."""
    if "classifier.weight" not in file.shapes and "classifier.bias" not in file.shapes:
        return {"num_classes": 0}
    classes, inputs = file.shape("classifier.weight", 2)
    pools = {width: "token", 2 * width: "token+mean"}
    if inputs in pools:
        return {"num_classes": classes, "pool": pools[inputs]}
    if "num_classes" not in overrides:
        raise unsupported("huggingface", f"its classifier reads {inputs} features (num_classes=... replaces it)")
    return {"num_classes": 0}


def rules(config: ViTConfig, style: Style) -> Iterator[Rule]:
    """Yield the rules of all tensors."""
    prefix = style.prefix
    yield from pair("patches.project", f"{prefix}{_PROJECTION}", patches(config.channels, config.patch_hw))
    yield rule("class_token", f"{prefix}embeddings.cls_token", ROWS)
    yield rule("positions.0.table", f"{prefix}embeddings.position_embeddings", ROWS)
    if config.registers:
        yield rule("registers", f"{prefix}embeddings.register_tokens", ROWS)
    block = {
        "norm1": style.norms[0],
        "attention.to_qkv": style.qkv,
        "attention.to_out": style.out,
        "norm2": style.norms[1],
        "mlp.expand": style.mlp[0],
        "mlp.contract": style.mlp[1],
    }
    for index in range(config.depth):
        ours, theirs = f"blocks.{index}", f"{prefix}{style.layers}.{index}"
        yield from pairs(ours, theirs, block)
        if config.layer_scale is not None:
            yield rule(f"{ours}.after_attention.scale", f"{theirs}.layer_scale1.lambda1")
            yield rule(f"{ours}.after_mlp.scale", f"{theirs}.layer_scale2.lambda1")
    yield from pair("norm", f"{prefix}layernorm")
    if config.num_classes:
        yield from pair("head", "classifier")


def write(content: Content, path: Path) -> list[str]:
    """Write a folder that ``from_pretrained`` opens, or the state dict alone for a path with a suffix."""
    content = content.with_learned_positions()
    content.check_supported(attention=("full",), norm_after_pool=(False,), representation=(None,), stem=(None,))
    if content.config.layer_scale is None:
        content.check_supported(pool=("token",), **PLAIN)
        style, described = Style(), config_json(content)
    else:
        if content.config.num_classes:
            content.check_supported(pool=("token+mean",))
        if is_file_name(path):
            raise content.unsupported("a network with layer_scale in a single file; write a folder")
        style, described = dinov2_style(content.config), dinov2_json(content)
    tensors = content.renamed(rules(content.config, style))
    if content.config.registers:  # transformers always has this one with registers
        tensors[f"{style.prefix}embeddings.mask_token"] = torch.zeros(1, content.config.width)
    if not is_file_name(path):
        write_state(content, tensors, path / "model.safetensors")
        write_json(path / "config.json", described)
        write_json(path / "preprocessor_config.json", preprocessor_json(content.preprocess))
        return []
    write_state(content, tensors, path)
    settings = {name: described[name] for name in ("num_attention_heads", "hidden_act", "layer_norm_eps")}
    return [f"Build transformers' ViTConfig for this file with {settings}."]


def dinov2_style(config: ViTConfig) -> Style:
    """Return the names of transformers' Dinov2, which are others with registers."""
    prefix = "dinov2_with_registers." if config.registers else "dinov2."
    return Style(prefix=prefix, norms=("norm1", "norm2"), mlp=("mlp.fc1", "mlp.fc2"))


# ---- config.json and preprocessor_config.json ----


def stated_activation(stated: dict[str, Any]) -> str:
    """Return the activation in config.json, by default gelu."""
    name = str(stated.get("hidden_act", "gelu"))
    if name not in _ACTIVATIONS:
        expected = ", ".join(_ACTIVATIONS)
        raise unsupported("huggingface", f"its activation is {short_repr(name)} (expected {expected})")
    return _ACTIVATIONS[name]


def infer_preprocess(config: ViTConfig, file: TensorFile, assumed: dict[str, str]) -> Preprocess:
    """Return the preprocessing in preprocessor_config.json, or else the default, noted as assumed."""
    stated = file.sidecars.get("preprocessor_config.json")
    if stated is None and config.layer_scale is not None:
        assumed["preprocess"] = "preprocessing: ImageNet's, as in DINOv2; there is no preprocessor_config.json"
        return imagenet_preprocess(config.image_hw, "bicubic").with_channels(config.channels)
    if stated is None:
        assumed["preprocess"] = "preprocessing: mean and std 0.5, squash; there is no preprocessor_config.json"
        return Preprocess(size=config.image_hw).with_channels(config.channels)
    if differences := "; ".join(_differences(stated, config)):
        assumed["preprocess"] = f"preprocessing: {differences}"
    try:
        return _parse_preprocess(stated, config).with_channels(config.channels)
    except (TypeError, ValueError, OverflowError, ZeroDivisionError, ConfigError) as error:
        raise WeightsError(f"{file.name}: its preprocessor_config.json is invalid: {error}.") from error


def _parse_preprocess(stated: dict[str, Any], config: ViTConfig) -> Preprocess:
    size, crop = _sides(stated, "size"), _sides(stated, "crop_size")
    mean, std = stated.get("image_mean", [0.5] * 3), stated.get("image_std", [0.5] * 3)
    normalizes = stated.get("do_normalize", True)
    resample = stated.get("resample", 2)
    interpolation = _RESAMPLING.get(resample, "bicubic") if isinstance(resample, int) else "bilinear"
    shortest = stated["size"].get("shortest_edge") if isinstance(stated.get("size"), dict) else None
    crops = bool(stated.get("do_center_crop")) or shortest is not None
    kept, whole = min(crop or config.image_hw), shortest or (size and min(size))
    return Preprocess(
        size=config.image_hw,
        resize="crop" if crops else "squash",
        crop_fraction=min(1.0, kept / whole) if crops and whole else 1.0,
        interpolation=interpolation,  # type: ignore[arg-type]
        mean=tuple(mean) if normalizes else (0.0,) * len(mean),
        std=tuple(std) if normalizes else (1.0,) * len(std),
        channels=len(mean),
    )


def _sides(stated: dict[str, Any], key: str) -> shapes.Pair | None:
    """Return (height, width) of 224 or {"height": 224, "width": 224}."""
    size = stated.get(key)
    return shapes.as_pair([size.get("height"), size.get("width")] if isinstance(size, dict) else size)


def _differences(stated: dict[str, Any], config: ViTConfig) -> Iterator[str]:
    """Yield where our preprocessing differs from the one in the file."""
    resample, factor = stated.get("resample", 2), stated.get("rescale_factor", 1 / 255)
    size, crop = _sides(stated, "size"), _sides(stated, "crop_size") if stated.get("do_center_crop") else None
    if resample not in (*_RESAMPLING, None):
        yield f"bicubic; Pillow's resampling {short_repr(resample)} is not supported"
    if crop is not None and crop != config.image_hw:
        yield f"{config.image_hw[0]} x {config.image_hw[1]} as in the network, not {crop[0]} x {crop[1]}"
    if crop is not None and size is not None and size != crop:
        yield f"vitral resizes the short side and crops the center, but the file squashes to {size[0]} x {size[1]}"
    if stated.get("do_resize") is False:
        yield "vitral resizes images, but the file leaves their size unchanged"
    if stated.get("do_rescale") is False or not isinstance(factor, int | float) or abs(factor * 255 - 1) > 0.01:
        yield "vitral scales pixels to 0..1 before it subtracts the mean, but the file uses another scale"


def stated_labels(stated: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the class names in config.json, unless they are placeholders or have gaps."""
    names = stated.get("id2label")
    if not isinstance(names, dict) or {str(key) for key in names} != {str(index) for index in range(len(names))}:
        return None
    labels = tuple(str(names[key]) for key in sorted(names, key=int))
    is_placeholder = all(label == f"LABEL_{index}" for index, label in enumerate(labels))
    return None if is_placeholder else labels


def config_json(content: Content) -> dict[str, Any]:
    """Return the config.json of transformers."""
    config = content.config
    labels = content.labels or tuple(f"LABEL_{index}" for index in range(config.num_classes))
    return {
        "architectures": ["ViTForImageClassification" if config.num_classes else "ViTModel"],
        "model_type": "vit",
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_width,
        "hidden_act": {"gelu": "gelu", "gelu-tanh": "gelu_pytorch_tanh", "relu": "relu"}[config.activation],
        "layer_norm_eps": config.norm_eps,
        "image_size": shapes.as_size(config.image_hw),
        "patch_size": shapes.as_size(config.patch_hw),
        "num_channels": config.channels,
        "qkv_bias": True,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
        **({"problem_type": "multi_label_classification"} if content.multi_label else {}),
        "dtype": str(next(iter(content.state.values())).dtype).removeprefix("torch."),
    }


def dinov2_json(content: Content) -> dict[str, Any]:
    """Return the config.json of transformers' Dinov2."""
    config, described = content.config, config_json(content)
    if config.mlp_width % config.width:
        raise content.unsupported(f"mlp_width={config.mlp_width} with layer_scale (expected a multiple of width)")
    del described["intermediate_size"]
    name = "Dinov2WithRegisters" if config.registers else "Dinov2"
    return described | {
        "architectures": [f"{name}ForImageClassification" if config.num_classes else f"{name}Model"],
        "model_type": "dinov2_with_registers" if config.registers else "dinov2",
        "mlp_ratio": config.mlp_width // config.width,
        "num_register_tokens": config.registers,
        "drop_path_rate": config.drop_path,
        "use_mask_token": False,
        "use_swiglu_ffn": False,
    }


def preprocessor_json(preprocess: Preprocess) -> dict[str, Any]:
    """Return the preprocessor_config.json of transformers."""
    height, width = preprocess.size
    crops = preprocess.resize == "crop"
    short = round(min(preprocess.size) / preprocess.crop_fraction)
    settings: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": short} if crops else {"height": height, "width": width},
        "resample": {name: number for number, name in _RESAMPLING.items()}[preprocess.interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }
    return settings | ({"do_center_crop": True, "crop_size": {"height": height, "width": width}} if crops else {})
