"""Shard a network over all processes with FSDP2: each holds its rows of every parameter, gradient and moment.

A block's parameters are gathered when the block runs and freed after it, so that no process holds the whole network.
Everything outside of a forward or backward pass works on rows: `rows_of` returns those of this process.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from vitral.collectives import current_world
from vitral.devices import keep_freed_memory
from vitral.errors import ConfigError
from vitral.model.block import Block
from vitral.model.network import Network
from vitral.training.config import ResolvedConfig

Result = TypeVar("Result")
LARGE_TENSOR = 2**20
"""Bytes of tensors that return to the system when they are freed: gathered blocks leave holes as large as the model."""


class Root(nn.Module):
    """The outermost module of a sharded network: runs any computation with the parameters outside of the blocks."""

    def __init__(self, model: nn.Module, precision: str):
        super().__init__()
        self.model, self.precision = model, precision

    def forward(self, compute: Callable[..., Result], *inputs: object) -> Result:
        return compute(*inputs)


_ROOTS: WeakKeyDictionary[nn.Module, Root] = WeakKeyDictionary()


def is_sharded(config: ResolvedConfig) -> bool:
    """Return whether the processes of this command divide the network among them."""
    return config.parallel == "fsdp" and current_world().size > 1


def root_of(model: nn.Module) -> Root | None:
    """Return the root of a sharded network; None for one that this process holds as a whole."""
    return _ROOTS.get(model)


def run_with(model: nn.Module, compute: Callable[..., Result], *inputs: object) -> Result:
    """Run a computation that uses the modules of a network, which may be sharded."""
    root = root_of(model)
    return compute(*inputs) if root is None else root(compute, *inputs)


# ---- dividing a network ----


def check_shardable(config: ResolvedConfig) -> None:
    """Raise ConfigError for settings that need whole matrices."""
    if config.optim.name == "muon":
        raise ConfigError(
            "optim.name=muon needs whole matrices, which parallel=fsdp divides.", hint="Use adamw or ddp."
        )
    if config.compile:
        raise ConfigError("compile=true and parallel=fsdp do not work together.", hint="Drop one of them.")


@lru_cache(maxsize=1)
def _make_mesh(device: str, size: int) -> DeviceMesh:
    return init_device_mesh(device, (size,))


def shard_block(block: nn.Module, config: ResolvedConfig) -> None:
    """Divide the parameters of a block among all processes, once.

    Below float32, its matrices are gathered in that precision, as autocast would convert them. Norms stay float32.
    """
    if isinstance(block, FSDPModule):
        return
    if config.precision != "float32" and isinstance(block, Block):
        low = MixedPrecisionPolicy(
            param_dtype=getattr(torch, config.precision), reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for part in (block.attention, block.mlp):
            _shard(part, config, low)
    _shard(block, config)


def _shard(module: nn.Module, config: ResolvedConfig, policy: MixedPrecisionPolicy | None = None) -> None:
    kind = torch.device(config.device).type
    policy = policy or MixedPrecisionPolicy(cast_forward_inputs=False)
    fully_shard(module, mesh=_make_mesh(kind, current_world().size), reshard_after_forward=True, mp_policy=policy)
    sharded = cast("FSDPModule", module)
    sharded.set_gradient_divide_factor(1.0)  # gradients are added up, as micro-batches are
    sharded.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums


def shard_model(model: Network, config: ResolvedConfig) -> None:
    """Divide a network: its blocks, unless they are divided already, and then everything else."""
    check_shardable(config)
    if root_of(model) is not None:
        return
    for block in model.blocks:
        shard_block(block, config)
    is_low = any(isinstance(module, FSDPModule) for block in model.blocks for module in block.children())
    root = Root(model, config.precision if is_low else "float32")
    _shard(root, config)
    _ROOTS[model] = root
    if not any(parameter.is_meta for parameter in root.parameters()):
        _gather_once(root)


def _gather_once(root: Root) -> None:
    """Gather each part once, which makes the tensors for it.

    Those that a first pass in inference mode makes could not be used for gradients later.
    """
    with torch.inference_mode(False):
        root(lambda: None)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()


def initialize_shards(model: Network, config: ResolvedConfig) -> Network:
    """Give a network on the meta device its initial values, layer by layer, and divide each block when it is complete.

    Layers draw their random numbers in the order in which `build` creates them, so that the values are the same.
    """
    check_shardable(config)
    keep_freed_memory(below=LARGE_TENSOR)
    blocks = {id(block) for block in model.blocks}
    for module in _in_order_of_creation(model):
        if any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        if id(module) in blocks:
            shard_block(module.to(config.device), config)
    shard_model(model.to(config.device), config)
    return model


def _in_order_of_creation(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _in_order_of_creation(child)
    yield module


def fill_shards(model: Network, config: ResolvedConfig, values: Mapping[str, Tensor]) -> Network:
    """Divide a network on the meta device and give it the rows of its tensors that `keep_rows` returned."""
    shard_model(model, config)
    _ROOTS[model].to_empty(device=config.device)  # the root, so that FSDP finds the new memory of all its parameters
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            local(tensor).copy_(values[name])
    _gather_once(_ROOTS[model])
    return model


def keep_rows(tensor: Tensor) -> Tensor:
    """Return a copy of the rows of a whole tensor that belong to this process."""
    world = current_world()
    if not tensor.ndim:
        return tensor.clone()
    return tensor[_rows(tensor.shape[0], world.rank, world.size)].clone()


# ---- rows ----


def _rows(count: int, rank: int, world: int) -> slice:
    """Return the rows of a process: as torch.chunk divides them."""
    size = -(-count // world)
    return slice(min(rank * size, count), min((rank + 1) * size, count))


def rows_of(tensor: Tensor) -> slice | None:
    """Return the rows of a tensor that this process has; None for all of it."""
    if not isinstance(tensor, DTensor):
        return None
    return _rows(tensor.shape[0], tensor.device_mesh.get_local_rank(), tensor.device_mesh.size())


def local(tensor: Tensor) -> Tensor:
    """Return the rows of a tensor that this process has, as a plain tensor that shares their memory."""
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain


def whole(tensor: Tensor) -> Tensor:
    """Return the complete tensor, to which every process contributes."""
    plain = tensor.detach()
    return plain.full_tensor() if isinstance(plain, DTensor) else plain


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Return a tensor divided as another one of its shape is; rows of this process count as divided already."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value
    if value.shape == like.shape and value.shape != local(like).shape:
        value = value[rows_of(like)]
    return DTensor.from_local(
        value.contiguous(), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@torch.no_grad()
def copy_values(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Overwrite some or all tensors of a model, which may be sharded."""
    for name, tensor in model.state_dict().items():
        if name in values:
            local(tensor).copy_(local(shard_like(values[name], tensor)))


def keeps_float32(model: nn.Module) -> bool:
    """Return whether a network can run in float32: a sharded one may gather its matrices in another precision."""
    root = root_of(model)
    return root is None or root.precision == "float32"
