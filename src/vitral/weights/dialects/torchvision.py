"""torchvision's layout: class token only, exact GELU, epsilon 1e-6, bicubic positions between the corners, ImageNet's
mean and deviation. Its conv stem and the older names of its MLP are read, too."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitral.errors import WeightsError
from vitral.model.config import ConvStem, ViTConfig
from vitral.weights.checkpoint import imagenet_preprocess
from vitral.weights.dialects.content import PLAIN, Content
from vitral.weights.dialects.draft import Asked, Draft, Told
from vitral.weights.dialects.metadata import read_hints, write_state
from vitral.weights.dialects.rules import ROWS, Rule, pair, pairs, patches, rule
from vitral.weights.dialects.shapes import count_layers, find_grid, image_of, one_or_two, settle_heads
from vitral.weights.formats.tensor_file import TensorFile

_LAYER = "encoder.layers.encoder_layer_"
_TABLE = "encoder.pos_embedding"


def recognise(file: TensorFile) -> bool:
    return f"{_LAYER}0.self_attention.in_proj_weight" in file.shapes and _TABLE in file.shapes


def read(file: TensorFile, asked: Asked) -> Draft:
    told = read_hints(file) or find_told(file, asked)
    names = list(rules(told.vit, old_mlp=f"{_LAYER}0.mlp.linear_1.weight" in file.shapes))
    return Draft(dialect="torchvision", file=file, rules=names, **vars(told))


def find_told(file: TensorFile, asked: Asked) -> Told:
    assumed: dict[str, str] = {}
    config = find_config(file, asked, assumed)
    preprocess, how = imagenet_preprocess(config.image_hw, "bilinear"), "bilinear"
    if min(config.image_hw) >= 384:  # SWAG's, which were fine-tuned at a higher resolution
        preprocess = replace(imagenet_preprocess(config.image_hw, "bicubic"), crop_fraction=1.0)
        how = "bicubic"
    assumed["preprocess"] = f"preprocessing: ImageNet's mean and std, {how}, centre crop, as torchvision has it"
    return Told(config=config, preprocess=preprocess.with_channels(config.channels), assumed=assumed)


def find_config(file: TensorFile, asked: Asked, assumed: dict[str, str]) -> ViTConfig:
    shapes = file.shapes
    stem = find_stem(file)
    kernel = file.shape("conv_proj.conv_last.weight" if stem else "conv_proj.weight", 4)
    step = 1 if stem is None else 2**stem.halvings
    patch = kernel[-2] * step, kernel[-1] * step
    _, rows, width = file.shape(_TABLE, 3)
    grid, _ = find_grid(rows, (1,), asked, patch)
    old = f"{_LAYER}0.mlp.linear_1.weight"
    mlp = file.shape(old if old in shapes else f"{_LAYER}0.mlp.0.weight", 2)
    fields: dict[str, Any] = dict(
        width=width,
        depth=count_layers(shapes, _LAYER),
        mlp_width=mlp[0],
        patch_size=one_or_two((kernel[-2], kernel[-1])),
        image_size=one_or_two(image_of(grid, patch)),
        channels=file.shape("conv_proj.conv_bn_relu_0.0.weight" if stem else "conv_proj.weight", 4)[1],
        num_classes=file.shape("heads.head.weight", 2)[0] if "heads.head.weight" in shapes else 0,
        representation=file.shape("heads.pre_logits.weight", 2)[0] if "heads.pre_logits.weight" in shapes else None,
        stem=stem,
        class_token=True,
        activation="gelu",
        position_resample="bicubic-corners",
    )
    settle_heads(fields, None, asked, assumed)
    return ViTConfig(**fields)


def find_stem(file: TensorFile) -> ConvStem | None:
    if "conv_proj.conv_last.weight" not in file.shapes:
        return None
    widths = []
    while (name := f"conv_proj.conv_bn_relu_{len(widths)}.0.weight") in file.shapes:
        widths.append(file.shape(name, 4)[0])
    return ConvStem(widths=tuple(widths), norm="batch")


def rules(config: ViTConfig, *, old_mlp: bool = False) -> Iterator[Rule]:
    yield rule("class_token", "class_token", ROWS)
    yield rule("positions.0.table", _TABLE, ROWS)
    last = "conv_proj" if config.stem is None else "conv_proj.conv_last"
    yield from pair("patches.project", last, patches(config.patch_channels, config.patch_hw))
    if isinstance(config.stem, ConvStem):
        for index in range(len(config.stem.widths)):
            ours, theirs = f"patches.stem.{index}", f"conv_proj.conv_bn_relu_{index}"
            for part in ("0.weight", *(f"1.{name}" for name in _BATCH_NORM)):
                yield rule(f"{ours}.{part}", f"{theirs}.{part}")
    block = _BLOCK | ({"mlp.expand": "mlp.linear_1", "mlp.contract": "mlp.linear_2"} if old_mlp else {})
    for index in range(config.depth):
        yield from pairs(f"blocks.{index}", f"{_LAYER}{index}", block)
        for kind in ("weight", "bias"):
            theirs = f"{_LAYER}{index}.self_attention.in_proj_{kind}"
            yield rule(f"blocks.{index}.attention.to_qkv.{kind}", theirs)
    yield from pair("norm", "encoder.ln")
    if config.representation:
        yield from pair("representation.0", "heads.pre_logits")
    if config.num_classes:
        yield from pair("head", "heads.head")


_BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_BLOCK = {
    "norm1": "ln_1",
    "attention.to_out": "self_attention.out_proj",
    "norm2": "ln_2",
    "mlp.expand": "mlp.0",
    "mlp.contract": "mlp.3",
}


def write(content: Content, path: Path) -> list[str]:
    content = content.with_learned_positions()
    config = content.config
    content.check_holds(
        activation=("gelu",), attention=("full",), pool=("token",), **PLAIN, representation_activation=("tanh",)
    )
    square = config.image_hw[0] == config.image_hw[1] and config.patch_hw[0] == config.patch_hw[1]
    if not square or config.channels != 3:
        raise WeightsError("torchvision's VisionTransformer is for square RGB images and square patches only.")
    if config.stem is not None and not (isinstance(config.stem, ConvStem) and config.stem.norm == "batch"):
        raise WeightsError("The torchvision layout cannot hold this stem; it has ConvStem(norm='batch') or none.")
    write_state(content, content.renamed(rules(config)), path)
    return [] if config.norm_eps == 1e-6 else [f"Give torchvision norm_layer with epsilon {config.norm_eps}."]
