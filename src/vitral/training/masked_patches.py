"""Masked patch prediction (appendix B.1.2): half of the patch embeddings are corrupted, and the network says what
colours were there.

    pixels -> targets of every patch          images -> patch embeddings -> corrupted -> encoder -> predictions
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn

from vitral.errors import ConfigError
from vitral.model.config import ViTConfig
from vitral.model.initialize import Linear
from vitral.model.packing import arrange
from vitral.model.patches import cut
from vitral.model.vit import ViT
from vitral.training.masking import Masking

LEVELS = 8
"""Of each channel: 3 bits."""
SMALL = 4
"""Side of the downsized patch."""


class Corruption(NamedTuple):
    """What happens to the patch embeddings of a batch."""

    asked: Int[Tensor, "B M"]
    """Which are corrupted, and so asked about; some of them keep their embedding."""
    masked: Bool[Tensor, "B N"]
    source: Int[Tensor, "B N"]
    """The patch whose embedding each one gets: itself, unless it was swapped."""

    def part(self, share: slice) -> "Corruption":
        return Corruption(self.asked[share], self.masked[share], self.source[share])

    def to(self, device: torch.device) -> "Corruption":
        return Corruption(self.asked.to(device), self.masked.to(device), self.source.to(device))

    def of_asked(self, values: Tensor) -> Tensor:
        """(B, N, ...) -> (B, M, ...)."""
        return values[torch.arange(len(values), device=values.device)[:, None], self.asked]


def draw_corruption(images: int, patches: int, how: Masking, generator: torch.Generator) -> Corruption:
    """The same number of patches in every picture, anywhere; swapped ones get another patch of their picture."""
    order = torch.rand(images, patches, generator=generator).argsort(dim=1)
    asked = order[:, : how.number_of(patches)].sort(dim=1).values
    chosen = torch.zeros(images, patches, dtype=torch.bool).scatter(1, asked, True)
    kind = torch.rand(images, patches, generator=generator)
    further = torch.randint(1, max(2, patches), (images, patches), generator=generator)
    swapped = chosen & (kind >= how.masked) & (kind < how.masked + how.swapped)
    own = torch.arange(patches).expand(images, -1)
    return Corruption(asked, chosen & (kind < how.masked), torch.where(swapped, (own + further) % patches, own))


class MaskedPatches(nn.Module):
    """The mask embedding and the head that only this objective needs."""

    def __init__(self, config: ViTConfig, how: Masking):
        super().__init__()
        if config.channels > 3 and how.target != "pixels":
            raise ConfigError(
                f"masking.target={how.target!r} is about colours, and these pictures have {config.channels} bands.",
                hint="Use masking.target=pixels.",
            )
        self.how, self.channels = how, config.channels
        rows, columns = config.grid(*config.image_hw)
        self.cell = config.image_hw[0] // rows, config.image_hw[1] // columns
        if (rows * self.cell[0], columns * self.cell[1]) != config.image_hw:  # a stem rounds up where it halves
            height, width = config.image_hw
            patch = config.shrink * config.patch_hw[0], config.shrink * config.patch_hw[1]
            raise ConfigError(
                f"objective='masked-patches' cuts pictures into equal cells, and {height} x {width} pixels cannot be "
                f"cut into the {rows} x {columns} of this stem.",
                hint=f"Use an image_size of multiples of {patch[0]} x {patch[1]}.",
            )
        if how.target == "small-patch" and min(self.cell) < SMALL:
            raise ConfigError(
                f"masking.target='small-patch' makes {SMALL} x {SMALL} parts of a patch, and patches here have "
                f"{self.cell[0]} x {self.cell[1]} pixels.",
                hint="Use masking.target=mean-colour.",
            )
        colours = LEVELS**config.channels
        outputs = {
            "mean-colour": colours,
            "small-patch": SMALL**2 * colours,
            "pixels": config.channels * self.cell[0] * self.cell[1],
        }[how.target]
        self.mask = nn.Parameter(torch.zeros(config.width))
        self.head = Linear(config.width, outputs, weight=nn.init.zeros_)
        nn.init.normal_(self.mask, std=0.02)

    def predict(self, model: ViT, images: Float[Tensor, "B C H W"], corruption: Corruption) -> Float[Tensor, "B M _"]:
        """What the network says about the patches that it is asked about."""
        (stack,), packing = arrange(images, model.config, weight=model.patches.project.weight)
        x = model.patches(stack)
        x = x.gather(1, corruption.source[..., None].expand_as(x))
        x = torch.where(corruption.masked[..., None], self.mask.to(x.dtype), x)
        x, _ = model.encode(model.place([x], packing), packing)
        if model.config.norm_after_pool:  # which leaves the norm to what comes behind
            x = model.norm(x)
        return self.head(corruption.of_asked(x[:, model.config.extra_tokens :]))

    def targets(self, pixels: UInt8[Tensor, "B C H W"], images: Float[Tensor, "B C H W"]) -> Tensor:
        """mean-colour: (B, N) classes; small-patch: (B, N, 16) classes; pixels: (B, N, C * h * w) normalised values."""
        if self.how.target == "pixels":
            return cut(images, self.cell).flatten(2)
        patches = cut(pixels.float() / 255, self.cell)
        if self.how.target == "mean-colour":
            return quantise(patches.mean(dim=(3, 4)))
        small = F.adaptive_avg_pool2d(patches.flatten(0, 1), SMALL).unflatten(0, patches.shape[:2])
        return quantise(small.flatten(3).mT)  # (B, N, C, 16) -> (B, N, 16, C)

    def loss(self, predictions: Float[Tensor, "B M _"], targets: Tensor) -> Tensor:
        """Mean over the patches that were asked about."""
        if self.how.target == "pixels":
            return F.mse_loss(predictions.float(), targets)
        return F.cross_entropy(self.by_colour(predictions.float()).flatten(0, -2), targets.flatten())

    def right(self, predictions: Float[Tensor, "B M _"], targets: Tensor) -> Tensor:
        """Of the colours that were asked for, which were found; of pixels none is right or wrong."""
        if self.how.target == "pixels":
            return torch.zeros(0)
        return (self.by_colour(predictions).argmax(-1) == targets).flatten()

    def by_colour(self, predictions: Float[Tensor, "... _"]) -> Tensor:
        """(..., 512), or (..., 16, 512) for the parts of a small patch."""
        return predictions if self.how.target == "mean-colour" else predictions.unflatten(-1, (SMALL**2, -1))


def quantise(colours: Float[Tensor, "... C"]) -> Int[Tensor, "..."]:
    """Values from 0 to 1 -> one class: 64 r + 8 g + b, each of eight equal bins."""
    bins = (colours * LEVELS).long().clamp(0, LEVELS - 1)
    return (bins * _place_values(colours.shape[-1], colours.device)).sum(-1)


def colour_of(classes: Int[Tensor, "..."], channels: int) -> Float[Tensor, "... C"]:
    """The middle of the bins of a class, from 0 to 1."""
    return (classes[..., None] // _place_values(channels, classes.device) % LEVELS + 0.5) / LEVELS


def _place_values(channels: int, device: torch.device) -> Int[Tensor, "C"]:
    """64, 8, 1 for three channels."""
    return LEVELS ** torch.arange(channels - 1, -1, -1, device=device)
