"""Google's npz files: vit_jax (github.com/google-research/vision_transformer) and big_vision.

Both use the tanh-approximated GELU, LayerNorm epsilon 1e-6, bilinear resampling of positions between the corners, and
pixels from -1 to 1. They number the parts of a block differently. The position table of vit_jax has a row for the class
token; big_vision adds its N rows before it prepends the class token. google_rules.py maps the tensor names.
"""

import re
from dataclasses import replace
from pathlib import Path

from vitral.errors import WeightsError
from vitral.model.config import ResNetStem, ViTConfig
from vitral.weights.dialects.content import PLAIN, Content
from vitral.weights.dialects.google_rules import KERNEL, Style, rules
from vitral.weights.dialects.plan import LoadPlan, ModelSpec, Overrides, as_pair, as_size, google_preprocess
from vitral.weights.dialects.shapes import count_layers, count_units, image_of, infer_grid, width_factor
from vitral.weights.formats.npz import write_npz
from vitral.weights.formats.tensor_file import TensorFile

_PREFIXES = ("", "opt/target/", "params/", "params/img/", "img/")
_TABLES = {  # name: whether it has a row for the class token
    "Transformer/posembed_input/pos_embedding": True,
    "Transformer/pos_embedding": False,
    "pos_embedding": False,
}
PREPROCESS = "preprocessing: mean and std 0.5, squash to the size, as in Google's code; the file does not state it"


def recognizes(file: TensorFile) -> bool:
    """Return whether the file has Google's patch embedding."""
    return any(prefix + KERNEL in file.shapes for prefix in _PREFIXES)


def plan(file: TensorFile, overrides: Overrides) -> LoadPlan:
    """Return the plan for a vit_jax or big_vision file."""
    prefix = next(prefix for prefix in _PREFIXES if prefix + KERNEL in file.shapes)
    if prefix:
        file = file.below(prefix, _reason_outside)
    style = detect_style(file)
    assumed: dict[str, str] = {}
    config = infer_config(file, style, overrides, assumed)
    assumed["preprocess"] = PREPROCESS
    spec = ModelSpec(config=config, preprocess=google_preprocess(config.image_hw), assumed=assumed)
    ignored = {name: "optimizer state" for name in file.shapes if name.startswith("opt/")}
    return LoadPlan(dialect=style.dialect, file=file, spec=spec, rules=list(rules(config, style)), ignored=ignored)


def _reason_outside(name: str) -> str:
    if "/txt/" in name:
        return "belongs to the text tower"
    return "optimizer state" if name.startswith("opt/") else "not part of the image network"


def detect_style(file: TensorFile) -> Style:
    """Return which of Google's namings the file uses."""
    shapes = file.shapes
    table = next((name for name in _TABLES if name in shapes), None)
    scanned = any(name.startswith("Transformer/encoderblock/") for name in shapes)
    old = any("/MlpBlock_3/" in name for name in shapes)
    class_row = table is not None and _TABLES[table] and "cls" in shapes
    if old and table is None:
        raise WeightsError(f"{file.name} has no position table (expected Transformer/posembed_input/pos_embedding).")
    is_big_vision = scanned or "probe" in shapes or "MAPHead_0/probe" in shapes or table is None or not _TABLES[table]
    return Style(
        old_numbers=old,
        scanned=scanned,
        table=table,
        class_row=class_row,
        map_prefix="" if "probe" in shapes else "MAPHead_0/",
        dialect="big_vision" if is_big_vision else "google",
    )


def infer_config(file: TensorFile, style: Style, overrides: Overrides, assumed: dict[str, str]) -> ViTConfig:
    """Return the config that names and shapes determine."""
    shapes = file.shapes
    query = _block_shape(file, r"MultiHeadDotProductAttention_\d/query", 3 + style.scanned)
    hidden = _block_shape(file, r"MlpBlock_\d/Dense_0", 2 + style.scanned)
    patch_height, patch_width, inputs, width = file.shape(KERNEL, 4)
    stem = infer_stem(file)
    shrink = 1 if stem is None else 2**stem.halvings
    has_class_token, has_head = "cls" in shapes, "head/kernel" in shapes or "head/bias" in shapes
    if style.table is None:
        image = as_pair(overrides.get("image_size")) or (224, 224)
        assumed["position"] = "position=sincos-2d: the file has no position table, as with big_vision's fixed waves"
        assumed["image_size"] = f"image_size={image[0]}: the file does not state it"
    else:
        pixels = patch_height * shrink, patch_width * shrink
        grid, _ = infer_grid(file.shape(style.table, 3)[1], (int(style.class_row),), overrides, pixels)
        image = image_of(grid, pixels)
    return ViTConfig(
        width=width,
        depth=_depth(file, style),
        heads=query[-2],
        mlp_width=hidden[-1],
        patch_size=as_size((patch_height, patch_width)),
        image_size=as_size(image),
        channels=file.shape("conv_root/kernel", 4)[2] if stem else inputs,
        num_classes=file.shape("head/kernel", 2)[1] if has_head else 0,
        position="sincos-2d" if style.table is None else "learned",
        pool="map" if f"{style.map_prefix}probe" in shapes else "token" if has_class_token else "mean",
        class_token=has_class_token,
        representation=file.shape("pre_logits/kernel", 2)[1] if "pre_logits/kernel" in shapes else None,
        stem=stem,
    )


def _block_shape(file: TensorFile, suffix: str, dimensions: int) -> tuple[int, ...]:
    """Return the shape of a kernel in the first block."""
    pattern = re.compile(rf"Transformer/encoderblock(_0)?/{suffix}/kernel")
    for name in file.shapes:
        if pattern.fullmatch(name):
            return file.shape(name, dimensions)
    raise WeightsError(f"{file.name} has Google's patch embedding, but no Transformer/encoderblock_0/{suffix}.")


def _depth(file: TensorFile, style: Style) -> int:
    if not style.scanned:
        return count_layers(file.shapes, "Transformer/encoderblock_", "/")
    shape = next(shape for name, shape in file.shapes.items() if name.startswith("Transformer/encoderblock/"))
    return shape[0] if shape else 0


def infer_stem(file: TensorFile) -> ResNetStem | None:
    """Return the ResNet of a hybrid, or None."""
    if "conv_root/kernel" not in file.shapes:
        return None
    stages = count_units(file.shapes, r"block(\d+)/unit(\d+)/")
    return ResNetStem(stages=stages, width_factor=width_factor(file.shape("conv_root/kernel", 4)[3]))


_GOOGLE = Style(old_numbers=True, scanned=False, table="Transformer/posembed_input/pos_embedding", class_row=True)
_BIG_VISION = Style(old_numbers=False, scanned=False, table="pos_embedding", class_row=False, dialect="big_vision")


def write(content: Content, path: Path) -> list[str]:
    """Write vit_jax's published numbering, which every reader of these files supports, or big_vision's."""
    is_big_vision = content.dialect == "big_vision"
    if is_big_vision and content.config.position == "sincos-2d" and content.config.position_at == "stem":
        style = replace(_BIG_VISION, table=None)
    else:
        content, style = content.with_learned_positions(), _BIG_VISION if is_big_vision else _GOOGLE
    config = content.config
    content.check_supported(
        activation=("gelu-tanh",),
        norm_eps=(1e-6,),
        attention=("full",),
        **PLAIN,
        representation_activation=("tanh",),
        pool=("token", "mean", "map") if is_big_vision else ("token", "mean"),
        class_token=(config.pool == "token",),
    )
    if config.stem is not None and not isinstance(config.stem, ResNetStem):
        raise WeightsError(f"The {content.dialect} dialect cannot store a ConvStem.", hint="Use dialect='native'.")
    prefix = "params/" if is_big_vision else ""
    write_npz(content.renamed(rules(config, style)), path, prefix)
    return []
