"""torchvision's layout: class token only, exact GELU, epsilon 1e-6, bicubic positions, ImageNet's mean and std.

vitral also reads its convolutional stem and the older names of its MLP.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitral.errors import WeightsError
from vitral.model.config import ConvStem, ViTConfig
from vitral.weights.dialects import shapes
from vitral.weights.dialects.native import read_hints, write_state
from vitral.weights.dialects.plan import PLAIN, Content, LoadPlan, ModelSpec, Overrides, imagenet_preprocess
from vitral.weights.dialects.rules import ROWS, Rule, pair, pairs, patches, rule
from vitral.weights.formats.tensor_file import TensorFile

_LAYER = "encoder.layers.encoder_layer_"
_TABLE = "encoder.pos_embedding"
_BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_BLOCK = {"norm1": "ln_1", "attention.to_out": "self_attention.out_proj", "norm2": "ln_2"}


def recognizes(file: TensorFile) -> bool:
    """Return whether the file has torchvision's names."""
    return f"{_LAYER}0.self_attention.in_proj_weight" in file.shapes and _TABLE in file.shapes


def plan(file: TensorFile, overrides: Overrides) -> LoadPlan:
    """Return the plan for a torchvision checkpoint."""
    old_mlp = f"{_LAYER}0.mlp.linear_1.weight" in file.shapes
    spec = read_hints(file) or infer_spec(file, overrides, "mlp.linear_1" if old_mlp else "mlp.0")
    return LoadPlan(dialect="torchvision", file=file, spec=spec, rules=list(rules(spec.vit, old_mlp=old_mlp)))


def infer_spec(file: TensorFile, overrides: Overrides, mlp: str) -> ModelSpec:
    """Return the model that names and shapes determine."""
    tensors, assumed = file.shapes, dict[str, str]()
    stem = None
    if "conv_proj.conv_last.weight" in tensors:
        convolutions = shapes.count_layers(tensors, "conv_proj.conv_bn_relu_")
        names = (f"conv_proj.conv_bn_relu_{index}.0.weight" for index in range(convolutions))
        stem = ConvStem(widths=tuple(file.shape(name, 4)[0] for name in names), norm="batch")
    kernel = file.shape("conv_proj.conv_last.weight" if stem else "conv_proj.weight", 4)
    shrink = 1 if stem is None else 2**stem.halvings
    patch = kernel[-2] * shrink, kernel[-1] * shrink
    _, rows, width = file.shape(_TABLE, 3)
    grid, _ = shapes.infer_grid(rows, (1,), overrides, patch)
    fields: dict[str, Any] = dict(
        width=width,
        depth=shapes.count_layers(tensors, _LAYER),
        mlp_width=file.shape(f"{_LAYER}0.{mlp}.weight", 2)[0],
        patch_size=shapes.as_size((kernel[-2], kernel[-1])),
        image_size=shapes.image_size(grid, patch),
        channels=file.shape("conv_proj.conv_bn_relu_0.0.weight" if stem else "conv_proj.weight", 4)[1],
        num_classes=file.shape("heads.head.weight", 2)[0] if "heads.head.weight" in tensors else 0,
        representation=file.shape("heads.pre_logits.weight", 2)[0] if "heads.pre_logits.weight" in tensors else None,
        stem=stem,
        class_token=True,
        activation="gelu",
        position_resample="bicubic-corners",
    )
    shapes.add_heads(fields, None, overrides, assumed)
    config = ViTConfig(**fields)
    preprocess = imagenet_preprocess(config.image_hw, "bilinear")
    if min(config.image_hw) >= 384:  # SWAG's weights, fine-tuned at a higher resolution
        preprocess = replace(preprocess, interpolation="bicubic", crop_fraction=1.0)
    resampling = f"{preprocess.interpolation}, center crop, as in torchvision"
    assumed["preprocess"] = f"preprocessing: ImageNet's mean and std, {resampling}"
    return ModelSpec(config=config, preprocess=preprocess.with_channels(config.channels), assumed=assumed)


def rules(config: ViTConfig, *, old_mlp: bool = False) -> Iterator[Rule]:
    """Yield the rules of all tensors; ``old_mlp`` selects the older names of the MLP."""
    yield rule("class_token", "class_token", ROWS)
    yield rule("positions.0.table", _TABLE, ROWS)
    last = "conv_proj" if config.stem is None else "conv_proj.conv_last"
    yield from pair("patches.project", last, patches(config.patch_channels, config.patch_hw))
    if isinstance(config.stem, ConvStem):
        for index in range(len(config.stem.widths)):
            ours, theirs = f"patches.stem.{index}", f"conv_proj.conv_bn_relu_{index}"
            for tensor in ("0.weight", *(f"1.{name}" for name in _BATCH_NORM)):
                yield rule(f"{ours}.{tensor}", f"{theirs}.{tensor}")
    expand, contract = ("mlp.linear_1", "mlp.linear_2") if old_mlp else ("mlp.0", "mlp.3")
    block = _BLOCK | {"mlp.expand": expand, "mlp.contract": contract}
    for index in range(config.depth):
        yield from pairs(f"blocks.{index}", f"{_LAYER}{index}", block)
        for kind in ("weight", "bias"):
            yield rule(f"blocks.{index}.attention.to_qkv.{kind}", f"{_LAYER}{index}.self_attention.in_proj_{kind}")
    yield from pair("norm", "encoder.ln")
    if config.representation:
        yield from pair("representation.0", "heads.pre_logits")
    if config.num_classes:
        yield from pair("head", "heads.head")


def write(content: Content, path: Path) -> list[str]:
    """Write a state dict for torchvision's VisionTransformer."""
    content = content.with_learned_positions()
    config = content.config
    content.check_supported(
        activation=("gelu",), attention=("full",), pool=("token",), **PLAIN, representation_activation=("tanh",)
    )
    if config.channels != 3 or len({*config.image_hw}) > 1 or len({*config.patch_hw}) > 1:
        raise WeightsError(
            f"torchvision's VisionTransformer takes square RGB images and square patches only (got {config.channels} "
            f"channels, image_size={config.image_size}, patch_size={config.patch_size}).",
            hint="Use dialect='native'.",
        )
    if config.stem is not None and not (isinstance(config.stem, ConvStem) and config.stem.norm == "batch"):
        raise content.unsupported("this stem (expected ConvStem(norm='batch') or none)")
    write_state(content, content.renamed(rules(config)), path)
    return []
