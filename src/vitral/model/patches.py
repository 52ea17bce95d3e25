"""From image to patch tokens: cut the image, or the feature map of a stem, into patches and project each linearly.

Other implementations write the projection as a convolution whose stride equals its kernel. A matrix product of
flattened patches gives the same numbers in a third to a half of the time on a CPU (docs/decisions/patch-embedding.md).

The stems are the convolutional networks of the paper's hybrids (section 3.1). The ResNet equals the reference
implementation: weight-standardized convolutions, GroupNorm, post-activation bottlenecks, and TensorFlow's SAME padding,
which is asymmetric and depends on the input size.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitral.model.config import NORM_GROUPS, ConvStem, ResNetStem, ViTConfig
from vitral.model.layers import Conv, Linear, lecun_normal_

Maps = Float[Tensor, "B _ _ _"]


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
        return tokens.to(self.project.weight.dtype)  # under autocast, the residual stream keeps full precision


def cut(maps: Float[Tensor, "B C H W"], patch_hw: tuple[int, int]) -> Float[Tensor, "B N C h w"]:
    """Cut images into patches, row by row."""
    height, width = patch_hw
    x = torch.unflatten(maps, 3, (-1, width))
    x = torch.unflatten(x, 2, (-1, height))  # (B, C, rows, height, columns, width)
    return x.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


def build_stem(config: ViTConfig) -> nn.Module | None:
    if isinstance(config.stem, ResNetStem):
        return ResNet(config.stem, config.channels)
    return None if config.stem is None else Convolutions(config.stem, config.channels)


class ResNet(nn.Module):
    """A root convolution, then stages of bottleneck units."""

    def __init__(self, stem: ResNetStem, channels: int):
        super().__init__()
        width = stem.root_width
        self.root = StandardizedConv(channels, width, 7, stride=2)
        self.root_norm = group_norm(width)
        self.stages = nn.ModuleList()
        inputs = width
        for stage, units in enumerate(stem.stages):
            middle, stride = width * 2**stage, 1 if stage == 0 else 2
            outputs = 4 * middle
            first = Bottleneck(inputs, middle, outputs, stride)
            rest = [Bottleneck(outputs, middle, outputs, 1) for _ in range(units - 1)]
            self.stages.append(nn.Sequential(first, *rest))
            inputs = outputs

    def forward(self, x: Maps) -> Maps:
        x = self.root_norm(self.root(x)).relu()
        x = F.max_pool2d(pad_same(x, 3, 2, value=float("-inf")), 3, 2)
        for stage in self.stages:
            x = stage(x)
        return x


class Bottleneck(nn.Module):
    """A residual unit: 1x1, 3x3, 1x1 convolutions, each with GroupNorm.

    The scale of the last norm starts at zero, so the unit starts as its shortcut."""

    def __init__(self, inputs: int, middle: int, outputs: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = StandardizedConv(inputs, middle, 1), group_norm(middle)
        self.conv2, self.norm2 = StandardizedConv(middle, middle, 3, stride=stride), group_norm(middle)
        self.conv3, self.norm3 = StandardizedConv(middle, outputs, 1), group_norm(outputs, ZeroGroupNorm)
        projects = inputs != outputs or stride != 1
        self.shortcut = StandardizedConv(inputs, outputs, 1, stride=stride) if projects else None
        self.shortcut_norm = group_norm(outputs) if projects else None

    def forward(self, x: Maps) -> Maps:
        shortcut = x
        if self.shortcut is not None and self.shortcut_norm is not None:
            shortcut = self.shortcut_norm(self.shortcut(x))
        x = self.norm1(self.conv1(x)).relu()
        x = self.norm2(self.conv2(x)).relu()
        x = self.norm3(self.conv3(x))
        return (x + shortcut).relu()


class StandardizedConv(Conv):
    """A convolution with SAME padding, whose kernels have mean 0 and standard deviation 1."""

    def forward(self, input: Maps) -> Maps:
        mean = self.weight.mean(dim=(1, 2, 3), keepdim=True)
        deviation = self.weight.std(dim=(1, 2, 3), keepdim=True, unbiased=False)
        weight = (self.weight - mean) / (deviation + 1e-5)
        return F.conv2d(pad_same(input, self.kernel_size[0], self.stride[0]), weight, stride=self.stride)


def pad_same(x: Maps, kernel: int, stride: int, value: float = 0.0) -> Maps:
    """Pad as TensorFlow's SAME: the output is ceil(size / stride), and an odd pixel goes to the right or bottom."""
    padding = [0, 0, 0, 0]  # left, right, top, bottom
    for axis, size in enumerate((x.shape[3], x.shape[2])):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        padding[2 * axis : 2 * axis + 2] = total // 2, total - total // 2
    return F.pad(x, padding, value=value) if any(padding) else x


class ZeroGroupNorm(nn.GroupNorm):
    """A GroupNorm whose scale starts at zero."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


def group_norm(channels: int, kind: type[nn.GroupNorm] = nn.GroupNorm) -> nn.GroupNorm:
    return kind(NORM_GROUPS, channels, eps=1e-6)


class Convolutions(nn.Sequential):
    """Stacked 3x3 stride-2 convolutions, each with a norm and ReLU. The patch projection is the final 1x1 convolution.

    With BatchNorm it equals torchvision's conv stem."""

    def __init__(self, stem: ConvStem, channels: int):
        layers: list[nn.Module] = []
        for inputs, outputs in zip((channels, *stem.widths[:-1]), stem.widths, strict=True):
            norm = nn.BatchNorm2d(outputs) if stem.norm == "batch" else nn.GroupNorm(outputs // 8, outputs)
            layers.append(nn.Sequential(Conv(inputs, outputs, 3, stride=2, padding=1), norm, nn.ReLU()))
        super().__init__(*layers)
