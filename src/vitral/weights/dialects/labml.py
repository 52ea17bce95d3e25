"""nn.labml.ai's Vision Transformer: a table of 5,000 positions of which the first 1 + N are used, and a head with a
ReLU layer. How many patches there are is not in the file, so the image size must be said."""

from collections.abc import Iterator
from typing import Any

from vitral.errors import WeightsError
from vitral.model.config import ViTConfig
from vitral.weights.checkpoint import google_preprocess
from vitral.weights.dialects.draft import Asked, Draft
from vitral.weights.dialects.rules import ROWS, Layout, Rule, pair, pairs, patches, rule, stacked_pair
from vitral.weights.dialects.shapes import find_sizes, one_or_two, pair_of, settle_heads
from vitral.weights.formats.tensor_file import TensorFile

_LAYER, _TABLE = "transformer_layers.", "pos_emb.positional_encodings"


def recognise(file: TensorFile) -> bool:
    return _TABLE in file.shapes and "patch_emb.conv.weight" in file.shapes


def read(file: TensorFile, asked: Asked) -> Draft:
    size = pair_of(asked.get("image_size"))
    if size is None:
        raise WeightsError(
            f"{file.path} is a labml checkpoint, whose table of {file.shape(_TABLE, 3)[0]} positions does not tell the "
            "size of the images.",
            hint="Say it: image_size=... (its experiment on CIFAR-10 has 32).",
        )
    assumed = {
        "activation": "activation=gelu: as in labml's experiment; the file does not tell",
        "preprocess": "preprocessing: mean and std 0.5, squashed to the size; the file does not tell",
    }
    fields: dict[str, Any] = dict(
        **find_sizes(file, "patch_emb.conv", _LAYER, "feed_forward.layer1"),
        image_size=one_or_two(size),
        num_classes=file.shape("classification.linear2.weight", 2)[0],
        representation=file.shape("classification.linear1.weight", 2)[0],
        representation_activation="relu",
        class_token=True,
        activation="gelu",
        norm_eps=1e-5,
    )
    settle_heads(fields, None, asked, assumed)
    config = ViTConfig(**fields)
    return Draft(
        dialect="labml",
        file=file,
        config=config,
        rules=list(rules(config)),
        preprocess=google_preprocess(config.image_hw).with_channels(config.channels),
        assumed=assumed,
    )


def rules(config: ViTConfig) -> Iterator[Rule]:
    used = 1 + config.table_grid[0] * config.table_grid[1]
    first_rows = Layout(read=lambda table: table[:used, 0], write=lambda table: table[:, None])
    yield from pair("patches.project", "patch_emb.conv", patches(config.channels, config.patch_hw))
    yield rule("class_token", "cls_token_emb", ROWS)
    yield rule("positions.0.table", _TABLE, first_rows)
    for index in range(config.depth):
        ours, theirs = f"blocks.{index}", f"{_LAYER}{index}"
        parts = tuple(f"{theirs}.self_attn.{part}.linear" for part in ("query", "key", "value"))
        yield from stacked_pair(f"{ours}.attention.to_qkv", parts)
        yield from pairs(ours, theirs, _BLOCK)
    yield from pair("norm", "ln")
    yield from pair("representation.0", "classification.linear1")
    yield from pair("head", "classification.linear2")


_BLOCK = {
    "norm1": "norm_self_attn",
    "attention.to_out": "self_attn.output",
    "norm2": "norm_ff",
    "mlp.expand": "feed_forward.layer1",
    "mlp.contract": "feed_forward.layer2",
}
