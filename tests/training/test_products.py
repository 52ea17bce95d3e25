"""Products by oneDNN have the same values and gradients within rounding, and only large float32 ones are replaced."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vitral
from tests.conftest import small_model
from tests.training.short_runs import TINY, assert_equal, interrupt_at, read_weights, train
from vitral.training import kernels, products
from vitral.training.entry import train_events
from vitral.training.products import OneDnnProducts, has_onednn

ROUNDING = 1e-5
"""Relative to the largest value: sums of a few hundred products, in another order."""

needs_onednn = pytest.mark.skipif(not has_onednn(), reason="this build of torch has no oneDNN")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list of the shapes that oneDNN multiplies."""
    shapes: list[tuple[int, ...]] = []
    product = products._product

    def count(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append((*inputs.shape, weight.shape[0]))
        return product(inputs, weight, bias)

    monkeypatch.setattr(products, "_product", count)
    return shapes


def assert_close(actual: Tensor | None, expected: Tensor | None) -> None:
    assert actual is not None and expected is not None  # noqa: PT018
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= ROUNDING * expected.abs().max()


@needs_onednn
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(600, 48), (40, 16, 48), (5, 16, 8, 48)])
def test_values_and_gradients(counted: list[Any], shape: tuple[int, ...], has_bias: bool) -> None:
    results: list[list[Tensor | None]] = []
    for is_fast in (False, True):
        torch.manual_seed(0)
        inputs, weight = torch.randn(shape, requires_grad=True), torch.randn(80, 48, requires_grad=True)
        bias = torch.randn(80, requires_grad=True) if has_bias else None
        if is_fast:
            with OneDnnProducts():
                outputs = F.linear(inputs, weight, bias)
        else:
            outputs = F.linear(inputs, weight, bias)
        outputs.square().sum().backward()
        results.append([outputs, inputs.grad, weight.grad, *([bias.grad] if bias is not None else [])])
    for expected, actual in zip(*results, strict=True):
        assert_close(actual, expected)
    assert len(counted) == 3


@needs_onednn
def test_a_network_has_the_same_gradients(counted: list[Any]) -> None:
    model = small_model(depth=2).train()
    images = torch.randn(64, 3, 16, 16)
    gradients: list[dict[str, Tensor | None]] = []
    for context in (torch.enable_grad(), OneDnnProducts()):
        model.zero_grad()
        with context:
            loss = model(images).square().mean()
        loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, expected in gradients[0].items():
        assert_close(gradients[1][name], expected)
    assert len(counted) > 3 * 2 * 4  # qkv, output and two layers of the MLP in each block, with two gradients each
    assert (64, *reversed(gradients[0]["head.weight"].shape)) not in counted  # type: ignore[union-attr]


def test_other_products_are_not_replaced(counted: list[Any]) -> None:
    weight = torch.randn(8, 16)
    with OneDnnProducts():
        F.linear(torch.randn(511, 16), weight)
        F.linear(torch.randn(600, 16).double(), weight.double())
        F.linear(torch.randn(600, 16, device="meta"), weight.to("meta"))
        F.linear(torch.empty(0, 16), weight)
    assert counted == []


@needs_onednn
def test_a_resumed_run_repeats_the_choice_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_digits: None, counted: list[Any]
) -> None:
    monkeypatch.setattr(kernels, "MIN_STEPS", 1)
    monkeypatch.setattr(kernels, "_time_step", lambda job: 0.1 if job.learner.uses_onednn else 1.0)
    monkeypatch.setattr(kernels, "choose_compiling", lambda *arguments: pytest.fail("compiled"))
    settings: dict[str, Any] = dict(precision="float32", batch_size=40, epochs=1)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train("builtin:digits", whole, **settings)
    assert ["products", "onednn"] in [choice[:2] for choice in vitral.Run(whole).read_manifest()["choices"]]
    assert counted
    interrupt_at(4, train_events("builtin:digits", out=parts, **{**TINY, **settings}))
    counted.clear()
    list(train_events(resume=parts))
    assert counted
    assert_equal(read_weights(parts), read_weights(whole))
