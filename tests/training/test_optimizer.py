"""Optimizer steps against values computed by hand."""

from math import sqrt
from typing import Any

import pytest
import torch
from torch import nn

import vitral
from tests.conftest import small_model
from vitral.model.parameter_groups import is_matrix
from vitral.training.config import ResolvedOptim
from vitral.training.optimizer import Muon, Optimizer, orthogonalize
from vitral.training.state_files import SavedTensor


def groups_by_name(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    groups = [group for part in optimizer.optimizers for group in part.param_groups]
    return {name: group for group in groups for name in group["names"]}


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.double()


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_only_matrices_decay_and_lower_layers_learn_more_slowly(name: Any) -> None:
    model = small_model(registers=2, pool="map", class_token=True, layer_scale=0.1)
    groups = groups_by_name(Optimizer(model, ResolvedOptim(name=name, weight_decay=0.1, layer_decay=0.5)))
    assert groups.keys() == dict(model.named_parameters()).keys()
    decaying = {name for name, group in groups.items() if group["weight_decay"] == 0.1}
    assert all(groups[name]["weight_decay"] == 0 for name in groups.keys() - decaying)
    assert {"patches.project.weight", "blocks.1.mlp.contract.weight", "head.weight"} <= decaying
    still = {"class_token", "registers", "positions.0.table", "pool.probe", "norm.weight", "head.bias"}
    assert not still & decaying
    assert not any("norm" in name or "scale" in name for name in decaying)
    scales = {name: group["scale"] for name, group in groups.items()}
    assert scales["head.weight"] == scales["norm.bias"] == scales["pool.probe"] == 1
    assert scales["blocks.1.norm1.weight"] == 0.5
    assert scales["blocks.0.norm1.weight"] == 0.25
    assert scales["patches.project.weight"] == scales["class_token"] == scales["positions.0.table"] == 0.125


def test_sgd_by_hand() -> None:
    model = small_model()
    optimizer = Optimizer(model, ResolvedOptim(name="sgd", lr=0.5, momentum=0.9, weight_decay=0.1))
    expected = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    velocity = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step, lr in enumerate((0.5, 0.25)):
        set_gradients(model, step)
        for name, parameter in model.named_parameters():
            decay = 0.1 if is_matrix(name, parameter) else 0.0
            velocity[name] = 0.9 * velocity[name] + gradient_of(parameter)
            expected[name] = expected[name] * (1 - lr * decay) - lr * velocity[name]
        optimizer.step(lr / 0.5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.double(), expected[name], atol=1e-5, rtol=1e-5)


def test_adamw_by_hand() -> None:
    model = small_model()
    optimizer = Optimizer(model, ResolvedOptim(name="adamw", lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1))
    value = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    first = {name: torch.zeros_like(x) for name, x in value.items()}
    second = {name: torch.zeros_like(x) for name, x in value.items()}
    for step in range(1, 4):
        set_gradients(model, step)
        for name, parameter in model.named_parameters():
            gradient = gradient_of(parameter)
            value[name] *= 1 - 0.01 * (0.1 if is_matrix(name, parameter) else 0.0)
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.99 * second[name] + 0.01 * gradient**2
            update = (first[name] / (1 - 0.9**step)) / ((second[name] / (1 - 0.99**step)).sqrt() + 1e-6)
            value[name] -= 0.01 * update
        optimizer.step(1.0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.double(), value[name], atol=1e-5, rtol=1e-5)


def test_muon_orthogonalizes_q_k_and_v_each_by_itself() -> None:
    model = small_model()
    optimizer = Optimizer(model, ResolvedOptim(name="muon", lr=0.1, weight_decay=0.0))
    names = [name for part in optimizer.optimizers for group in part.param_groups for name in group["names"]]
    assert {"blocks.0.attention.to_qkv.weight.q", "blocks.1.attention.to_qkv.weight.v"} <= set(names)
    assert len(names) == len(set(names))
    before = model.blocks[0].get_submodule("attention.to_qkv").weight.detach().clone()  # type: ignore[operator]
    set_gradients(model, 0)
    optimizer.step(1.0)
    moved = model.blocks[0].get_submodule("attention.to_qkv").weight.detach() - before  # type: ignore[operator]
    for part in moved.chunk(3):
        spectrum = torch.linalg.svdvals(part / part.norm() * sqrt(48))
        assert spectrum.quantile(0.1) > 0.6  # nearly all directions about equally far
        assert spectrum.max() < 1.4
    whole = torch.linalg.svdvals(moved)
    assert whole.max() / whole.min() > 1.05  # otherwise the three together would be orthogonal, too


def test_muon_moves_as_torchs_muon_does_up_to_bfloat16() -> None:
    torch.manual_seed(0)
    shapes = [(24, 24), (24, 48), (48, 24), (24, 24)]
    ours, theirs = ([nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    settings = dict(lr=0.1, weight_decay=0.01, momentum=0.95)
    muon, peer = Muon(ours, **settings), torch.optim.Muon(theirs, **settings, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        for left, right in zip(ours, theirs, strict=True):
            left.grad = torch.randn_like(left)
            right.grad = left.grad.clone()
        muon.step()
        peer.step()
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, atol=0.02, rtol=0.0)  # the updates add up to about 0.1
        assert (left - 1).abs().mean() > 0.02


def test_orthogonalize_equals_the_iteration_in_float64() -> None:
    group = dict(ns_coefficients=(3.4445, -4.7750, 2.0315), eps=1e-7, ns_steps=5)
    matrices = torch.randn(3, 8, 12)
    for matrix, result in zip(matrices.double(), orthogonalize(matrices, group), strict=True):
        x = matrix / matrix.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        torch.testing.assert_close(result.double(), x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "momentum", "expected"),
    [("sgd", None, 0.9), ("sgd", 0.5, 0.5), ("muon", None, 0.95), ("muon", 0.5, 0.5), ("muon", 0.0, 0.0)],
)
def test_momentum_is_used(name: Any, momentum: float | None, expected: float) -> None:
    optimizer = Optimizer(small_model(), ResolvedOptim(name=name, momentum=momentum))
    groups = groups_by_name(optimizer)
    block = "blocks.0.mlp.expand.weight"
    assert groups[block]["momentum"] == expected
    if name == "muon":
        assert "momentum" not in groups["head.weight"]  # AdamW


def as_saved(tensors: dict[str, torch.Tensor]) -> dict[str, SavedTensor]:
    return {name: SavedTensor.in_memory(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_the_next_step_is_the_same_with_a_loaded_state(name: Any) -> None:
    first, second = small_model(), small_model()
    optim = ResolvedOptim(name=name, lr=0.01, layer_decay=0.9)
    optimizer = Optimizer(first, optim)
    set_gradients(first, 0)
    optimizer.step(0.5)
    second.load_state_dict(first.state_dict())
    restored = Optimizer(second, optim)
    restored.load(as_saved(optimizer.state()))
    for model, stepped in ((first, optimizer), (second, restored)):
        set_gradients(model, 1)
        stepped.step(1.0)
    for parameter, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_a_state_of_another_shape_is_refused() -> None:
    model = small_model()
    optimizer = Optimizer(model, ResolvedOptim())
    set_gradients(model, 0)
    optimizer.step(1.0)
    state = optimizer.state()
    for forged in (torch.zeros(3), torch.zeros(7, 48, dtype=torch.int64)):
        with pytest.raises(vitral.ConfigError, match=r"head\.weight.*exp_avg"):
            Optimizer(small_model(), ResolvedOptim()).load(as_saved({**state, "0/head.weight/exp_avg": forged}))


@pytest.mark.parametrize(("name", "key"), [("adamw", "exp_avg"), ("adamw", "step"), ("sgd", "momentum_buffer")])
def test_an_incomplete_or_scalar_state_is_refused(name: Any, key: str) -> None:
    model = small_model()
    optimizer = Optimizer(model, ResolvedOptim(name=name))
    set_gradients(model, 0)
    optimizer.step(1.0)
    state, entry = optimizer.state(), f"0/head.weight/{key}"
    renamed = {**{name: tensor for name, tensor in state.items() if name != entry}, f"{entry}s": state[entry]}
    for forged in (renamed, {**state, entry: torch.zeros(2 if key == "step" else ())}):
        with pytest.raises(vitral.ConfigError, match=rf"head\.weight.*{key}"):
            Optimizer(small_model(), ResolvedOptim(name=name)).load(as_saved(forged))
