"""A curated table of published checkpoints that vitral loads by a short name, such as dinov2-s14.

Accuracies are on ImageNet-1k and copied from the source that each row names; vitral did not measure them. Parameters
and operations are computed from the config.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vitral.errors import DataError
from vitral.model.config import ViTConfig
from vitral.model.cost import count_cost
from vitral.model.sizes import NAMES


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A publication that states accuracies, and how it measured them."""

    protocol: str
    """How the accuracy was measured."""
    address: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Pretrained:
    """A published checkpoint."""

    name: str
    """Short name, which works wherever a MODEL is taken."""
    repository: str
    """owner/name on the Hugging Face hub."""
    config: ViTConfig
    """The network, as far as its cost depends on it."""
    dialect: str
    """Dialect of the file, as `vitral describe` reports it."""
    license: str
    top1: float | None
    """Published accuracy on ImageNet-1k, from 0 to 1."""
    source: Source

    @property
    def hub(self) -> str:
        """Return the name that the hub knows, as a MODEL."""
        return f"hf:{self.repository}"

    def as_dict(self, image_size: tuple[int, int] | None = None) -> dict[str, Any] | None:
        """Return the row as plain values, or None if the patch size does not divide the image size."""
        size = image_size or self.config.image_hw
        try:
            cost = count_cost(self.config, size)
        except DataError:
            return None
        return {
            "name": self.name,
            "hub": self.hub,
            "parameters": cost.parameters,
            "patch_size": self.config.patch_hw,
            "image_size": size,
            "forward_flops": cost.forward_flops,
            "num_classes": self.config.num_classes,
            "dialect": self.dialect,
            "license": self.license,
            "top1": self.top1,
            "protocol": self.source.protocol,
            "source": self.source.address,
        }


TIMM = Source(
    protocol="these weights, which are fine-tuned on ImageNet-1k",
    address="https://github.com/huggingface/pytorch-image-models/blob/main/results/results-imagenet.csv",
)
PAPER = Source(protocol="fine-tuned on ImageNet-1k at 384 px", address="https://arxiv.org/abs/2010.11929, table 5")
DINOV2 = Source(protocol="linear probe", address="https://github.com/facebookresearch/dinov2")
DINO = Source(protocol="linear probe", address="https://github.com/facebookresearch/dino")
MAE = Source(protocol="fine-tuned on ImageNet-1k", address="https://github.com/facebookresearch/mae")
SIGLIP2 = Source(
    protocol="zero-shot, with the text tower",
    address="https://github.com/google-research/big_vision/blob/main/big_vision/configs/proj/image_text/README_siglip2.md",
)


def _family(
    rows: dict[str, tuple[str, float]], source: Source, dialect: str, license: str = "apache-2.0", **fields: Any
) -> Iterator[Pretrained]:
    """Yield rows of one family, from name: (repository, top-1 in percent). A name ends in size and patch: -s14."""
    for name, (repository, percent) in rows.items():
        network = f"vit-{name.removesuffix('-in21k').rpartition('-')[2]}"
        yield Pretrained(
            name=name,
            repository=repository,
            config=ViTConfig(**{**NAMES[network], "num_classes": 0, **fields}),
            dialect=dialect,
            license=license,
            top1=round(percent / 100, 5),
            source=source,
        )


_AUGREG = {
    "augreg-ti16": ("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", 75.452),
    "augreg-s16": ("timm/vit_small_patch16_224.augreg_in21k_ft_in1k", 81.402),
    "augreg-b32": ("timm/vit_base_patch32_224.augreg_in21k_ft_in1k", 80.732),
    "augreg-b16": ("timm/vit_base_patch16_224.augreg_in21k_ft_in1k", 84.534),
    "augreg-l16": ("timm/vit_large_patch16_224.augreg_in21k_ft_in1k", 85.856),
}
_PAPER = {
    "vit-b16-in21k": ("google/vit-base-patch16-224-in21k", 83.97),
    "vit-l16-in21k": ("google/vit-large-patch16-224-in21k", 85.15),
}
_DEIT3 = {
    "deit3-s16": ("timm/deit3_small_patch16_224.fb_in22k_ft_in1k", 83.082),
    "deit3-b16": ("timm/deit3_base_patch16_224.fb_in22k_ft_in1k", 85.728),
    "deit3-l16": ("timm/deit3_large_patch16_224.fb_in22k_ft_in1k", 86.990),
}
_DINOV2 = {
    "dinov2-s14": ("facebook/dinov2-small", 81.1),
    "dinov2-b14": ("facebook/dinov2-base", 84.5),
    "dinov2-l14": ("facebook/dinov2-large", 86.3),
}
_DINOV2_REGISTERS = {
    "dinov2-reg-s14": ("timm/vit_small_patch14_reg4_dinov2.lvd142m", 80.9),
    "dinov2-reg-b14": ("timm/vit_base_patch14_reg4_dinov2.lvd142m", 84.6),
    "dinov2-reg-l14": ("timm/vit_large_patch14_reg4_dinov2.lvd142m", 86.7),
}
_DINO = {
    "dino-s16": ("timm/vit_small_patch16_224.dino", 77.0),
    "dino-b16": ("timm/vit_base_patch16_224.dino", 78.2),
}
_MAE = {
    "mae-b16": ("timm/vit_base_patch16_224.mae", 83.6),
    "mae-l16": ("timm/vit_large_patch16_224.mae", 85.9),
}
_SIGLIP2 = {"siglip2-b16": ("timm/vit_base_patch16_siglip_224.v2_webli", 78.2)}
_SIGLIP2_256 = {"siglip2-l16": ("timm/vit_large_patch16_siglip_256.v2_webli", 82.5)}

_FAMILIES = (
    _family(_DINOV2, DINOV2, "dinov2", image_size=518, layer_scale=1e-5),
    _family(_DINOV2_REGISTERS, DINOV2, "timm", image_size=518, layer_scale=1e-5, registers=4),
    _family(_AUGREG, TIMM, "timm", num_classes=1000),
    _family(_DEIT3, TIMM, "timm", num_classes=1000, layer_scale=1e-5),
    _family(_PAPER, PAPER, "huggingface"),
    _family(_DINO, DINO, "timm"),
    _family(_MAE, MAE, "timm", license="cc-by-nc-4.0"),
    _family(_SIGLIP2, SIGLIP2, "timm", pool="map"),
    _family(_SIGLIP2_256, SIGLIP2, "timm", pool="map", image_size=256),
)
PRETRAINED = {row.name: row for family in _FAMILIES for row in family}


def recommend(device: str) -> tuple[str, str]:
    """Return the checkpoint to start from on a device such as cpu or cuda:1, and the reason."""
    kind = device.partition(":")[0]
    name, purpose = ("dinov2-s14", "small enough for a CPU") if kind == "cpu" else ("dinov2-b14", "for a GPU")
    row = PRETRAINED[name]
    millions = count_cost(row.config).parameters / 1e6
    return (
        name,
        f"recommended {purpose}: {millions:.0f} M parameters, {row.top1:.1%} on ImageNet by {row.source.protocol}",
    )
