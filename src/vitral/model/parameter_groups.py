"""Group parameters for an optimizer: which ones decay, and how fast each layer learns.

Matrices and convolution kernels decay; biases, norms, tokens, position tables and probes do not. With layer-wise decay
(BEiT, MAE), the learning rate of a layer is `layer_decay` times that of the layer above it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """Parameters that an optimizer treats alike."""

    names: tuple[str, ...]
    scale: float
    """Factor of the learning rate."""
    decays: bool


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies to a parameter: the paper's code calls these kernels."""
    return parameter.ndim >= 2 and name.endswith(("weight", ".a", ".b")) and "norm" not in name


def layer_of(name: str, blocks: int) -> int:
    """Return the layer of a parameter: 0 before the blocks, then one per block, then norm, pool and head together."""
    module, _, rest = name.partition(".")
    if module in ("patches", "class_token", "registers", "positions", "root"):
        return 0
    return int(rest.partition(".")[0]) + 1 if module == "blocks" else blocks + 1


def group_parameters(parameters: Mapping[str, Tensor], blocks: int, layer_decay: float = 1.0) -> list[ParameterGroup]:
    """Group named parameters by learning rate and weight decay."""
    groups: dict[tuple[float, bool], list[str]] = {}
    for name, parameter in parameters.items():
        scale = layer_decay ** (blocks + 1 - layer_of(name, blocks))
        groups.setdefault((scale, is_matrix(name, parameter)), []).append(name)
    return [ParameterGroup(names=tuple(names), scale=scale, decays=decays) for (scale, decays), names in groups.items()]


def optimizer_groups(
    model: nn.Module, blocks: int, lr: float, weight_decay: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Return the trainable parameters as groups for an optimizer of torch."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return [
        {
            "names": group.names,
            "params": [parameters[name] for name in group.names],
            "lr": lr * group.scale,
            "weight_decay": weight_decay if group.decays else 0.0,
        }
        for group in group_parameters(parameters, blocks, layer_decay)
    ]
