"""torchvision's layout: class token only, exact GELU, epsilon 1e-6, bicubic positions, ImageNet's mean and std.

vitral also reads its convolutional stem and the older names of its MLP.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitral.errors import WeightsError
from vitral.model.config import ConvStem, ViTConfig
from vitral.weights.dialects.content import PLAIN, Content
from vitral.weights.dialects.metadata import read_hints, write_state
from vitral.weights.dialects.plan import LoadPlan, ModelSpec, Overrides, as_size, imagenet_preprocess
from vitral.weights.dialects.rules import ROWS, Rule, pair, pairs, patches, rule
from vitral.weights.dialects.shapes import add_heads, count_layers, image_of, infer_grid
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
    spec = read_hints(file) or infer_spec(file, overrides)
    names = list(rules(spec.vit, old_mlp=f"{_LAYER}0.mlp.linear_1.weight" in file.shapes))
    return LoadPlan(dialect="torchvision", file=file, spec=spec, rules=names)


def infer_spec(file: TensorFile, overrides: Overrides) -> ModelSpec:
    """Return the model of a file without hints."""
    assumed: dict[str, str] = {}
    config = infer_config(file, overrides, assumed)
    preprocess = imagenet_preprocess(config.image_hw, "bilinear")
    if min(config.image_hw) >= 384:  # SWAG's weights, fine-tuned at a higher resolution
        preprocess = replace(preprocess, interpolation="bicubic", crop_fraction=1.0)
    assumed["preprocess"] = (
        f"preprocessing: ImageNet's mean and std, {preprocess.interpolation}, center crop, as in torchvision"
    )
    return ModelSpec(config=config, preprocess=preprocess.with_channels(config.channels), assumed=assumed)


def infer_config(file: TensorFile, overrides: Overrides, assumed: dict[str, str]) -> ViTConfig:
    """Return the config that names and shapes determine."""
    shapes = file.shapes
    stem = infer_stem(file)
    kernel = file.shape("conv_proj.conv_last.weight" if stem else "conv_proj.weight", 4)
    shrink = 1 if stem is None else 2**stem.halvings
    patch = kernel[-2] * shrink, kernel[-1] * shrink
    _, rows, width = file.shape(_TABLE, 3)
    grid, _ = infer_grid(rows, (1,), overrides, patch)
    old = f"{_LAYER}0.mlp.linear_1.weight"
    mlp = file.shape(old if old in shapes else f"{_LAYER}0.mlp.0.weight", 2)
    fields: dict[str, Any] = dict(
        width=width,
        depth=count_layers(shapes, _LAYER),
        mlp_width=mlp[0],
        patch_size=as_size((kernel[-2], kernel[-1])),
        image_size=as_size(image_of(grid, patch)),
        channels=file.shape("conv_proj.conv_bn_relu_0.0.weight" if stem else "conv_proj.weight", 4)[1],
        num_classes=file.shape("heads.head.weight", 2)[0] if "heads.head.weight" in shapes else 0,
        representation=file.shape("heads.pre_logits.weight", 2)[0] if "heads.pre_logits.weight" in shapes else None,
        stem=stem,
        class_token=True,
        activation="gelu",
        position_resample="bicubic-corners",
    )
    add_heads(fields, None, overrides, assumed)
    return ViTConfig(**fields)


def infer_stem(file: TensorFile) -> ConvStem | None:
    """Return the convolutional stem, or None."""
    if "conv_proj.conv_last.weight" not in file.shapes:
        return None
    widths = []
    while (name := f"conv_proj.conv_bn_relu_{len(widths)}.0.weight") in file.shapes:
        widths.append(file.shape(name, 4)[0])
    return ConvStem(widths=tuple(widths), norm="batch")


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
    square = config.image_hw[0] == config.image_hw[1] and config.patch_hw[0] == config.patch_hw[1]
    if not square or config.channels != 3:
        raise WeightsError(
            f"torchvision's VisionTransformer takes square RGB images and square patches only (got {config.channels} "
            f"channels, image_size={config.image_size}, patch_size={config.patch_size}).",
            hint="Use dialect='native'.",
        )
    if config.stem is not None and not (isinstance(config.stem, ConvStem) and config.stem.norm == "batch"):
        raise WeightsError(
            "The torchvision dialect cannot store this stem (expected ConvStem(norm='batch') or none).",
            hint="Use dialect='native'.",
        )
    write_state(content, content.renamed(rules(config)), path)
    return []
