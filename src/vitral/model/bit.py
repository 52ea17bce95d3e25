"""BiT: the ResNets that the paper compares with ("Big Transfer", Kolesnikov et al. 2020), on one page.

    image -> root -> four stages of pre-activation bottlenecks -> norm -> mean -> head -> logits

Weight standardisation and GroupNorm instead of BatchNorm, so an answer never depends on its batch. Its face is that of
ViT (``config``, ``features``, ``head``), and so it trains, evaluates and predicts through the same commands.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitral.errors import ConfigError
from vitral.model.bit_config import BiTConfig
from vitral.model.features import Features
from vitral.model.initialize import Linear, constant_, initialize, lecun_normal_
from vitral.model.layers import ByLayer
from vitral.model.packing import check_images, stack_by_size

Images = Float[Tensor, "B C H W"] | Sequence[Float[Tensor, "C _ _"]]
Maps = Float[Tensor, "B _ _ _"]


class BiT(nn.Module):
    """A ResNet-v2, as its BiTConfig describes it."""

    def __init__(self, config: BiTConfig):
        if not isinstance(config, BiTConfig):
            raise ConfigError(f"BiT takes a BiTConfig, and this is {config!r}.", hint="A name goes to vitral.create.")
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False  # True: keep only what enters each unit, compute the rest again backwards

        width = 64 * config.width_factor
        self.root = StandardisedConv(config.channels, width, 7, stride=2, padding=3)
        self.blocks = nn.ModuleList(build_units(config, width))
        self.norm = group_norm(config.width)
        self.representation = nn.Identity()
        self.head = build_head(config)

    def forward(self, images: Images) -> Float[Tensor, "B K"]:
        """(B, C, H, W), or a list of (C, H, W) of any sizes -> logits (B, K)."""
        if not isinstance(images, Tensor):
            stacks, order = stack_by_size(images, self.config, self.root.weight)
            logits = torch.cat([self.forward(stack) for stack in stacks])
            return logits[torch.tensor(order, device=logits.device).argsort()]
        return self.head(self.encode(images).mean(dim=(2, 3)))

    def encode(self, images: Float[Tensor, "B C H W"]) -> Maps:
        """The last feature map, a thirty-second of the image's sides."""
        check_images(images, self.config.channels, self.root.weight, axes=4)
        x = self.root(images)
        x = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, stride=2)  # padded with zeros, as in the published networks
        for unit in self.blocks:
            wanted = self.gradient_checkpointing and torch.is_grad_enabled()
            x = checkpoint(unit, x, use_reentrant=False) if wanted else unit(x)
        return self.norm(x).relu()

    def features(self, images: Images, layers: int | Iterable[int] = ()) -> Any:
        """The cells of the last feature map as patches, and their mean; a list of images gives a list of Features."""
        if layers not in ((), []):
            raise ConfigError(f"layers={layers!r}: a BiT has no layers of tokens, only its last feature map.")
        if not isinstance(images, Tensor):
            stacks, order = stack_by_size(images, self.config, self.root.weight)
            found = dict(zip(order, (one for stack in stacks for one in self.encode(stack)), strict=True))
            return [as_features(found[number][None]) for number in range(len(order))]
        return as_features(self.encode(images))


def as_features(maps: Maps) -> Features:
    """The cells of the feature map as patches, and their mean."""
    patches = maps.flatten(2).mT  # (B, D, rows, columns) -> (B, N, D)
    none = patches[:, :0]
    grid = (maps.shape[2], maps.shape[3])
    pooled = maps.mean(dim=(2, 3))
    return Features(cls=None, registers=none, patches=patches, grid=grid, pooled=pooled, layers=ByLayer({}, depth=0))


class Unit(nn.Module):
    """A residual unit: norm and ReLU come before each convolution (He et al. 2016), the projection after the first."""

    def __init__(self, inputs: int, middle: int, outputs: int, stride: int):
        super().__init__()
        self.norm1, self.conv1 = group_norm(inputs), StandardisedConv(inputs, middle, 1)
        self.norm2, self.conv2 = group_norm(middle), StandardisedConv(middle, middle, 3, stride=stride, padding=1)
        self.norm3, self.conv3 = group_norm(middle), StandardisedConv(middle, outputs, 1)
        changes = inputs != outputs or stride != 1
        self.shortcut = StandardisedConv(inputs, outputs, 1, stride=stride) if changes else None

    def forward(self, x: Maps) -> Maps:
        y = self.norm1(x).relu()
        shortcut = x if self.shortcut is None else self.shortcut(y)
        y = self.conv1(y)
        y = self.conv2(self.norm2(y).relu())
        y = self.conv3(self.norm3(y).relu())
        return y + shortcut


def build_units(config: BiTConfig, width: int) -> Iterable[Unit]:
    """Each stage doubles the width; all but the first halve the size in their first unit."""
    inputs = width
    for stage, units in enumerate(config.stages):
        middle = width * 2**stage
        for unit in range(units):
            yield Unit(inputs, middle, 4 * middle, stride=2 if stage and unit == 0 else 1)
            inputs = 4 * middle


class StandardisedConv(nn.Conv2d):
    """Convolution with a weight of mean 0 and variance 1 in every output channel, no bias."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0):
        super().__init__(inputs, outputs, kernel, stride, padding, bias=False)

    def reset_parameters(self) -> None:
        initialize(self.weight, lecun_normal_)

    def forward(self, input: Maps) -> Maps:
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, unbiased=False)
        weight = (self.weight - mean) * torch.rsqrt(variance + 1e-10)
        return F.conv2d(input, weight, stride=self.stride, padding=self.padding)


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-5)


def build_head(config: BiTConfig) -> nn.Module:
    if config.num_classes == 0:
        return nn.Identity()
    return Linear(config.width, config.num_classes, weight=nn.init.zeros_, bias=constant_(config.head_bias))
