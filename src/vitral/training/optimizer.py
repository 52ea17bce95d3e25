"""Optimizers over named parameters: SGD, AdamW, and Muon for the matrices of the blocks."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vitral.errors import ConfigError
from vitral.model.network import Network
from vitral.model.parameter_groups import ParameterGroup, group_parameters
from vitral.training.config import ResolvedOptim
from vitral.training.sharding import local, rows_of, shard_like
from vitral.training.state_files import SavedTensor

DEFAULT_MOMENTUM = {"sgd": 0.9, "muon": 0.95}


class Optimizer:
    """One or two torch optimizers that share a learning rate; their state is named by parameter."""

    def __init__(self, model: Network, optim: ResolvedOptim, extra: nn.Module | None = None):
        """Train the parameters of the network, and those of the task beside it in the layer of the head."""
        self.optim = optim
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters |= {f"extra.{name}": p for name, p in (extra or nn.Identity()).named_parameters()}
        self.views: dict[str, tuple[nn.Parameter, nn.Parameter, slice]] = {}
        """q, k and v as views into the one matrix that holds all three: (view, matrix, rows)."""
        self.shards: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        """The rows of sharded parameters in this process: (rows, parameter)."""
        groups = group_parameters(self.parameters, len(model.blocks), optim.layer_decay)
        self.optimizers: list[torch.optim.Optimizer] = list(self._build(groups))

    def _build(self, groups: list[ParameterGroup]) -> Iterator[torch.optim.Optimizer]:
        optim = self.optim
        momentum = DEFAULT_MOMENTUM.get(optim.name, 0.0) if optim.momentum is None else optim.momentum
        for_muon = [name for name in self.parameters if self._is_for_muon(name)]
        plain: list[dict[str, Any]] = []
        for group in groups:
            if names := [name for name in group.names if name not in for_muon and self._has_rows(name)]:
                params = [self._take_rows(name) for name in names]
                decay = optim.weight_decay if group.decays else 0.0
                plain.append({"params": params, "names": names, "scale": group.scale, "weight_decay": decay})
        if plain and optim.name == "sgd":
            yield DecoupledSGD(plain, lr=optim.lr, momentum=momentum)
        elif plain:
            yield torch.optim.AdamW(plain, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
        if for_muon:
            scales = {name: group.scale for group in groups for name in group.names}
            matrices: list[dict[str, Any]] = []
            for name in for_muon:
                parts = dict(self._split(name))
                matrices.append({"params": [*parts.values()], "names": [*parts], "scale": scales[name]})
            yield Muon(matrices, lr=optim.lr, weight_decay=optim.weight_decay, momentum=momentum)

    def _has_rows(self, name: str) -> bool:
        return local(self.parameters[name]).numel() > 0

    def _take_rows(self, name: str) -> nn.Parameter:
        """Return a parameter, or the rows of a sharded one as a view."""
        parameter = self.parameters[name]
        if not isinstance(parameter, DTensor):
            return parameter
        self.shards[name] = nn.Parameter(local(parameter)), parameter
        return self.shards[name][0]

    def _is_for_muon(self, name: str) -> bool:
        is_block_matrix = name.startswith("blocks.") and self.parameters[name].ndim == 2
        return self.optim.name == "muon" and is_block_matrix and name.endswith(".weight")

    def _split(self, name: str) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield a matrix, or its q, k and v as views: Muon orthogonalizes each by itself."""
        parameter = self.parameters[name]
        if not name.endswith("to_qkv.weight"):
            yield name, parameter
            return
        third = parameter.shape[0] // 3
        for index, part in enumerate("qkv"):
            rows = slice(index * third, (index + 1) * third)
            view = nn.Parameter(parameter.data[rows])
            self.views[f"{name}.{part}"] = view, parameter, rows
            yield f"{name}.{part}", view

    def step(self, lr_factor: float) -> None:
        """Update the parameters at a fraction of the peak learning rate."""
        for view, matrix, rows in self.views.values():
            view.grad = None if matrix.grad is None else matrix.grad[rows]
        for shard, parameter in self.shards.values():
            shard.grad = None if parameter.grad is None else local(parameter.grad)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.optim.lr * lr_factor * group["scale"]
            optimizer.step()

    def zero_grad(self) -> None:
        views = (view for view, *_ in (*self.views.values(), *self.shards.values()))
        for parameter in (*self.parameters.values(), *views):
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return moments and counters as optimizer/parameter/name."""
        state: dict[str, Tensor] = {}
        for number, optimizer in enumerate(self.optimizers):
            for name, parameter in _named_parameters(optimizer):
                values: dict[str, Any] = optimizer.state.get(parameter, {})
                for key, value in values.items():
                    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
                    is_divided = name in self.shards and tensor.ndim > 0
                    state[f"{number}/{name}/{key}"] = (
                        shard_like(tensor, self.parameters[name]) if is_divided else tensor
                    )
        return state

    def load(self, tensors: Mapping[str, SavedTensor]) -> None:
        """Restore moments and counters. ConfigError if they are not those of this optimizer."""
        for number, optimizer in enumerate(self.optimizers):
            is_adamw = isinstance(optimizer, torch.optim.AdamW)
            keys = ["exp_avg", "exp_avg_sq", "step"] if is_adamw else ["momentum_buffer"]
            for name, parameter in _named_parameters(optimizer):
                prefix = f"{number}/{name}/"
                values = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
                if values and sorted(values) != keys:
                    raise _misfit(name, f"it has {', '.join(sorted(values))} (expected {', '.join(keys)})")
                full = self.parameters.get(name, parameter)
                for key, value in values.items():  # counters too: fused kernels read them on the device of the weights
                    is_counter = key == "step" and not value.shape
                    if not is_counter and (value.shape, value.dtype) != (full.shape, full.dtype):
                        raise _misfit(name, f"{key} has {value.dtype} and shape {tuple(value.shape)}")
                    rows = None if is_counter else rows_of(full)
                    optimizer.state[parameter][key] = value.read(rows).to(parameter.device, copy=True)


def _misfit(name: str, problem: str) -> ConfigError:
    return ConfigError(f"The saved optimizer does not fit {name}: {problem}.")


def _named_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for group in optimizer.param_groups:
        yield from zip(group["names"], group["params"], strict=True)


class DecoupledSGD(torch.optim.SGD):
    """SGD with decoupled weight decay, as in AdamW."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        decays: list[float] = []
        for group in self.param_groups:
            decays.append(group["weight_decay"])
            if group["weight_decay"]:
                for parameter in group["params"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
            group["weight_decay"] = 0.0
        try:
            return cast("float | None", super().step(closure))  # pyright: ignore[reportUnknownMemberType]
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay


class Muon(torch.optim.Muon):
    """torch.optim.Muon (Nesterov momentum, steps as large as AdamW's) that is fast on small networks.

    Matrices of one shape are orthogonalized by one batched product, in float32 where bfloat16 has no hardware.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        loss = None if closure is None else torch.enable_grad()(closure)()
        by_shape: defaultdict[tuple[torch.device, int, int], list[tuple[Tensor, dict[str, Any], Tensor]]]
        by_shape = defaultdict(list)
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    short, long = sorted(matrix.shape)
                    update = self._momentum_update(matrix, matrix.grad, group["momentum"])
                    by_shape[matrix.device, short, long].append((matrix, group, update))
        for (_, _, long), members in by_shape.items():
            wide = [update.T if _is_tall(update) else update for _, _, update in members]
            updates = orthogonalize(torch.stack(wide), members[0][1])
            for (matrix, group, _), update in zip(members, updates, strict=True):
                lr = group["lr"]
                matrix.mul_(1 - lr * group["weight_decay"])
                matrix.add_(update.T if _is_tall(matrix) else update, alpha=-lr * 0.2 * sqrt(long))
        return loss

    def _momentum_update(self, matrix: Tensor, gradient: Tensor, momentum: float) -> Tensor:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum)


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def orthogonalize(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """(B, rows, columns): bring the singular values of each matrix near 1 by a few Newton-Schulz steps."""
    a, b, c = group["ns_coefficients"]
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    norm = cast("Tensor", x.norm(dim=(1, 2), keepdim=True))  # pyright: ignore[reportUnknownMemberType]
    x = x / norm.clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)
