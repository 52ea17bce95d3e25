"""Build, read and write networks that no process holds as a whole."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitral.collectives import from_first
from vitral.devices import keep_freed_memory
from vitral.model.network import Config, Network
from vitral.training.config import ResolvedConfig
from vitral.training.parallel import only_first
from vitral.training.sharding import (
    LARGE_TENSOR,
    fill_shards,
    initialize_shards,
    is_sharded,
    keep_rows,
    shard_like,
    whole,
)
from vitral.training.state_files import open_tensors
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.dialects.native import write_in_turn
from vitral.weights.dialects.plan import Content
from vitral.weights.formats.safetensors import stream_safetensors
from vitral.weights.load import load_in_parts
from vitral.weights.state_dict import build_on_meta


def builds_shards(config: ResolvedConfig) -> bool:
    """Return whether a run can start without the whole network in any process.

    A linear probe needs its features, and LoRA draws its matrices after the rest.
    """
    return is_sharded(config) and config.tune.what == "all" and not config.starts_with_probe


def create_shards(config: Config, settings: ResolvedConfig) -> Network:
    """Return a new network with the paper's initial values, divided among all processes."""
    return initialize_shards(build_on_meta(config), settings)


def load_shards(source: str | Path, settings: ResolvedConfig, **overrides: Any) -> Checkpoint:
    """Load a checkpoint of which every process keeps its rows alone."""

    def keep(tensor: Tensor) -> Tensor:
        return keep_rows(tensor.float() if tensor.is_floating_point() else tensor)

    keep_freed_memory(below=LARGE_TENSOR)
    checkpoint, parts = load_in_parts(source, keep, **overrides)
    model = checkpoint.model
    buffers = {name for name, _ in model.named_buffers()}
    if buffers:  # running statistics are not divided
        _, wholes = load_in_parts(source, torch.clone, **overrides)
        parts |= {name: wholes[name] for name in buffers & wholes.keys()}
    fill_shards(model.float(), settings, parts)
    return checkpoint


def save_shards(content: Content, model: nn.Module, path: Path) -> None:
    """Write a divided network as the one file of our own format; the first process does."""
    tensors = _merged(model)
    with only_first() as is_writer:
        try:
            if is_writer:
                write_in_turn(content, tensors, path)
        finally:
            for _ in tensors:  # every process contributes to every tensor
                pass


def save_plain_shards(model: nn.Module, path: Path, metadata: dict[str, str]) -> None:
    """Write the tensors of a divided network of the caller's own; the first process does."""
    state = model.state_dict()
    tensors = ((name, whole(state[name])) for name in sorted(state))
    with only_first() as is_writer:
        try:
            if is_writer:
                stream_safetensors(path, state, tensors, lambda: metadata)
        finally:
            for _ in tensors:
                pass


def _merged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole tensors of a divided network in the order of names, with LoRA's products added."""
    state = model.state_dict()
    for name in sorted(name for name in state if ".lora." not in name):
        tensor, layer = whole(state[name]), name.removesuffix(".weight")
        if f"{layer}.lora.b" in state and name.endswith(".weight"):
            tensor = tensor + whole(state[f"{layer}.lora.b"]) @ whole(state[f"{layer}.lora.a"])
        yield name, tensor


def read_shards(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows of some tensors of a file of ours that belong to this process."""
    path = from_first(path)
    saved = open_tensors(path.parent, [path.name])
    return {name: shard_like(saved[name].read().to(tensor.device), tensor) for name, tensor in like.items()}
