"""transformers' ViT: a folder with config.json, or a bare state dict; as it is saved, or as it is named in memory.

With a config.json everything is told. Without it, transformers' defaults are assumed: exact GELU, epsilon 1e-12.
The layout of its Dinov2 is read, too.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral.errors import ConfigError, WeightsError
from vitral.model.config import ViTConfig
from vitral.preprocess import Preprocess
from vitral.weights.content import Content
from vitral.weights.draft import Asked, Draft, check_holds, refuse
from vitral.weights.files import TensorFile, is_file, written_aside
from vitral.weights.hints import read_hints, write_state
from vitral.weights.infer import asked_grid, count_layers, find_grid, one_or_two, pair_of, settle_heads
from vitral.weights.rules import ROWS, Rule, pair, patches, rule, stacked, stacked_pair, zeros

_PROJECTION = "embeddings.patch_embeddings.projection.weight"
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
    """Which of transformers' namings."""

    prefix: str = "vit."
    layers: str = "encoder.layer"
    norms: tuple[str, str] = ("layernorm_before", "layernorm_after")
    qkv: tuple[str, str, str] = tuple(f"attention.attention.{name}" for name in ("query", "key", "value"))  # type: ignore[assignment]
    out: str = "attention.output.dense"
    mlp: tuple[str, str] = ("intermediate.dense", "output.dense")


def recognise(file: TensorFile) -> bool:
    return any(name.endswith(_PROJECTION) for name in file.shapes)


def read(file: TensorFile, asked: Asked) -> Draft:
    told = file.beside.get("config.json", {})
    style = find_style(file)
    assumed: dict[str, str] = {}
    if hinted := read_hints(file):
        config, preprocess, labels, assumed = hinted.config, hinted.preprocess, hinted.labels, hinted.assumed
    else:
        config = find_config(file, style, asked, told, assumed)
        preprocess = find_preprocess(config, file, assumed)
        labels = find_labels(told)
    return Draft(
        dialect="huggingface" if config.layer_scale is None else "dinov2",
        file=file,
        config=config,
        rules=list(rules(config, style, file)),
        preprocess=preprocess,
        labels=labels,
        ignored=find_ignored(file, style),
        assumed=assumed,
    )


def find_style(file: TensorFile) -> Style:
    name = next(name for name in file.shapes if name.endswith(_PROJECTION))
    prefix = name.removesuffix(_PROJECTION)
    has = lambda part: any(name.startswith(prefix) and part in name for name in file.shapes)  # noqa: E731
    layers = "encoder.layer" if has("encoder.layer.0.") else "layers" if has("layers.0.") else "layer"
    memory = has("attention.q_proj.")
    norms = ("norm1", "norm2") if has(f"{layers}.0.norm1.") else Style.norms
    separate = tuple(f"attention.{part}_proj" for part in "qkv") if memory else Style.qkv
    return Style(
        prefix=prefix,
        layers=layers,
        norms=norms,
        qkv=separate,  # type: ignore[arg-type]
        out="attention.o_proj" if memory else Style.out,
        mlp=("mlp.fc1", "mlp.fc2") if has(".mlp.fc1.") else Style.mlp,
    )


def find_ignored(file: TensorFile, style: Style) -> dict[str, str]:
    reasons = {
        rf"{style.prefix}pooler\.": "the pooler, which the classifier does not use",
        rf"{style.prefix}embeddings\.mask_token": "only for masked pre-training",
        r"decoder\.": "of the decoder, only for pre-training",
    }
    return {name: reason for name in file.shapes for pattern, reason in reasons.items() if re.match(pattern, name)}


def find_config(
    file: TensorFile, style: Style, asked: Asked, told: dict[str, Any], assumed: dict[str, str]
) -> ViTConfig:
    shapes, prefix = file.shapes, style.prefix
    width, channels, *patch = file.shape(prefix + _PROJECTION, 4)
    table = file.shape(f"{prefix}embeddings.position_embeddings", 3)
    size = pair_of(told.get("image_size"))
    has_registers = f"{prefix}embeddings.register_tokens" in shapes
    registers = file.shape(f"{prefix}embeddings.register_tokens", 3)[1] if has_registers else 0
    grid = pair_of(asked.get("position_grid")) or (size and (size[0] // patch[0], size[1] // patch[1]))
    grid, _ = find_grid(table[1], (1,), grid or None, asked_grid(asked, (patch[0], patch[1])))
    image = grid[0] * patch[0], grid[1] * patch[1]
    block = f"{prefix}{style.layers}.0"
    if f"{block}.{style.mlp[0]}.weight" not in shapes:
        raise refuse("huggingface", f"its first layer has no MLP called {style.mlp[0]}")
    for name, key, default in (("norm_eps", "layer_norm_eps", "1e-12"), ("activation", "hidden_act", "gelu")):
        if key not in told:
            assumed[name] = f"{name}={default}: transformers' default, as no config.json tells {key}"
    has_scale = f"{block}.layer_scale1.lambda1" in shapes
    has_head = "classifier.weight" in shapes or "classifier.bias" in shapes
    classes = file.shape("classifier.weight", 2) if has_head else (0, width)
    if classes[1] != width and "num_classes" not in asked:
        raise refuse("huggingface", "its classifier reads more than the class token (num_classes=... gives a new one)")
    fields: dict[str, Any] = dict(
        width=width,
        depth=_depth(file, style),
        mlp_width=file.shape(f"{block}.{style.mlp[0]}.weight", 2)[0],
        patch_size=one_or_two((patch[0], patch[1])),
        image_size=one_or_two(image),
        channels=channels,
        num_classes=classes[0] if classes[1] == width else 0,
        registers=registers,
        class_token=True,
        activation=_activation(told),
        norm_eps=told.get("layer_norm_eps", 1e-6 if has_scale else 1e-12),
        layer_scale=1e-5 if has_scale else None,
        position_resample="bicubic-antialias" if registers else "bicubic",
    )
    settle_heads(fields, told.get("num_attention_heads"), asked, assumed)
    try:
        return ViTConfig(**fields)
    except ConfigError as error:
        raise WeightsError(f"{file.path}: its config.json does not fit its tensors: {error}") from error


def _activation(told: dict[str, Any]) -> str:
    name = str(told.get("hidden_act", "gelu"))
    if name not in _ACTIVATIONS:
        raise refuse("huggingface", f"its activation is {name}, and there are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _depth(file: TensorFile, style: Style) -> int:
    return count_layers(file.shapes, rf"{re.escape(style.prefix + style.layers)}\.(\d+)\.")


def find_preprocess(config: ViTConfig, file: TensorFile, assumed: dict[str, str]) -> Preprocess:
    told = file.beside.get("preprocessor_config.json")
    if told is None:
        assumed["preprocess"] = "preprocessing: mean and std 0.5, squashed: there is no preprocessor_config.json"
        return Preprocess(size=config.image_hw).with_channels(config.channels)
    normalises = told.get("do_normalize", True)
    mean, std = told.get("image_mean", [0.5] * 3), told.get("image_std", [0.5] * 3)
    size = told.get("size")
    shortest = size.get("shortest_edge") if isinstance(size, dict) else None
    crops = bool(told.get("do_center_crop")) or shortest is not None
    resample = told.get("resample", 2)
    if resample not in (*_RESAMPLING, None):
        assumed["preprocess"] = f"preprocessing: bicubic, as Pillow's resampling {resample!r} is not known here"
    interpolation = _RESAMPLING.get(resample, "bicubic") if isinstance(resample, int) else "bilinear"
    try:
        preprocess = Preprocess(
            size=config.image_hw,
            resize="crop" if crops else "squash",
            crop_fraction=min(1.0, min(config.image_hw) / shortest) if crops and shortest else 1.0,
            interpolation=interpolation,  # type: ignore[arg-type]
            mean=tuple(mean) if normalises else (0.0,) * len(mean),
            std=tuple(std) if normalises else (1.0,) * len(std),
            channels=len(mean),
        )
    except (TypeError, ValueError, OverflowError, ZeroDivisionError, ConfigError) as error:
        raise WeightsError(f"{file.path}: its preprocessor_config.json cannot be used: {error}.") from error
    return preprocess.with_channels(config.channels)


def find_labels(told: dict[str, Any]) -> tuple[str, ...] | None:
    names = told.get("id2label")
    if not isinstance(names, dict) or {str(key) for key in names} != {str(index) for index in range(len(names))}:
        return None
    labels = tuple(str(names[key]) for key in sorted(names, key=int))
    is_placeholder = all(label == f"LABEL_{index}" for index, label in enumerate(labels))
    return None if is_placeholder else labels


def rules(config: ViTConfig, style: Style, file: TensorFile | None = None) -> Iterator[Rule]:
    prefix = style.prefix
    embeddings = f"{prefix}embeddings"
    yield from pair(
        "patches.project", f"{embeddings}.patch_embeddings.projection", patches(config.channels, config.patch_hw)
    )
    yield rule("class_token", f"{embeddings}.cls_token", ROWS)
    yield rule("positions.0.table", f"{embeddings}.position_embeddings", ROWS)
    if config.registers:
        yield rule("registers", f"{embeddings}.register_tokens", ROWS)
    for index in range(config.depth):
        ours, theirs = f"blocks.{index}", f"{prefix}{style.layers}.{index}"
        yield from pair(f"{ours}.norm1", f"{theirs}.{style.norms[0]}")
        parts = tuple(f"{theirs}.{name}" for name in style.qkv)
        if file and not any(name.endswith(f"{style.qkv[0]}.bias") for name in file.shapes):  # qkv_bias=False
            weights = tuple(f"{part}.weight" for part in parts)
            yield rule(f"{ours}.attention.to_qkv.weight", weights, stacked(3))
            yield rule(f"{ours}.attention.to_qkv.bias", (), zeros(3 * config.width))
        else:
            yield from stacked_pair(f"{ours}.attention.to_qkv", parts)
        yield from pair(f"{ours}.attention.to_out", f"{theirs}.{style.out}")
        yield from pair(f"{ours}.norm2", f"{theirs}.{style.norms[1]}")
        yield from pair(f"{ours}.mlp.expand", f"{theirs}.{style.mlp[0]}")
        yield from pair(f"{ours}.mlp.contract", f"{theirs}.{style.mlp[1]}")
        if config.layer_scale is not None:
            yield rule(f"{ours}.after_attention.scale", f"{theirs}.layer_scale1.lambda1")
            yield rule(f"{ours}.after_mlp.scale", f"{theirs}.layer_scale2.lambda1")
    yield from pair("norm", f"{prefix}layernorm")
    if config.num_classes:
        yield from pair("head", "classifier")


# ---- writing ----


def write(content: Content, path: Path) -> list[str]:
    """A folder that ``from_pretrained`` opens; with a suffix, the state dict alone."""
    content = content.with_learned_positions()
    config = content.config
    check_holds(
        config,
        "huggingface",
        attention=("full",),
        pool=("token",),
        registers=(0,),
        layer_scale=(None,),
        norm_after_pool=(False,),
        representation=(None,),
        stem=(None,),
    )
    tensors = content.renamed(list(rules(config, Style())))
    if is_file(path):
        write_state(content, tensors, path)
        return []
    write_state(content, tensors, path / "model.safetensors")
    for name, described in (
        ("config.json", describe(content)),
        ("preprocessor_config.json", describe_preprocess(content.preprocess)),
    ):
        with written_aside(path / name) as aside:
            aside.write_text(json.dumps(described, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return []


def describe(content: Content) -> dict[str, Any]:
    config = content.config
    labels = content.labels or tuple(f"LABEL_{index}" for index in range(config.num_classes))
    side = config.image_hw[0] == config.image_hw[1]
    return {
        "architectures": ["ViTForImageClassification" if config.num_classes else "ViTModel"],
        "model_type": "vit",
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_width,
        "hidden_act": {"gelu": "gelu", "gelu-tanh": "gelu_pytorch_tanh", "relu": "relu"}[config.activation],
        "layer_norm_eps": config.norm_eps,
        "image_size": config.image_hw[0] if side else list(config.image_hw),
        "patch_size": config.patch_hw[0] if config.patch_hw[0] == config.patch_hw[1] else list(config.patch_hw),
        "num_channels": config.channels,
        "qkv_bias": True,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
        "dtype": str(next(iter(content.state.values())).dtype).removeprefix("torch."),
    }


def describe_preprocess(preprocess: Preprocess) -> dict[str, Any]:
    height, width = preprocess.size
    crops = preprocess.resize == "crop"
    short = round(min(preprocess.size) / preprocess.crop_fraction)
    described: dict[str, Any] = {
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
    return described | ({"do_center_crop": True, "crop_size": {"height": height, "width": width}} if crops else {})
