"""Activations for the backward pass, against what autograd saves: every kind of attention, and bfloat16."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from vitral.model.activations import count_activations
from vitral.model.config import ViTConfig
from vitral.model.network import build
from vitral.model.recording import record_attention
from vitral.model.sizes import named_config


def measure_kept(config: Any, batch: int, *, half: bool, recorded: bool) -> int:
    """Return the bytes of all distinct storages that autograd saves, except parameters."""
    model = build(config).train()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    recording = record_attention(model) if recorded else nullcontext()
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=half), recording:
        outputs = model(torch.randn(batch, 3, *config.image_hw))
    assert outputs.grad_fn is not None
    return sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in parameters)


@pytest.mark.parametrize(
    ("fields", "options", "tolerance"),
    [
        (dict(), dict(), 0.02),
        (dict(), dict(recorded=True), 0.02),
        (dict(), dict(half=True), 0.02),
        (dict(attention="axial"), dict(), 0.02),
        (dict(attention="axial"), dict(half=True), 0.02),
        (dict(attention="axial"), dict(recorded=True), 0.02),
        (dict(attention="axial", pool="mean"), dict(), 0.02),
        (dict(position="relative"), dict(), 0.02),
        (dict(position="relative"), dict(recorded=True), 0.02),
        (dict(position="relative", attention="axial"), dict(), 0.08),  # the bias of a line is not counted
    ],
    ids=str,
)
def test_stored_activations(fields: dict[str, Any], options: dict[str, bool], tolerance: float) -> None:
    config = named_config("vit-ti16", image_size=112, depth=4, **fields)
    kinds = {"half": False, "recorded": False} | options
    measured = measure_kept(config, 3, **kinds) - measure_kept(config, 2, **kinds)  # one image has views of its own
    precision = "bfloat16" if kinds["half"] else "float32"
    counted = count_activations(config, precision=precision, recorded=kinds["recorded"])
    assert counted.stored == pytest.approx(measured, rel=tolerance)


def test_checkpointing_keeps_the_inputs_of_the_blocks() -> None:
    config = named_config("vit-b16")
    assert isinstance(config, ViTConfig)
    counted = count_activations(config)
    assert counted.checkpointed < counted.stored / 5
    assert counted.checkpointed > config.blocks * 197 * 768 * 4


def test_baselines_have_no_blocks_to_checkpoint() -> None:
    counted = count_activations(named_config("bit-r50x1"))
    assert counted.checkpointed == counted.stored
