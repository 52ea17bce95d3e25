"""github.com/tczhangzhi/VisionTransformer-PyTorch: JAX's shapes under PyTorch's names; exact GELU, epsilon 1e-5."""

from collections.abc import Iterator

from vitral.model.config import ViTConfig
from vitral.weights.checkpoint import google_preprocess
from vitral.weights.dialects.draft import Asked, Draft, refuse
from vitral.weights.dialects.rules import ROWS, Rule, heads_bias, heads_first, heads_last, pair, pairs, patches, rule
from vitral.weights.dialects.shapes import find_grid, find_sizes, image_of, one_or_two
from vitral.weights.formats.tensor_file import TensorFile

_LAYER, _TABLE = "transformer.encoder_layers.", "transformer.pos_embedding.pos_embedding"


def recognise(file: TensorFile) -> bool:
    return _TABLE in file.shapes and f"{_LAYER}0.attn.query.weight" in file.shapes


def read(file: TensorFile, asked: Asked) -> Draft:
    if any(name.startswith("resnet.") for name in file.shapes):
        raise refuse("tczhangzhi", "its ResNet stem is another one than Google's")
    *_, height, across = file.shape("embedding.weight", 4)
    grid, _ = find_grid(file.shape(_TABLE, 3)[1], (1,), asked, (height, across))
    config = ViTConfig(
        **find_sizes(file, "embedding", _LAYER, "mlp.fc1"),
        heads=file.shape(f"{_LAYER}0.attn.query.weight", 3)[1],
        image_size=one_or_two(image_of(grid, (height, across))),
        num_classes=file.shape("classifier.weight", 2)[0] if "classifier.weight" in file.shapes else 0,
        class_token=True,
        activation="gelu",
        norm_eps=1e-5,
    )
    return Draft(
        dialect="tczhangzhi",
        file=file,
        config=config,
        rules=list(rules(config)),
        preprocess=google_preprocess(config.image_hw).with_channels(config.channels),
        assumed={"preprocess": "preprocessing: mean and std 0.5, squashed to the size; the file does not tell"},
    )


def rules(config: ViTConfig) -> Iterator[Rule]:
    yield from pair("patches.project", "embedding", patches(config.channels, config.patch_hw))
    yield rule("class_token", "cls_token", ROWS)
    yield rule("positions.0.table", _TABLE, ROWS)
    for index in range(config.depth):
        ours, theirs = f"blocks.{index}", f"{_LAYER}{index}"
        parts = tuple(f"{theirs}.attn.{part}" for part in ("query", "key", "value"))
        weights, biases = (tuple(f"{part}.{kind}" for part in parts) for kind in ("weight", "bias"))
        yield rule(f"{ours}.attention.to_qkv.weight", weights, heads_last(config.heads, 3))
        yield rule(f"{ours}.attention.to_qkv.bias", biases, heads_bias(config.heads, 3))
        yield from pair(f"{ours}.attention.to_out", f"{theirs}.attn.out", heads_first(config.heads))
        yield from pairs(ours, theirs, _BLOCK)
    yield from pair("norm", "transformer.norm")
    if config.num_classes:
        yield from pair("head", "classifier")


_BLOCK = {"norm1": "norm1", "norm2": "norm2", "mlp.expand": "mlp.fc1", "mlp.contract": "mlp.fc2"}
