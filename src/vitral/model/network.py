"""Build a network from its name or its config: the paper's ViT, or the BiT that it is compared with."""

from typing import Any, Literal, overload

from vitral.model.bit import BiT
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.model.sizes import named_config
from vitral.model.vit import ViT

Config = ViTConfig | BiTConfig
Network = ViT | BiT

Baseline = Literal[
    "bit-r26x1", "bit-r50x1", "bit-r50x2", "bit-r50x3", "bit-r101x1", "bit-r101x3", "bit-r152x1", "bit-r152x2",
    "bit-r152x4", "bit-r200x3",
]  # fmt: skip


@overload
def create(name: Baseline, **overrides: Any) -> BiT: ...  # pyright: ignore[reportOverlappingOverload]
@overload
def create(name: str, **overrides: Any) -> ViT: ...
def create(name: str, **overrides: Any) -> Network:
    """Create a model by name, with the paper's initial values.

    Keywords are fields of ViTConfig, or of BiTConfig for names such as `bit-r50x1`. A name sets sizes only: dropout and
    stochastic depth are 0 by default, because they belong to a training recipe.

        vitral.create("vit-b16", num_classes=10, image_size=384)
    """
    return build(named_config(name, **overrides))


def build(config: Config) -> Network:
    """Return the network that a config describes, with the paper's initial values."""
    return BiT(config) if isinstance(config, BiTConfig) else ViT(config)
