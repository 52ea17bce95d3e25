"""github.com/tczhangzhi/VisionTransformer-PyTorch: JAX's shapes under PyTorch's names, exact GELU, epsilon 1e-5."""

from collections.abc import Iterator

from vitral.model.config import ViTConfig
from vitral.weights.dialects import shapes
from vitral.weights.dialects.google import heads_bias, heads_first, heads_last
from vitral.weights.dialects.plan import LoadPlan, ModelSpec, Overrides, google_preprocess, unsupported
from vitral.weights.dialects.rules import ROWS, Rule, pair, pairs, patches, rule
from vitral.weights.formats.tensor_file import TensorFile

_LAYER, _TABLE = "transformer.encoder_layers.", "transformer.pos_embedding.pos_embedding"
_BLOCK = {"norm1": "norm1", "norm2": "norm2", "mlp.expand": "mlp.fc1", "mlp.contract": "mlp.fc2"}


def recognizes(file: TensorFile) -> bool:
    """Return whether the file has this repository's names."""
    return _TABLE in file.shapes and f"{_LAYER}0.attn.query.weight" in file.shapes


def plan(file: TensorFile, overrides: Overrides) -> LoadPlan:
    """Return the plan for a checkpoint of this repository."""
    if any(name.startswith("resnet.") for name in file.shapes):
        raise unsupported("tczhangzhi", "its ResNet stem differs from Google's")
    *_, height, width = file.shape("embedding.weight", 4)
    grid, _ = shapes.infer_grid(file.shape(_TABLE, 3)[1], (1,), overrides, (height, width))
    config = ViTConfig(
        **shapes.infer_sizes(file, "embedding", _LAYER, "mlp.fc1"),
        heads=file.shape(f"{_LAYER}0.attn.query.weight", 3)[1],
        image_size=shapes.image_size(grid, (height, width)),
        num_classes=file.shape("classifier.weight", 2)[0] if "classifier.weight" in file.shapes else 0,
        class_token=True,
        activation="gelu",
        norm_eps=1e-5,
    )
    preprocess = google_preprocess(config.image_hw).with_channels(config.channels)
    assumed = {"preprocess": "preprocessing: mean and std 0.5, squash to the size; the file does not state it"}
    spec = ModelSpec(config=config, preprocess=preprocess, assumed=assumed)
    return LoadPlan(dialect="tczhangzhi", file=file, spec=spec, rules=list(rules(config)))


def rules(config: ViTConfig) -> Iterator[Rule]:
    """Yield the rules of all tensors."""
    yield from pair("patches.project", "embedding", patches(config.channels, config.patch_hw))
    yield rule("class_token", "cls_token", ROWS)
    yield rule("positions.0.table", _TABLE, ROWS)
    for index in range(config.depth):
        ours, theirs = f"blocks.{index}", f"{_LAYER}{index}"
        qkv = tuple(f"{theirs}.attn.{name}" for name in ("query", "key", "value"))
        for kind, layout in (("weight", heads_last(config.heads, 3)), ("bias", heads_bias(config.heads, 3))):
            yield rule(f"{ours}.attention.to_qkv.{kind}", tuple(f"{name}.{kind}" for name in qkv), layout)
        yield from pair(f"{ours}.attention.to_out", f"{theirs}.attn.out", heads_first(config.heads))
        yield from pairs(ours, theirs, _BLOCK)
    yield from pair("norm", "transformer.norm")
    if config.num_classes:
        yield from pair("head", "classifier")
