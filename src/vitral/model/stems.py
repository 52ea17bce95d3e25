"""Stems: convolutional networks whose feature map takes the place of the image (the paper's hybrids, section 3.1).

The ResNet is that of the reference implementation, to the letter: weight-standardised convolutions, GroupNorm,
post-activation bottlenecks, and TensorFlow's SAME padding, which is asymmetric and follows the actual size.
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitral.model.config import ConvStem, ResNetStem, ViTConfig
from vitral.model.initialize import initialize, lecun_normal_

Maps = Float[Tensor, "B _ _ _"]


def build_stem(config: ViTConfig) -> nn.Module | None:
    match config.stem:
        case ResNetStem() as stem:
            return ResNet(stem, config.channels)
        case ConvStem() as stem:
            return Convolutions(stem, config.channels)
    return None


class ResNet(nn.Module):
    """Root, then stages of bottleneck units."""

    def __init__(self, stem: ResNetStem, channels: int):
        super().__init__()
        width = 64 * stem.width_factor
        self.root = StandardisedConv(channels, width, 7, stride=2)
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
    """A residual unit: 1x1, 3x3, 1x1, each with GroupNorm; the last norm starts at zero, so the unit starts silent."""

    def __init__(self, inputs: int, middle: int, outputs: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = StandardisedConv(inputs, middle, 1), group_norm(middle)
        self.conv2, self.norm2 = StandardisedConv(middle, middle, 3, stride=stride), group_norm(middle)
        self.conv3, self.norm3 = StandardisedConv(middle, outputs, 1), group_norm(outputs, scale=0.0)
        changes = inputs != outputs or stride != 1
        self.shortcut = StandardisedConv(inputs, outputs, 1, stride=stride) if changes else None
        self.shortcut_norm = group_norm(outputs) if changes else None

    def forward(self, x: Maps) -> Maps:
        shortcut = x
        if self.shortcut is not None and self.shortcut_norm is not None:
            shortcut = self.shortcut_norm(self.shortcut(x))
        x = self.norm1(self.conv1(x)).relu()
        x = self.norm2(self.conv2(x)).relu()
        x = self.norm3(self.conv3(x))
        return (x + shortcut).relu()


class StandardisedConv(nn.Conv2d):
    """Convolution with a weight of mean 0 and standard deviation 1 in every output channel, no bias, SAME padding."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1):
        super().__init__(inputs, outputs, kernel, stride, bias=False)

    def reset_parameters(self) -> None:
        initialize(self.weight, lecun_normal_)

    def forward(self, input: Maps) -> Maps:
        mean = self.weight.mean(dim=(1, 2, 3), keepdim=True)
        deviation = self.weight.std(dim=(1, 2, 3), keepdim=True, unbiased=False)
        weight = (self.weight - mean) / (deviation + 1e-5)
        return F.conv2d(pad_same(input, self.kernel_size[0], self.stride[0]), weight, stride=self.stride)


def pad_same(x: Maps, kernel: int, stride: int, value: float = 0.0) -> Maps:
    """TensorFlow's SAME: output size is the input's divided by the stride, rounded up; the odd pixel goes behind."""
    padding = [0, 0, 0, 0]  # left, right, top, bottom
    for axis, size in enumerate((x.shape[3], x.shape[2])):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        padding[2 * axis : 2 * axis + 2] = total // 2, total - total // 2
    return F.pad(x, padding, value=value) if any(padding) else x


class GroupNorm(nn.GroupNorm):
    """GroupNorm with a chosen initial scale."""

    def __init__(self, groups: int, channels: int, eps: float, scale: float):
        self._scale = scale
        super().__init__(groups, channels, eps=eps)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self._scale)
        nn.init.zeros_(self.bias)


def group_norm(channels: int, scale: float = 1.0) -> GroupNorm:
    return GroupNorm(32, channels, eps=1e-6, scale=scale)


class Convolutions(nn.Sequential):
    """Stacked 3x3 stride-2 convolutions, each with a norm and ReLU; the 1x1 map to tokens follows as the patch
    projection. With BatchNorm it is torchvision's conv stem."""

    def __init__(self, stem: ConvStem, channels: int):
        layers: list[nn.Module] = []
        for inputs, outputs in zip((channels, *stem.widths[:-1]), stem.widths, strict=True):
            norm = nn.BatchNorm2d(outputs) if stem.norm == "batch" else nn.GroupNorm(outputs // 8, outputs)
            layers.append(nn.Sequential(PlainConv(inputs, outputs), norm, nn.ReLU()))
        super().__init__(*layers)


class PlainConv(nn.Conv2d):
    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, 3, stride=2, padding=1, bias=False)

    def reset_parameters(self) -> None:
        initialize(self.weight, lecun_normal_)
