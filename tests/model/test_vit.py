"""The model as an object: saved, copied, pickled, moved, and its eight steps."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import vitral
from tests.conftest import small_model
from vitral import ViT


@pytest.mark.parametrize("fields", [dict(), dict(pool="map", position="relative"), dict(attention="axial")], ids=str)
def test_copied_and_pickled_models_answer_the_same(fields: dict[str, Any]) -> None:
    model = small_model(**fields)
    images = torch.randn(1, 3, 16, 16)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(images), model(images))
        assert twin.config == model.config


def test_a_state_dict_goes_through_a_file() -> None:
    model = small_model(registers=1)
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    stored.seek(0)
    twin = ViT(model.config).eval()
    twin.load_state_dict(torch.load(stored, weights_only=True))
    images = torch.randn(1, 3, 16, 16)
    assert torch.equal(twin(images), model(images))


def test_the_state_holds_parameters_and_nothing_else() -> None:
    model = small_model(position="sincos-2d", pool="mean")
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_every_parameter_takes_part() -> None:
    for fields in (
        dict(),
        dict(pool="map", registers=2, layer_scale=0.1),
        dict(position="relative", attention="axial", class_token=True, pool="none"),
    ):
        model = small_model(**fields)
        model(torch.randn(2, 3, 16, 16)).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


def test_a_fresh_head_says_nothing_yet() -> None:
    model = vitral.create("vit-pico7", num_classes=5, head_bias=-1.5)
    assert torch.equal(model(torch.randn(2, 3, 28, 28)), torch.full((2, 5), -1.5))


def test_the_same_seed_gives_the_same_model() -> None:
    torch.manual_seed(5)
    first = vitral.create("vit-pico7")
    torch.manual_seed(5)
    second = vitral.create("vit-pico7")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("activation", ["tanh", "gelu", "relu"])
def test_activations_of_the_representation_layer(activation: Any) -> None:
    model = small_model(representation=9, representation_activation=activation)
    images = torch.randn(2, 3, 16, 16)
    hidden = model.representation[0](model.features(images).pooled)
    active = {"tanh": torch.tanh, "gelu": torch.nn.functional.gelu, "relu": torch.relu}[activation](hidden)
    assert torch.equal(model.head(active), model(images))


def test_an_empty_batch_gives_no_answers() -> None:
    for fields in (dict(), dict(attention="axial", position="relative"), dict(pool="map", registers=2)):
        assert small_model(**fields)(torch.randn(0, 3, 16, 16)).shape == (0, 7)
