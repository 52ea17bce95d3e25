"""A network by its name or its description: the paper's ViT, or the baseline that it is compared with."""

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
    """A model by its name in the paper, with the paper's initial values; a keyword is a field of ViTConfig, or, for the
    baselines (``bit-r50x1``), of BiTConfig.

    Names set sizes only. Rates such as dropout are 0 unless asked for: they belong to a training recipe."""
    return build(named_config(name, **overrides))


def build(config: Config) -> Network:
    return BiT(config) if isinstance(config, BiTConfig) else ViT(config)
