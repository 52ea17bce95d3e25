"""What ViT and BiT share for training: the head, a new one for other classes, and the groups of an optimizer."""

from dataclasses import replace
from functools import partial
from typing import Any, Generic, Self, TypeVar

from torch import nn

from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.model.layers import Linear
from vitral.model.parameter_groups import group_parameters

Config = TypeVar("Config", ViTConfig, BiTConfig)


class BaseNetwork(nn.Module, Generic[Config]):
    """A network that ends in a head."""

    config: Config
    blocks: nn.ModuleList
    norm: nn.LayerNorm | nn.GroupNorm
    head: nn.Module

    def reset_head(self, num_classes: int) -> Self:
        """Replace the head by a new one with zero weights, for another number of classes; 0 removes it."""
        bias = self.config.head_bias if num_classes else 0.0
        self.config = replace(self.config, num_classes=num_classes, head_bias=bias)
        self.head = build_head(self.config).to(self.norm.weight)
        return self

    def parameter_groups(self, lr: float, weight_decay: float, layer_decay: float = 1.0) -> list[dict[str, Any]]:
        """Return parameter groups for an optimizer, with weight decay for matrices only and layer-wise rates.

        The head learns at `lr`, each layer below it at `layer_decay` times the rate of the layer above."""
        parameters = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        return [
            {
                "names": group.names,
                "params": [parameters[name] for name in group.names],
                "lr": lr * group.scale,
                "weight_decay": weight_decay if group.decays else 0.0,
            }
            for group in group_parameters(parameters, len(self.blocks), layer_decay)
        ]


def build_head(config: ViTConfig | BiTConfig) -> nn.Module:
    """Return a linear layer with zero weights and a constant bias; nothing for 0 classes."""
    if not config.num_classes:
        return nn.Identity()
    bias = partial(nn.init.constant_, val=config.head_bias)
    return Linear(config.representation or config.width, config.num_classes, weight=nn.init.zeros_, bias=bias)
