"""Optimisers over named groups: which parameters decay, how fast each layer learns, and Muon for the matrices."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitral.model.network import Network
from vitral.training.config import Optim
from vitral.training.muon import Muon


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Kernels, as the paper's code calls what decays: no biases, norms, tokens, tables of positions or probes."""
    return parameter.ndim >= 2 and name.endswith(("weight", ".a", ".b")) and "norm" not in name


def layer_of(name: str, blocks: int) -> int:
    """0 for what comes before the blocks, then the blocks, then norm, pool and head."""
    part, _, rest = name.partition(".")
    if part in ("patches", "class_token", "registers", "positions", "root"):
        return 0
    return int(rest.partition(".")[0]) + 1 if part == "blocks" else blocks + 1


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters that are treated alike."""

    names: list[str]
    scale: float
    """Of the learning rate."""
    decays: bool


def groups_of(model: Network, optim: Optim, extra: nn.Module | None = None) -> list[Group]:
    found: dict[tuple[float, bool], list[str]] = {}
    blocks = len(model.blocks)
    decay = 1.0 if optim.layer_decay == "auto" else optim.layer_decay
    for name, parameter in trained_parameters(model, extra).items():
        scale = decay ** (blocks + 1 - layer_of(name, blocks))
        found.setdefault((scale, is_matrix(name, parameter)), []).append(name)
    return [Group(names=names, scale=scale, decays=decays) for (scale, decays), names in found.items()]


def trained_parameters(model: Network, extra: nn.Module | None) -> dict[str, nn.Parameter]:
    """Those of the network, and those of the objective beside it, which count to the head's layer."""
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return found | {f"extra.{name}": parameter for name, parameter in (extra or nn.Identity()).named_parameters()}


class Optimizer:
    """One or two of torch's optimizers, driven by one learning rate, with a state that is named by parameters."""

    def __init__(self, model: Network, optim: Optim, peak: float, extra: nn.Module | None = None):
        self.model, self.optim, self.peak, self.extra = model, optim, peak, extra
        self.parameters = trained_parameters(model, extra)
        self.parts: dict[
            str, tuple[nn.Parameter, nn.Parameter, slice]
        ] = {}  # q, k and v of a matrix that has all three
        self.optimizers: list[torch.optim.Optimizer] = list(self.build())

    def build(self) -> Iterator[torch.optim.Optimizer]:
        optim = self.optim
        groups = groups_of(self.model, optim, self.extra)
        of_muon = [name for name in self.parameters if self.is_for_muon(name)]
        plain = []
        for group in groups:
            names = [name for name in group.names if name not in of_muon]
            if names:
                decay = optim.weight_decay if group.decays else 0.0
                plain.append(
                    {
                        "params": [self.parameters[name] for name in names],
                        "names": names,
                        "scale": group.scale,
                        "weight_decay": decay,
                    }
                )
        if plain:
            yield self.plain(plain)
        if of_muon:
            scales = {name: group.scale for group in groups for name in group.names}
            yield Muon(
                [
                    {"params": [part for _, part in parts], "names": [name for name, _ in parts], "scale": scales[name]}
                    for name in of_muon
                    if (parts := list(self.split(name)))
                ],
                lr=self.peak,
                weight_decay=optim.weight_decay,
                momentum=0.95,
            )

    def plain(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optim = self.optim
        if optim.name == "sgd":
            return DecoupledSGD(groups, lr=self.peak, momentum=optim.momentum)
        # The paper's Adam has a decoupled decay, so it is AdamW here as well.
        return torch.optim.AdamW(groups, lr=self.peak, betas=optim.betas, eps=optim.eps, fused=True)

    def is_for_muon(self, name: str) -> bool:
        is_block = name.startswith("blocks.") and self.parameters[name].ndim == 2
        return self.optim.name == "muon" and is_block and name.endswith(".weight")

    def split(self, name: str) -> Iterator[tuple[str, nn.Parameter]]:
        """A matrix, or its q, k and v as views into it: each is orthogonalised by itself."""
        parameter = self.parameters[name]
        if not name.endswith("to_qkv.weight"):
            yield name, parameter
            return
        third = parameter.shape[0] // 3
        for index, part in enumerate("qkv"):
            rows = slice(index * third, (index + 1) * third)
            view = nn.Parameter(parameter.data[rows])
            self.parts[f"{name}.{part}"] = view, parameter, rows
            yield f"{name}.{part}", view

    def step(self, factor: float) -> None:
        for view, whole, rows in self.parts.values():
            view.grad = None if whole.grad is None else whole.grad[rows]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.peak * factor * group["scale"]
            optimizer.step()

    def zero_grad(self) -> None:
        for parameter in (*self.parameters.values(), *(view for view, _, _ in self.parts.values())):
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Moments and counters: optimizer/parameter/name."""
        found = {}
        for number, optimizer in enumerate(self.optimizers):
            for name, parameter in _named(optimizer):
                for key, value in optimizer.state.get(parameter, {}).items():
                    found[f"{number}/{name}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for number, optimizer in enumerate(self.optimizers):
            for name, parameter in _named(optimizer):
                prefix = f"{number}/{name}/"
                values = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
                for key, value in values.items():  # also the counter: fused kernels read it where the weights are
                    optimizer.state[parameter][key] = value.to(parameter.device, copy=True)


def _named(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for group in optimizer.param_groups:
        yield from zip(group["names"], group["params"], strict=True)


class DecoupledSGD(torch.optim.SGD):
    """SGD whose weight decay is decoupled, as it is for the others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        decays = []
        for group in self.param_groups:
            decays.append(group["weight_decay"])
            if group["weight_decay"]:
                for parameter in group["params"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
            group["weight_decay"] = 0.0
        result = super().step(closure)
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        return result


class Average:
    """An exponential moving average of the weights."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.values = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                self.values[name].lerp_(tensor, 1 - self.decay)
            else:
                self.values[name].copy_(tensor)


class Swapped(AbstractContextManager[None]):
    """Other weights in a model for a while."""

    def __init__(self, model: nn.Module, values: dict[str, Tensor]):
        self.model, self.values = model, values

    def __enter__(self) -> None:
        self.own = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(self.values)

    def __exit__(self, *_: object) -> None:
        self.model.load_state_dict(self.own)
