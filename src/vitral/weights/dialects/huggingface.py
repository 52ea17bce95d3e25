"""transformers' ViT: a folder with config.json, or a bare state dict; as it is saved, or as it is named in memory.

With a config.json everything is told (huggingface_json.py). Without it, transformers' defaults are assumed: exact GELU,
epsilon 1e-12. The layout of its Dinov2 is read, too.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral.errors import ConfigError, WeightsError
from vitral.files import atomic_path
from vitral.model.config import ViTConfig
from vitral.weights.dialects.content import PLAIN, Content
from vitral.weights.dialects.draft import Asked, Draft, Told, refuse
from vitral.weights.dialects.huggingface_json import (
    describe,
    describe_preprocess,
    find_activation,
    find_labels,
    find_preprocess,
)
from vitral.weights.dialects.metadata import read_hints, write_state
from vitral.weights.dialects.rules import ROWS, Rule, pair, patches, rule, stacked, stacked_pair, zeros
from vitral.weights.dialects.shapes import find_grid, find_sizes, image_of, one_or_two, pair_of, settle_heads
from vitral.weights.formats.tensor_file import TensorFile, is_file

_PROJECTION = "embeddings.patch_embeddings.projection"


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
    return any(name.endswith(f"{_PROJECTION}.weight") for name in file.shapes)


def read(file: TensorFile, asked: Asked) -> Draft:
    style = find_style(file)
    told = read_hints(file) or find_told(file, style, asked)
    return Draft(
        dialect="huggingface" if told.vit.layer_scale is None else "dinov2",
        file=file,
        rules=list(rules(told.vit, style, file)),
        ignored=find_ignored(file, style),
        **vars(told),
    )


def find_told(file: TensorFile, style: Style, asked: Asked) -> Told:
    described = file.beside.get("config.json", {})
    assumed: dict[str, str] = {}
    config = find_config(file, style, asked, described, assumed)
    preprocess = find_preprocess(config, file, assumed)
    is_multi = described.get("problem_type") == "multi_label_classification"
    labels = find_labels(described)
    return Told(config=config, preprocess=preprocess, labels=labels, multi_label=is_multi, assumed=assumed)


def find_style(file: TensorFile) -> Style:
    name = next(name for name in file.shapes if name.endswith(f"{_PROJECTION}.weight"))
    prefix = name.removesuffix(f"{_PROJECTION}.weight")
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
    width, _, height, across = file.shape(f"{prefix}{_PROJECTION}.weight", 4)
    table = file.shape(f"{prefix}embeddings.position_embeddings", 3)
    size = pair_of(told.get("image_size"))
    has_registers = f"{prefix}embeddings.register_tokens" in shapes
    registers = file.shape(f"{prefix}embeddings.register_tokens", 3)[1] if has_registers else 0
    grid, _ = find_grid(table[1], (1,), asked, (height, across), size and (size[0] // height, size[1] // across))
    block = f"{prefix}{style.layers}.0"
    if f"{block}.{style.mlp[0]}.weight" not in shapes:
        raise refuse("huggingface", f"its first layer has no MLP called {style.mlp[0]}")
    has_scale = f"{block}.layer_scale1.lambda1" in shapes
    epsilon = 1e-6 if has_scale else 1e-12
    for name, key, default in (("norm_eps", "layer_norm_eps", f"{epsilon:g}"), ("activation", "hidden_act", "gelu")):
        if key not in told:
            assumed[name] = f"{name}={default}: transformers' default, as no config.json tells {key}"
    has_head = "classifier.weight" in shapes or "classifier.bias" in shapes
    classes = file.shape("classifier.weight", 2) if has_head else (0, width)
    if classes[1] != width and "num_classes" not in asked:
        raise refuse("huggingface", "its classifier reads more than the class token (num_classes=... gives a new one)")
    fields: dict[str, Any] = dict(
        **find_sizes(file, f"{prefix}{_PROJECTION}", f"{prefix}{style.layers}.", style.mlp[0]),
        image_size=one_or_two(image_of(grid, (height, across))),
        num_classes=classes[0] if classes[1] == width else 0,
        registers=registers,
        class_token=True,
        activation=find_activation(told),
        norm_eps=told.get("layer_norm_eps", epsilon),
        layer_scale=1e-5 if has_scale else None,
        position_resample="bicubic-antialias" if registers else "bicubic",
    )
    settle_heads(fields, told.get("num_attention_heads"), asked, assumed)
    try:
        return ViTConfig(**fields)
    except ConfigError as error:
        raise WeightsError(f"{file.path}: its config.json does not fit its tensors: {error}") from error


def rules(config: ViTConfig, style: Style, file: TensorFile | None = None) -> Iterator[Rule]:
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


def write(content: Content, path: Path) -> list[str]:
    """A folder that ``from_pretrained`` opens; with a suffix, the state dict alone."""
    content = content.with_learned_positions()
    content.check_holds(attention=("full",), pool=("token",), **PLAIN, representation=(None,), stem=(None,))
    tensors = content.renamed(rules(content.config, Style()))
    if is_file(path):
        write_state(content, tensors, path)
        return []
    write_state(content, tensors, path / "model.safetensors")
    for name, described in (
        ("config.json", describe(content)),
        ("preprocessor_config.json", describe_preprocess(content.preprocess)),
    ):
        with atomic_path(path / name) as aside:
            aside.write_text(json.dumps(described, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return []
