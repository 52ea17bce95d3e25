"""The arithmetic of training against values worked out by hand."""

from math import cos, pi, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.conftest import small_model
from vitral.training.config import Mix, Optim, Tune
from vitral.training.mixing import as_targets, balanced_weights, cutmix, mix_batch, mixup, soft_loss
from vitral.training.muon import Muon, orthogonalised
from vitral.training.optimizer import Average, Optimizer, groups_of, is_matrix, layer_of
from vitral.training.schedule import factor
from vitral.training.tuning import add_lora, choose_parameters, merged_state


@pytest.mark.parametrize("schedule", ["cosine", "linear", "rsqrt", "stair", "constant"])
def test_the_learning_rate_at_every_step(schedule: Any) -> None:
    optim = Optim(lr=2.0, schedule=schedule, end_lr=0.5)
    found = [factor(optim, step, 20, 5) for step in range(20)]
    assert found[:5] == [0, 0.2, 0.4, 0.6, 0.8]
    for step in range(5, 20):
        progress = (step - 5) / 15
        expected = {
            "cosine": 0.25 + 0.75 * (1 + cos(pi * progress)) / 2,
            "linear": 0.25 + 0.75 * (1 - progress),
            "rsqrt": sqrt(5 / step),
            "stair": 1.0 if step < 6 else 0.1 if step < 12 else 0.01 if step < 18 else 0.001,
            "constant": 1.0,
        }[schedule]
        assert found[step] == pytest.approx(expected, abs=1e-12)


def test_only_matrices_decay_and_layers_learn_at_their_rates() -> None:
    model = small_model(registers=2, pool="map", class_token=True, layer_scale=0.1)
    decaying = {name for name, parameter in model.named_parameters() if is_matrix(name, parameter)}
    assert "patches.project.weight" in decaying
    assert "blocks.1.mlp.contract.weight" in decaying
    assert "head.weight" in decaying
    for name in ("class_token", "registers", "positions.0.table", "pool.probe", "norm.weight", "head.bias"):
        assert name not in decaying
    assert not any("norm" in name or "scale" in name for name in decaying)
    scales = {name: group.scale for group in groups_of(model, Optim(layer_decay=0.5)) for name in group.names}
    assert scales["head.weight"] == scales["norm.bias"] == scales["pool.probe"] == 1
    assert scales["blocks.1.norm1.weight"] == 0.5
    assert scales["blocks.0.norm1.weight"] == 0.25
    assert scales["patches.project.weight"] == scales["class_token"] == scales["positions.0.table"] == 0.125
    assert layer_of("blocks.11.mlp.expand.weight", 12) == 12


def gradients(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_sgd_by_hand() -> None:
    model = small_model()
    optimizer = Optimizer(model, Optim(name="sgd", momentum=0.9, weight_decay=0.1), peak=0.5)
    before = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    speed = {name: torch.zeros_like(value) for name, value in before.items()}
    for step, rate in enumerate((0.5, 0.25)):
        gradients(model, step)
        for name, parameter in model.named_parameters():
            decay = 0.1 if is_matrix(name, parameter) else 0.0
            speed[name] = 0.9 * speed[name] + parameter.grad.double()  # type: ignore[union-attr]
            before[name] = before[name] * (1 - rate * decay) - rate * speed[name]
        optimizer.step(rate / 0.5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.double(), before[name], atol=1e-5, rtol=1e-5)


def test_adamw_by_hand() -> None:
    model = small_model()
    optimizer = Optimizer(model, Optim(name="adamw", betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1), peak=0.01)
    value = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    first = {name: torch.zeros_like(x) for name, x in value.items()}
    second = {name: torch.zeros_like(x) for name, x in value.items()}
    for step in range(1, 4):
        gradients(model, step)
        for name, parameter in model.named_parameters():
            gradient = parameter.grad.double()  # type: ignore[union-attr]
            value[name] *= 1 - 0.01 * (0.1 if is_matrix(name, parameter) else 0.0)
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.99 * second[name] + 0.01 * gradient**2
            moved = (first[name] / (1 - 0.9**step)) / ((second[name] / (1 - 0.99**step)).sqrt() + 1e-6)
            value[name] -= 0.01 * moved
        optimizer.step(1.0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.double(), value[name], atol=1e-5, rtol=1e-5)


def test_muon_orthogonalises_q_k_and_v_each_by_itself() -> None:
    model = small_model()
    optimizer = Optimizer(model, Optim(name="muon", weight_decay=0.0), peak=0.1)
    names = [name for part in optimizer.optimizers for group in part.param_groups for name in group["names"]]
    assert {"blocks.0.attention.to_qkv.weight.q", "blocks.1.attention.to_qkv.weight.v"} <= set(names)
    assert len(names) == len(set(names))
    before = model.blocks[0].get_submodule("attention.to_qkv").weight.detach().clone()  # type: ignore[operator]
    gradients(model, 0)
    optimizer.step(1.0)
    moved = model.blocks[0].get_submodule("attention.to_qkv").weight.detach() - before  # type: ignore[operator]
    for part in moved.chunk(3):
        spectrum = torch.linalg.svdvals(part / part.norm() * sqrt(48))
        assert spectrum.quantile(0.1) > 0.6  # nearly all directions about equally far
        assert spectrum.max() < 1.4
    head = torch.linalg.svdvals(moved)
    assert head.max() / head.min() > 1.05  # as a whole it would have been orthogonal, too


def test_muon_moves_as_torchs_muon_does_up_to_bfloat16() -> None:
    torch.manual_seed(0)
    shapes = [(24, 24), (24, 48), (48, 24), (24, 24)]
    ours, theirs = ([nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    settings = dict(lr=0.1, weight_decay=0.01, momentum=0.95)
    mine, peer = Muon(ours, **settings), torch.optim.Muon(theirs, **settings, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        for left, right in zip(ours, theirs, strict=True):
            left.grad = torch.randn_like(left)
            right.grad = left.grad.clone()
        mine.step()
        peer.step()
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, atol=0.02, rtol=0.0)  # moves are about 0.1 in all
        assert (left - 1).abs().mean() > 0.02


def test_orthogonalising_equals_the_iteration_in_float64() -> None:
    group = dict(ns_coefficients=(3.4445, -4.7750, 2.0315), eps=1e-7, ns_steps=5)
    matrices = torch.randn(3, 8, 12)
    for matrix, found in zip(matrices.double(), orthogonalised(matrices, group), strict=True):
        x = matrix / matrix.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        torch.testing.assert_close(found.double(), x, atol=1e-5, rtol=1e-5)


def test_the_average_follows() -> None:
    model = small_model()
    average = Average(model, 0.9)
    start = model.norm.weight.detach().clone()
    with torch.no_grad():
        model.norm.weight.add_(1.0)
    average.update(model)
    average.update(model)
    torch.testing.assert_close(average.values["norm.weight"], start + 1 - 0.81)


def test_mixup_and_cutmix_mix_pictures_and_labels_alike() -> None:
    images, targets = torch.arange(4.0)[:, None, None, None].expand(4, 3, 8, 8).clone(), torch.eye(4)
    mixed, labels = mixup(images, targets, 0.5, np.random.default_rng(0))
    weight = np.random.default_rng(0).beta(0.5, 0.5)
    weight = max(weight, 1 - weight)
    assert labels[1].tolist() == pytest.approx([1 - weight, weight, 0, 0])
    assert mixed[1, 0, 0, 0].item() == pytest.approx(weight * 1 + (1 - weight) * 0)
    for seed in range(20):
        mixed, labels = cutmix(images, targets, 1.0, np.random.default_rng(seed))
        covered = (mixed[1] == 0).float().mean().item()
        assert labels[1].tolist() == pytest.approx([covered, 1 - covered, 0, 0], abs=1e-6)
    same, _ = mix_batch(images, targets, Mix(), np.random.default_rng(0))
    assert same is images


def test_losses_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 0.5]])
    targets = as_targets(torch.tensor([0, 2]), 3, 0.3)
    assert targets[0].tolist() == pytest.approx([0.8, 0.1, 0.1])
    log = logits.double().log_softmax(1)
    expected = -(targets * log).sum(1).mean()
    assert soft_loss(logits, targets, "softmax", None).item() == pytest.approx(expected.item(), abs=1e-6)
    probability = logits.double().sigmoid()
    each = -(targets * probability.log() + (1 - targets) * (1 - probability).log())
    assert soft_loss(logits, targets, "sigmoid", None).item() == pytest.approx(each.sum(1).mean().item(), abs=1e-6)
    weights = balanced_weights([30, 10, 0])
    assert weights.tolist() == pytest.approx([2 / 3, 2.0, 0.0])
    labels = torch.tensor([0, 1])
    weighted = torch.nn.functional.cross_entropy(logits, labels, weight=weights)
    assert soft_loss(logits, as_targets(labels, 3, 0), "softmax", weights).item() == pytest.approx(weighted.item())


@torch.no_grad()
def test_lora_starts_as_the_base_and_merges_into_it() -> None:
    model = small_model()
    images = torch.randn(2, 3, 16, 16)
    before = model(images)
    add_lora(model, 4)
    torch.testing.assert_close(model(images), before, atol=1e-6, rtol=0)
    for name, parameter in model.named_parameters():
        if name.endswith(".lora.b"):
            parameter.normal_(std=0.1)
    changed = model(images)
    assert (changed - before).abs().max() > 1e-3
    plain = small_model()
    plain.load_state_dict(merged_state(model.state_dict()))
    torch.testing.assert_close(plain(images), changed, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("what", "trained"), [("head", ["head"]), ("last-blocks", ["blocks.1", "norm", "head"]), ("lora", ["head"])]
)
def test_what_is_trained(what: Any, trained: list[str]) -> None:
    model = small_model()
    choose_parameters(model, Tune(what=what, blocks=1, rank=2))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name.startswith(tuple(trained)) or ".lora." in name), name


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_parts_of_a_batch_add_up_to_its_loss_with_class_weights(kind: str) -> None:
    logits, weights = torch.randn(12, 4), torch.tensor([0.2, 1.0, 3.0, 0.5])
    targets = as_targets(torch.randint(0, 4, (12,)), 4, 0.1)
    whole = soft_loss(logits, targets, kind, weights)
    parts = [soft_loss(logits[at : at + 4], targets[at : at + 4], kind, weights, whole=targets) for at in (0, 4, 8)]
    torch.testing.assert_close(sum(parts), whole)
    yes, no = torch.nn.functional.logsigmoid(logits), torch.nn.functional.logsigmoid(-logits)
    by_hand = -(weights * targets * yes + (1 - targets) * no).sum() / 12  # the yes of a rare class counts more
    if kind == "sigmoid":
        torch.testing.assert_close(whole, by_hand)
