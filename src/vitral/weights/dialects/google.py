"""Google's npz files: vit_jax (github.com/google-research/vision_transformer) and big_vision.

Both have the tanh-approximated GELU, LayerNorm epsilon 1e-6, positions resampled bilinearly between the corners, and
pixels from -1 to 1. They differ in the numbering of a block's parts, and in the table of positions: that of vit_jax
has a row for the class token; big_vision adds its N rows before the class token is there. What they call each tensor
is in google_rules.py.
"""

import re
from dataclasses import replace
from pathlib import Path

from vitral.errors import WeightsError
from vitral.model.config import ResNetStem, ViTConfig
from vitral.weights.checkpoint import google_preprocess
from vitral.weights.dialects.content import PLAIN, Content
from vitral.weights.dialects.draft import Asked, Draft
from vitral.weights.dialects.google_rules import KERNEL, Style, rules
from vitral.weights.dialects.shapes import count_layers, find_grid, image_of, one_or_two, pair_of
from vitral.weights.formats.npz import write_npz
from vitral.weights.formats.tensor_file import TensorFile

_PREFIXES = ("", "opt/target/", "params/", "params/img/", "img/")
_TABLES = {  # name: whether it has a row for the class token
    "Transformer/posembed_input/pos_embedding": True,
    "Transformer/pos_embedding": False,
    "pos_embedding": False,
}


def recognise(file: TensorFile) -> bool:
    return any(prefix + KERNEL in file.shapes for prefix in _PREFIXES)


def read(file: TensorFile, asked: Asked) -> Draft:
    prefix = next(prefix for prefix in _PREFIXES if prefix + KERNEL in file.shapes)
    if prefix:
        file = file.below(prefix, _why_outside)
    style = find_style(file)
    assumed: dict[str, str] = {}
    config = find_config(file, style, asked, assumed)
    preprocess = google_preprocess(config.image_hw)
    assumed["preprocess"] = (
        "preprocessing: mean and std 0.5, squashed to the size, as Google's code does; the file does not tell"
    )
    ignored = {name: "optimizer state" for name in file.shapes if name.startswith("opt/")}
    return Draft(
        dialect=style.dialect,
        file=file,
        config=config,
        rules=list(rules(config, style)),
        preprocess=preprocess,
        ignored=ignored,
        assumed=assumed,
    )


def _why_outside(name: str) -> str:
    if "/txt/" in name:
        return "of the text tower"
    return "optimizer state" if name.startswith("opt/") else "not of the image network"


def find_style(file: TensorFile) -> Style:
    shapes = file.shapes
    table = next((name for name in _TABLES if name in shapes), None)
    scanned = any(name.startswith("Transformer/encoderblock/") for name in shapes)
    old = any("/MlpBlock_3/" in name for name in shapes)
    class_row = table is not None and _TABLES[table] and "cls" in shapes
    if old and table is None:
        raise WeightsError(f"{file.path} lacks Transformer/posembed_input/pos_embedding, its table of positions.")
    is_big_vision = scanned or "probe" in shapes or "MAPHead_0/probe" in shapes or table is None or not _TABLES[table]
    return Style(
        old_numbers=old,
        scanned=scanned,
        table=table,
        class_row=class_row,
        map_prefix="" if "probe" in shapes else "MAPHead_0/",
        dialect="big_vision" if is_big_vision else "google",
    )


def find_config(file: TensorFile, style: Style, asked: Asked, assumed: dict[str, str]) -> ViTConfig:
    shapes = file.shapes
    query = _block_shape(file, r"MultiHeadDotProductAttention_\d/query", 3 + style.scanned)
    hidden = _block_shape(file, r"MlpBlock_\d/Dense_0", 2 + style.scanned)
    patch_height, patch_width, inputs, width = file.shape(KERNEL, 4)
    stem = find_stem(file)
    step = 1 if stem is None else 2**stem.halvings
    has_class_token, has_head = "cls" in shapes, "head/kernel" in shapes or "head/bias" in shapes
    if style.table is None:
        image = pair_of(asked.get("image_size")) or (224, 224)
        assumed["position"] = "position=sincos-2d: the file has no table of positions, as big_vision's fixed waves"
        assumed["image_size"] = f"image_size={image[0]}: the file does not tell"
    else:
        pixels = patch_height * step, patch_width * step
        grid, _ = find_grid(file.shape(style.table, 3)[1], (int(style.class_row),), asked, pixels)
        image = image_of(grid, pixels)
    return ViTConfig(
        width=width,
        depth=_depth(file, style),
        heads=query[-2],
        mlp_width=hidden[-1],
        patch_size=one_or_two((patch_height, patch_width)),
        image_size=one_or_two(image),
        channels=file.shape("conv_root/kernel", 4)[2] if stem else inputs,
        num_classes=file.shape("head/kernel", 2)[1] if has_head else 0,
        position="sincos-2d" if style.table is None else "learned",
        pool="map" if f"{style.map_prefix}probe" in shapes else "token" if has_class_token else "mean",
        class_token=has_class_token,
        representation=file.shape("pre_logits/kernel", 2)[1] if "pre_logits/kernel" in shapes else None,
        stem=stem,
    )


def _block_shape(file: TensorFile, suffix: str, sides: int) -> tuple[int, ...]:
    """The shape of a kernel in the first block."""
    pattern = re.compile(rf"Transformer/encoderblock(_0)?/{suffix}/kernel")
    for name in file.shapes:
        if pattern.fullmatch(name):
            return file.shape(name, sides)
    raise WeightsError(f"{file.path} has Google's patch embedding, but no Transformer/encoderblock_0/{suffix}.")


def _depth(file: TensorFile, style: Style) -> int:
    if style.scanned:
        return next(
            shape[0] if shape else 0
            for name, shape in file.shapes.items()
            if name.startswith("Transformer/encoderblock/")
        )
    return count_layers(file.shapes, "Transformer/encoderblock_", "/")


def find_stem(file: TensorFile) -> ResNetStem | None:
    if "conv_root/kernel" not in file.shapes:
        return None
    units: dict[int, set[str]] = {}
    for name in file.shapes:
        if match := re.match(r"block(\d+)/unit(\d+)/", name):
            units.setdefault(int(match[1]), set()).add(match[2])
    stages = tuple(len(units[stage]) for stage in sorted(units))
    return ResNetStem(stages=stages, width_factor=max(1, file.shape("conv_root/kernel", 4)[3] // 64))


# ---- writing ----

_GOOGLE = Style(old_numbers=True, scanned=False, table="Transformer/posembed_input/pos_embedding", class_row=True)
_BIG_VISION = Style(old_numbers=False, scanned=False, table="pos_embedding", class_row=False, dialect="big_vision")


def write(content: Content, path: Path) -> list[str]:
    """Google's own numbering is the published, old one, which every reader of these files knows."""
    is_big_vision = content.dialect == "big_vision"
    if is_big_vision and content.config.position == "sincos-2d" and content.config.position_at == "stem":
        style = replace(_BIG_VISION, table=None)
    else:
        content, style = content.with_learned_positions(), _BIG_VISION if is_big_vision else _GOOGLE
    config = content.config
    content.check_holds(
        activation=("gelu-tanh",),
        norm_eps=(1e-6,),
        attention=("full",),
        **PLAIN,
        representation_activation=("tanh",),
        pool=("token", "mean", "map") if is_big_vision else ("token", "mean"),
        class_token=(config.pool == "token",),
    )
    if config.stem is not None and not isinstance(config.stem, ResNetStem):
        raise WeightsError(f"The {content.dialect} layout cannot hold a convolutional stem.")
    prefix = "params/" if is_big_vision else ""
    write_npz(content.renamed(rules(config, style)), path, prefix)
    return []
