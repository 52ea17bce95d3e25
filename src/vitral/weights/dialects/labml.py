"""nn.labml.ai's Vision Transformer: a table of 5,000 positions whose first 1 + N rows are used, and a head with ReLU.

The file does not state the number of patches, so the caller must pass the image size.
"""

from collections.abc import Iterator
from typing import Any

from vitral.errors import WeightsError
from vitral.model.config import ViTConfig
from vitral.weights.dialects import shapes
from vitral.weights.dialects.plan import LoadPlan, ModelSpec, Overrides, google_preprocess
from vitral.weights.dialects.rules import ROWS, Layout, Rule, pair, pairs, patches, rule
from vitral.weights.formats.tensor_file import TensorFile

_LAYER, _TABLE = "transformer_layers.", "pos_emb.positional_encodings"
_BLOCK = {
    "attention.to_qkv": tuple(f"self_attn.{name}.linear" for name in ("query", "key", "value")),
    "norm1": "norm_self_attn",
    "attention.to_out": "self_attn.output",
    "norm2": "norm_ff",
    "mlp.expand": "feed_forward.layer1",
    "mlp.contract": "feed_forward.layer2",
}


def recognizes(file: TensorFile) -> bool:
    """Return whether the file has labml's position table and patch embedding."""
    return _TABLE in file.shapes and "patch_emb.conv.weight" in file.shapes


def plan(file: TensorFile, overrides: Overrides) -> LoadPlan:
    """Return the plan for a labml checkpoint."""
    size = shapes.as_pair(overrides.get("image_size"))
    if size is None:
        raise WeightsError(
            f"{file.name} is a labml checkpoint, which does not state its image size: its position table has "
            f"{file.shape(_TABLE, 3)[0]} rows for any size.",
            hint="Pass image_size=... (32 in labml's CIFAR-10 experiment).",
        )
    assumed = {
        "activation": "activation=gelu: as in labml's experiment; the file does not state it",
        "preprocess": "preprocessing: mean and std 0.5, squash to the size; the file does not state it",
    }
    fields: dict[str, Any] = dict(
        **shapes.infer_sizes(file, "patch_emb.conv", _LAYER, "feed_forward.layer1"),
        image_size=shapes.as_size(size),
        num_classes=file.shape("classification.linear2.weight", 2)[0],
        representation=file.shape("classification.linear1.weight", 2)[0],
        representation_activation="relu",
        class_token=True,
        activation="gelu",
        norm_eps=1e-5,
    )
    shapes.add_heads(fields, None, overrides, assumed)
    config = ViTConfig(**fields)
    preprocess = google_preprocess(config.image_hw).with_channels(config.channels)
    spec = ModelSpec(config=config, preprocess=preprocess, assumed=assumed)
    return LoadPlan(dialect="labml", file=file, spec=spec, rules=list(rules(config)))


def rules(config: ViTConfig) -> Iterator[Rule]:
    """Yield the rules of all tensors."""
    used = 1 + config.table_grid[0] * config.table_grid[1]
    first_rows = Layout(read=lambda table: table[:used, 0], write=lambda table: table[:, None])
    yield from pair("patches.project", "patch_emb.conv", patches(config.channels, config.patch_hw))
    yield rule("class_token", "cls_token_emb", ROWS)
    yield rule("positions.0.table", _TABLE, first_rows)
    for index in range(config.depth):
        yield from pairs(f"blocks.{index}", f"{_LAYER}{index}", _BLOCK)
    yield from pair("norm", "ln")
    yield from pair("representation.0", "classification.linear1")
    yield from pair("head", "classification.linear2")
