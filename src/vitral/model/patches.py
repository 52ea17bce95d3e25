"""From image to patch tokens: cut the image, or the feature map of a stem, into patches and map each linearly.

The other implementations write this as a convolution whose stride is its kernel. As a matrix product of flattened
patches it is the same numbers and, on a CPU, a third to a half of the time (docs/decisions/patch-embedding.md).
"""

from jaxtyping import Float
from torch import Tensor, nn

from vitral.model.config import ViTConfig
from vitral.model.initialize import Linear, lecun_normal_
from vitral.model.stems import build_stem


class Patches(nn.Module):
    """Equation 1 of the paper: x_p E, for every patch."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.patch_hw = config.patch_hw
        self.stem = build_stem(config)
        height, width = config.patch_hw
        self.project = Linear(config.patch_channels * height * width, config.width, weight=lecun_normal_)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N D"]:
        tokens = self.project(cut(images if self.stem is None else self.stem(images), self.patch_hw).flatten(2))
        return tokens.to(self.project.weight.dtype)  # under autocast: the sum of all blocks keeps full precision


def cut(maps: Float[Tensor, "B C H W"], patch_hw: tuple[int, int]) -> Float[Tensor, "B N C h w"]:
    """Patches in reading order."""
    height, width = patch_hw
    x = maps.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # (B, C, rows, height, columns, width)
    return x.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
