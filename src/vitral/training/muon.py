"""torch's Muon, quick on small networks: matrices of one shape are orthogonalised together."""

from collections import defaultdict
from math import sqrt
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Muon):
    """torch.optim.Muon (Nesterov momentum, steps as large as AdamW's), with one batched product where torch has one for
    every matrix, and in float32 where bfloat16 has no hardware."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        alike: defaultdict[tuple[torch.device, int, int], list[tuple[Tensor, dict[str, Any], Tensor]]]
        alike = defaultdict(list)
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    short, long = sorted(matrix.shape)
                    alike[matrix.device, short, long].append((matrix, group, self.direction(matrix, group["momentum"])))
        for (_, _, long), members in alike.items():
            flat = [update.T if is_tall(update) else update for _, _, update in members]
            updates = orthogonalised(torch.stack(flat), members[0][1])
            for (matrix, group, _), update in zip(members, updates, strict=True):
                lr = group["lr"]
                matrix.mul_(1 - lr * group["weight_decay"])
                matrix.add_(update.T if is_tall(matrix) else update, alpha=-lr * 0.2 * sqrt(long))
        return loss

    def direction(self, matrix: Tensor, momentum: float) -> Tensor:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)  # type: ignore[arg-type]
        buffer = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(buffer, momentum)  # type: ignore[union-attr]


def is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def orthogonalised(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """(B, rows, columns): each with its singular values brought near 1 by a few Newton-Schulz steps."""
    a, b, c = group["ns_coefficients"]
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)
