"""transformers' ViT: a folder with config.json, or a bare state dict, under its names on disk or in memory.

config.json states every field (huggingface_config.py). Without it, vitral assumes transformers' defaults: exact GELU,
epsilon 1e-12. vitral also reads the layout of transformers' Dinov2.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral.errors import ConfigError, WeightsError
from vitral.files import write_json
from vitral.model.config import ViTConfig
from vitral.weights.dialects.content import PLAIN, Content
from vitral.weights.dialects.huggingface_config import (
    config_json,
    infer_preprocess,
    preprocessor_json,
    stated_activation,
    stated_labels,
)
from vitral.weights.dialects.metadata import read_hints, write_state
from vitral.weights.dialects.plan import LoadPlan, ModelSpec, Overrides, as_pair, as_size, unsupported
from vitral.weights.dialects.rules import ROWS, Rule, pair, patches, rule, stacked, stacked_pair, zeros
from vitral.weights.dialects.shapes import add_heads, image_of, infer_grid, infer_sizes
from vitral.weights.formats.tensor_file import TensorFile, is_file_name

_PROJECTION = "embeddings.patch_embeddings.projection"


@dataclass(frozen=True, kw_only=True)
class Style:
    """One of transformers' namings."""

    prefix: str = "vit."
    layers: str = "encoder.layer"
    norms: tuple[str, str] = ("layernorm_before", "layernorm_after")
    qkv: tuple[str, str, str] = tuple(f"attention.attention.{name}" for name in ("query", "key", "value"))  # type: ignore[assignment]
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
    names = list(rules(spec.vit, style, file))
    return LoadPlan(dialect=dialect, file=file, spec=spec, rules=names, ignored=unused_tensors(file, style))


def infer_spec(file: TensorFile, style: Style, overrides: Overrides) -> ModelSpec:
    """Return the model of a file without hints."""
    stated = file.sidecars.get("config.json", {})
    assumed: dict[str, str] = {}
    config = infer_config(file, style, overrides, stated, assumed)
    return ModelSpec(
        config=config,
        preprocess=infer_preprocess(config, file, assumed),
        labels=stated_labels(stated),
        multi_label=stated.get("problem_type") == "multi_label_classification",
        assumed=assumed,
    )


def detect_style(file: TensorFile) -> Style:
    """Return which of transformers' namings the file uses."""
    name = next(name for name in file.shapes if name.endswith(f"{_PROJECTION}.weight"))
    prefix = name.removesuffix(f"{_PROJECTION}.weight")

    def has(fragment: str) -> bool:
        return any(name.startswith(prefix) and fragment in name for name in file.shapes)

    layers = "encoder.layer" if has("encoder.layer.0.") else "layers" if has("layers.0.") else "layer"
    memory = has("attention.q_proj.")
    norms = ("norm1", "norm2") if has(f"{layers}.0.norm1.") else Style.norms
    separate = tuple(f"attention.{letter}_proj" for letter in "qkv") if memory else Style.qkv
    return Style(
        prefix=prefix,
        layers=layers,
        norms=norms,
        qkv=separate,  # type: ignore[arg-type]
        out="attention.o_proj" if memory else Style.out,
        mlp=("mlp.fc1", "mlp.fc2") if has(".mlp.fc1.") else Style.mlp,
    )


def unused_tensors(file: TensorFile, style: Style) -> dict[str, str]:
    """Return the tensors that the classifier does not use, with the reason."""
    reasons = {
        rf"{style.prefix}pooler\.": "pooler, not used by the classifier",
        rf"{style.prefix}embeddings\.mask_token": "only for masked pre-training",
        r"decoder\.": "decoder, only for pre-training",
    }
    return {name: reason for name in file.shapes for pattern, reason in reasons.items() if re.match(pattern, name)}


def infer_config(
    file: TensorFile, style: Style, overrides: Overrides, stated: dict[str, Any], assumed: dict[str, str]
) -> ViTConfig:
    """Return the config that names, shapes and config.json determine."""
    shapes, prefix = file.shapes, style.prefix
    width, _, patch_height, patch_width = file.shape(f"{prefix}{_PROJECTION}.weight", 4)
    patch = patch_height, patch_width
    rows = file.shape(f"{prefix}embeddings.position_embeddings", 3)[1]
    size = as_pair(stated.get("image_size"))
    grid, _ = infer_grid(rows, (1,), overrides, patch, size and (size[0] // patch_height, size[1] // patch_width))
    block = f"{prefix}{style.layers}.0"
    if f"{block}.{style.mlp[0]}.weight" not in shapes:
        raise unsupported("huggingface", f"its first layer has no MLP named {style.mlp[0]}")
    has_registers = f"{prefix}embeddings.register_tokens" in shapes
    registers = file.shape(f"{prefix}embeddings.register_tokens", 3)[1] if has_registers else 0
    has_scale = f"{block}.layer_scale1.lambda1" in shapes
    epsilon = 1e-6 if has_scale else 1e-12
    for name, key, default in (("norm_eps", "layer_norm_eps", f"{epsilon:g}"), ("activation", "hidden_act", "gelu")):
        if key not in stated:
            assumed[name] = f"{name}={default}: transformers' default; no config.json states {key}"
    fields: dict[str, Any] = dict(
        **infer_sizes(file, f"{prefix}{_PROJECTION}", f"{prefix}{style.layers}.", style.mlp[0]),
        image_size=as_size(image_of(grid, patch)),
        num_classes=_count_classes(file, width, overrides),
        registers=registers,
        class_token=True,
        activation=stated_activation(stated),
        norm_eps=stated.get("layer_norm_eps", epsilon),
        layer_scale=1e-5 if has_scale else None,
        position_resample="bicubic-antialias" if registers else "bicubic",
    )
    add_heads(fields, stated.get("num_attention_heads"), overrides, assumed)
    try:
        return ViTConfig(**fields)
    except ConfigError as error:
        raise WeightsError(f"{file.name}: its config.json does not match its tensors: {error}") from error


def _count_classes(file: TensorFile, width: int, overrides: Overrides) -> int:
    if "classifier.weight" not in file.shapes and "classifier.bias" not in file.shapes:
        return 0
    classes, inputs = file.shape("classifier.weight", 2)
    if inputs == width:
        return classes
    if "num_classes" not in overrides:
        raise unsupported("huggingface", "its classifier reads more than the class token (num_classes=... replaces it)")
    return 0


def rules(config: ViTConfig, style: Style, file: TensorFile | None = None) -> Iterator[Rule]:
    """Yield the rules of all tensors."""
    prefix = style.prefix
    embeddings = f"{prefix}embeddings"
    yield from pair("patches.project", f"{prefix}{_PROJECTION}", patches(config.channels, config.patch_hw))
    yield rule("class_token", f"{embeddings}.cls_token", ROWS)
    yield rule("positions.0.table", f"{embeddings}.position_embeddings", ROWS)
    if config.registers:
        yield rule("registers", f"{embeddings}.register_tokens", ROWS)
    for index in range(config.depth):
        ours, theirs = f"blocks.{index}", f"{prefix}{style.layers}.{index}"
        yield from pair(f"{ours}.norm1", f"{theirs}.{style.norms[0]}")
        qkv = tuple(f"{theirs}.{name}" for name in style.qkv)
        if file and not any(name.endswith(f"{style.qkv[0]}.bias") for name in file.shapes):  # qkv_bias=False
            yield rule(f"{ours}.attention.to_qkv.weight", tuple(f"{name}.weight" for name in qkv), stacked(3))
            yield rule(f"{ours}.attention.to_qkv.bias", (), zeros(3 * config.width))
        else:
            yield from stacked_pair(f"{ours}.attention.to_qkv", qkv)
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


def write(content: Content, path: Path) -> list[str]:
    """Write a folder that ``from_pretrained`` opens, or the state dict alone for a path with a suffix."""
    content = content.with_learned_positions()
    content.check_supported(attention=("full",), pool=("token",), **PLAIN, representation=(None,), stem=(None,))
    tensors = content.renamed(rules(content.config, Style()))
    if not is_file_name(path):
        write_state(content, tensors, path / "model.safetensors")
        write_json(path / "config.json", config_json(content))
        write_json(path / "preprocessor_config.json", preprocessor_json(content.preprocess))
        return []
    write_state(content, tensors, path)
    settings = {name: config_json(content)[name] for name in ("num_attention_heads", "hidden_act", "layer_norm_eps")}
    return [f"Build transformers' ViTConfig for this file with {settings}."]
