"""ViT as an object: copied, pickled, stored, and with a new head."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import vitral
from tests.conftest import small_model
from vitral import ConfigError, ViT


@pytest.mark.parametrize("fields", [dict(), dict(pool="map", position="relative"), dict(attention="axial")], ids=str)
def test_copies_and_pickles_give_the_same_logits(fields: dict[str, Any]) -> None:
    model = small_model(**fields)
    images = torch.randn(1, 3, 16, 16)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(images), model(images))
        assert twin.config == model.config


def test_state_dict_survives_a_file() -> None:
    model = small_model(registers=1)
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    stored.seek(0)
    twin = ViT(model.config).eval()
    twin.load_state_dict(torch.load(stored, weights_only=True))
    images = torch.randn(1, 3, 16, 16)
    assert torch.equal(twin(images), model(images))


def test_state_dict_has_parameters_only() -> None:
    model = small_model(position="sincos-2d", pool="mean")
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_every_parameter_has_a_gradient() -> None:
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


@pytest.mark.parametrize("representation", [None, 9])
def test_reset_head(representation: int | None) -> None:
    model = small_model(representation=representation, head_bias=-1.5).double()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    features = model.features(images)
    assert model.reset_head(3) is model
    assert model.config.num_classes == 3
    assert torch.equal(model(images), torch.full((2, 3), -1.5, dtype=torch.float64))
    assert torch.equal(model.features(images).pooled, features.pooled)
    assert ViT(model.config).state_dict().keys() == model.state_dict().keys()


def test_reset_head_to_no_classes_and_back() -> None:
    model = small_model(head_bias=-1.5)
    images = torch.randn(2, 3, 16, 16)
    model.reset_head(0)
    assert (model.config.num_classes, model.config.head_bias) == (0, 0.0)
    assert torch.equal(model(images), model.features(images).pooled)
    assert model.reset_head(4)(images).shape == (2, 4)


@pytest.mark.parametrize("num_classes", [-1, True, 2**40])
def test_reset_head_checks_the_number_of_classes(num_classes: Any) -> None:
    model = small_model()
    head = model.head
    with pytest.raises(ConfigError, match="num_classes must be an integer"):
        model.reset_head(num_classes)
    assert model.head is head
    assert model.config.num_classes == 7


def test_new_head_outputs_its_bias() -> None:
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


def test_empty_batch_gives_empty_logits() -> None:
    for fields in (dict(), dict(attention="axial", position="relative"), dict(pool="map", registers=2)):
        assert small_model(**fields)(torch.randn(0, 3, 16, 16)).shape == (0, 7)
