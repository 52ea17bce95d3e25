"""Gradients of all micro-batches and processes: their sum, their norm, and its limit."""

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vitral.collectives import sum_gradients
from vitral.training.sharding import local, rows_of


def add_up_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Add up the gradients of all processes in place. Those of sharded parameters are added up while they appear."""
    sum_gradients([parameter for parameter in parameters if not isinstance(parameter, DTensor)])


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
    """Scale the gradients so that their norm is at most `limit`, 0 for none, and return the norm before.

    The norm is that of the norms of all rows, in order. Sharding never divides a row, so that every number of processes
    computes the same norm, bit for bit.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norm = _norm(_row_norms(gradients), dim=0)
    if limit:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            local(gradient).mul_(factor)
    return norm


def _row_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of each row of each gradient, those of other processes included."""
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return torch.cat([_norms(gradient) for gradient in gradients])
    counts = [gradient.shape[0] if gradient.ndim else 1 for gradient in gradients]
    norms = torch.zeros(sum(counts), device=local(gradients[0]).device)
    is_first = dist.get_rank() == 0
    starts = [0, *accumulate(counts)]
    for gradient, start, stop in zip(gradients, starts, starts[1:], strict=False):
        part = norms[start:stop]
        rows = rows_of(gradient)
        if rows is not None:
            part[rows] = _norms(local(gradient))
        elif is_first:
            part.copy_(_norms(gradient))
    dist.all_reduce(norms)  # pyright: ignore[reportUnknownMemberType]  # exact: a row has one term that is not zero
    return norms


def _norms(gradient: Tensor) -> Tensor:
    rows = gradient.flatten(1) if gradient.ndim > 1 else gradient.reshape(-1, 1)
    return rows.abs()[:, 0] if rows.shape[1] == 1 else _norm(rows, dim=1)


def _norm(values: Tensor, dim: int) -> Tensor:
    return cast("Tensor", torch.linalg.vector_norm(values, dim=dim))  # pyright: ignore[reportUnknownMemberType]
