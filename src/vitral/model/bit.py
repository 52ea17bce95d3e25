"""BiT: the ResNets that the paper compares with ("Big Transfer", Kolesnikov et al. 2020), on one page.

    image -> root -> four stages of pre-activation bottlenecks -> norm -> mean -> head -> logits

Weight standardization and GroupNorm replace BatchNorm, so predictions never depend on the batch. BiT has the interface
of ViT (`config`, `features`, `head`), so the same commands train, evaluate and run it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast, overload

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from vitral.errors import ConfigError, check_type
from vitral.model.bit_config import BiTConfig
from vitral.model.config import NORM_GROUPS
from vitral.model.features import ByLayer, Features, Tokens
from vitral.model.layers import Conv
from vitral.model.packing import check_images, stack_by_size
from vitral.model.parameter_groups import optimizer_groups
from vitral.model.pool import build_head

Images = Float[Tensor, "B C H W"] | Sequence[Float[Tensor, "C _ _"]]
Maps = Float[Tensor, "B _ _ _"]


class BiT(nn.Module):
    """A ResNet-v2, described by its BiTConfig."""

    def __init__(self, config: BiTConfig):
        check_type("config", config, BiTConfig, hint="Pass names to vitral.create.")
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False  # True: store only the input of each unit, and recompute the rest

        self.root = StandardizedConv(config.channels, config.root_width, 7, stride=2, padding=3)
        self.blocks = nn.ModuleList(build_units(config))
        self.norm = group_norm(config.width)
        self.representation = nn.Identity()
        self.head = build_head(config)

    def forward(self, images: Images) -> Float[Tensor, "B K"]:
        """Return logits (B, K) for (B, C, H, W), or for a list of (C, H, W) of any sizes."""
        if not isinstance(images, Tensor):
            stacks, order = stack_by_size(images, self.config.channels, self.config.grid, self.root.weight)
            logits = torch.cat([self.forward(stack) for stack in stacks])
            return logits[torch.tensor(order, device=logits.device).argsort()]
        return self.head(self.encode(images).mean(dim=(2, 3)))

    def encode(self, images: Float[Tensor, "B C H W"]) -> Maps:
        """Return the last feature map, a thirty-second of the image size."""
        check_images(images, self.config.channels, self.root.weight, axes=4)
        x: Tensor = self.root(images)
        x = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, stride=2)  # padded with zeros, as in the published networks
        for unit in self.blocks:
            checkpointed = self.gradient_checkpointing and torch.is_grad_enabled()
            x = cast("Tensor", checkpoint(unit, x, use_reentrant=False)) if checkpointed else unit(x)
        return self.norm(x).relu()

    @overload
    def features(self, images: Tensor, layers: int | Iterable[int] = ()) -> Features: ...
    @overload
    def features(self, images: Sequence[Tensor], layers: int | Iterable[int] = ()) -> list[Features]: ...
    def features(self, images: Images, layers: int | Iterable[int] = ()) -> Features | list[Features]:
        """Return the cells of the last feature map as patches, and their mean; a list for a list of images."""
        if layers not in ((), []):
            raise ConfigError(f"layers={layers!r}: a BiT has features of its last feature map only.", hint="Omit it.")
        if isinstance(images, Tensor):
            return build_features(self.encode(images))
        stacks, order = stack_by_size(images, self.config.channels, self.config.grid, self.root.weight)
        maps = dict(zip(order, (image for stack in stacks for image in self.encode(stack)), strict=True))
        return [build_features(maps[index][None]) for index in range(len(order))]

    def reset_head(self, num_classes: int) -> "BiT":
        """Replace the head by a new one with zero weights, for another number of classes; 0 removes it."""
        bias = self.config.head_bias if num_classes else 0.0
        self.config = replace(self.config, num_classes=num_classes, head_bias=bias)
        self.head = build_head(self.config).to(self.norm.weight)
        return self

    def parameter_groups(self, lr: float, weight_decay: float, layer_decay: float = 1.0) -> list[dict[str, Any]]:
        """Return parameter groups for an optimizer, as `ViT.parameter_groups` does; every unit is a layer."""
        return optimizer_groups(self, len(self.blocks), lr, weight_decay, layer_decay)


def build_features(maps: Maps) -> Features:
    """Return the cells of a feature map as patches, and their mean."""
    patches = maps.flatten(2).mT  # (B, D, rows, columns) -> (B, N, D)
    grid, pooled, layers = (maps.shape[2], maps.shape[3]), maps.mean(dim=(2, 3)), ByLayer[Tokens]({}, depth=0)
    return Features(cls=None, registers=patches[:, :0], patches=patches, grid=grid, pooled=pooled, layers=layers)


class Unit(nn.Module):
    """A residual unit with norm and ReLU before each convolution (He et al. 2016).

    The shortcut projection reads the output of the first norm and ReLU."""

    def __init__(self, inputs: int, middle: int, outputs: int, stride: int):
        super().__init__()
        self.norm1, self.conv1 = group_norm(inputs), StandardizedConv(inputs, middle, 1)
        self.norm2, self.conv2 = group_norm(middle), StandardizedConv(middle, middle, 3, stride=stride, padding=1)
        self.norm3, self.conv3 = group_norm(middle), StandardizedConv(middle, outputs, 1)
        projects = inputs != outputs or stride != 1
        self.shortcut = StandardizedConv(inputs, outputs, 1, stride=stride) if projects else None

    def forward(self, x: Maps) -> Maps:
        y = self.norm1(x).relu()
        shortcut = x if self.shortcut is None else self.shortcut(y)
        y = self.conv1(y)
        y = self.conv2(self.norm2(y).relu())
        y = self.conv3(self.norm3(y).relu())
        return y + shortcut


def build_units(config: BiTConfig) -> Iterable[Unit]:
    """Yield the units. Each stage doubles the width; all but the first halve the size in their first unit."""
    inputs = config.root_width
    for stage, units in enumerate(config.stages):
        middle = config.root_width * 2**stage
        for unit in range(units):
            yield Unit(inputs, middle, 4 * middle, stride=2 if stage and unit == 0 else 1)
            inputs = 4 * middle


class StandardizedConv(Conv):
    """A convolution whose kernels have mean 0 and variance 1."""

    def forward(self, input: Maps) -> Maps:
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, unbiased=False)
        weight = (self.weight - mean) * torch.rsqrt(variance + 1e-10)
        return F.conv2d(input, weight, stride=self.stride, padding=self.padding)


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(NORM_GROUPS, channels, eps=1e-5)
