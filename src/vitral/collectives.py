"""Let the processes of one command agree on values and sum their gradients. A single process gets its input back.

Every process calls the same functions in the same order. The other modules need no branch for several processes. A
single process imports no torch for it.
"""

import atexit
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

from vitral.devices import RESTART_COUNT, World, find_world
from vitral.errors import VitralError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

Value = TypeVar("Value")
TIMEOUT_VARIABLE, DEFAULT_TIMEOUT = "VITRAL_PROCESS_TIMEOUT", 600
"""A process that waits for another one longer than so many seconds fails, and with it the command."""
RESPONSE_SECONDS = 2.0
"""Time in which the processes report after one of them was lost."""


def join_world() -> World:
    """Connect to the other processes of a torchrun command, once, and return the world."""
    world = find_world()
    if world.size == 1 or is_shared():
        return world
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
    seconds = float(os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT))
    timeout = timedelta(seconds=seconds)
    store, *_ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    attempts = store.add("vitral/attempts", 1) - 1 if world.is_first else 0
    name = _name_attempt(store, world, seconds)
    dist.init_process_group(
        world.backend(has_cuda=has_cuda),
        store=dist.PrefixStore(name, store),  # pyright: ignore[reportPrivateImportUsage]
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
    )
    atexit.register(dist.destroy_process_group)
    # The launcher of each machine counts only the restarts that it caused itself.
    os.environ[RESTART_COUNT] = str(max(gather(max(attempts, int(os.environ.get(RESTART_COUNT, "0"))))))
    return find_world()


def _name_attempt(store: "Store", world: World, seconds: float) -> str:
    """Return a name that all processes of this start share, and no process of an earlier one had.

    torchrun keeps its store when it starts the processes again. Without another prefix for the keys, a process could
    find the address of a dead one there and connect to it (pytorch issue 135712). The number of restarts cannot be the
    prefix, because the launcher of each machine counts its own.
    """
    token = uuid4().hex
    if not world.is_first:
        store.set(f"vitral/token/{world.rank}", token)
        name = store.get(f"vitral/name/{token}").decode()  # waits for the first process of the same start
        store.set(f"{name}/present/{world.rank}", "")
        return name
    name, missing, deadline = f"vitral/start/{token}", [*range(1, world.size)], time.monotonic() + seconds
    while missing:
        for rank in missing:
            if store.check([f"vitral/token/{rank}"]):  # perhaps still the token of a dead process
                store.set(f"vitral/name/{store.get(f'vitral/token/{rank}').decode()}", name)
        missing = [rank for rank in missing if not store.check([f"{name}/present/{rank}"])]
        if missing and time.monotonic() > deadline:
            raise VitralError(f"Process {missing[0]} did not start within {seconds:g} seconds.")
        time.sleep(0.01 if missing else 0)
    return name


def current_world() -> World:
    """Return the world that this process has joined."""
    return find_world() if is_shared() else World()


def is_shared() -> bool:
    """Return whether several processes work together."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def gather(value: Value) -> list[Value]:
    """Return the value of every process, by rank."""
    if not is_shared():
        return [value]
    import torch.distributed as dist

    values: list[Value | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # pyright: ignore[reportReturnType]


def from_first(value: Value) -> Value:
    """Return the value of the first process, for choices that depend on a clock or on a file."""
    if not is_shared():
        return value
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def wait_for_all() -> None:
    """Wait until every process has come here."""
    if is_shared():
        gather(None)


def find_silent() -> list[int]:
    """Return the ranks of processes that were lost: those that do not report to the store of the launcher.

    Every process calls this after a failure of torch.distributed, which does not name the one that caused it.
    """
    if not is_shared():
        return []
    import torch.distributed as dist

    world, silent, patience = find_world(), list[int](), RESPONSE_SECONDS
    try:
        store = dist.distributed_c10d._get_default_store()  # pyright: ignore
        store.set(f"vitral/alive/{world.rank}", "")
    except RuntimeError:  # the launcher is gone, too
        return []
    for rank in range(world.size):
        try:
            store.wait([f"vitral/alive/{rank}"], timedelta(seconds=patience))
        except RuntimeError:
            silent.append(rank)
            patience = 0.1
    return silent


def sum_gradients(parameters: "Sequence[nn.Parameter]") -> None:
    """Add up the gradients of all processes in place. A parameter without a gradient anywhere keeps none.

    The sum of two is exact in any order, so that two processes equal one process with two micro-batches bit for bit.
    """
    if not is_shared() or not parameters:
        return
    import torch
    import torch.distributed as dist

    device = parameters[0].device
    is_present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
    dist.all_reduce(is_present)
    present = [p for p, count in zip(parameters, is_present.tolist(), strict=True) if count]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in present])
    dist.all_reduce(flat)
    for parameter, total in zip(present, flat.split([p.numel() for p in present]), strict=True):
        parameter.grad = total.view_as(parameter)


def copy_from_first(tensors: "Sequence[Tensor]") -> None:
    """Overwrite tensors in place with those of the first process."""
    if not is_shared():
        return
    import torch.distributed as dist

    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)
