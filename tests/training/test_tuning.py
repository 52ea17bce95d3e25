"""Tuning freezes weights, adds LoRA, and writes the adapter file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import vitral
from tests.conftest import small_model
from vitral.training.config import Tune
from vitral.training.tuning import ADAPTER, add_lora, choose_parameters, merge_lora, save_adapter


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
    plain.load_state_dict(merge_lora(model.state_dict()))
    torch.testing.assert_close(plain(images), changed, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("what", "trained"), [("head", ["head"]), ("last-blocks", ["blocks.1", "norm", "head"]), ("lora", ["head"])]
)
def test_only_the_chosen_weights_are_trained(what: Any, trained: list[str]) -> None:
    model = small_model()
    choose_parameters(model, Tune(what=what, blocks=1, rank=2))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name.startswith(tuple(trained)) or ".lora." in name), name


def test_all_weights_are_trained() -> None:
    model = small_model()
    choose_parameters(model, Tune(what="all"))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(".lora." in name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("tune", "fragment"),
    [
        (Tune(what="last-blocks", blocks=3), r"tune\.blocks .* 1 to 2 .*got 3"),
        (Tune(what="lora", rank=49), r"tune\.rank .* 1 to 48 .*got 49"),
    ],
)
def test_more_than_the_network_has(tune: Tune, fragment: str) -> None:
    with pytest.raises(vitral.ConfigError, match=fragment):
        choose_parameters(small_model(), tune)


def test_lora_of_a_bit_is_refused() -> None:
    with pytest.raises(vitral.ConfigError, match=r"lora.*BiT.*tune\.what=head"):
        choose_parameters(vitral.create("bit-r26x1", num_classes=2), Tune(what="lora"))


@torch.no_grad()
@pytest.mark.parametrize("what", ["head", "lora"])
def test_an_adapter_comes_back(tmp_path: Path, what: Any) -> None:
    """The base and the adapter give the same logits as the tuned network."""
    base, tuned, path = small_model(), small_model(), tmp_path / "adapter.safetensors"
    tuned.load_state_dict(base.state_dict())
    choose_parameters(tuned, Tune(what=what, rank=2))
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.normal_(std=0.1)
    save_adapter(path, tuned, "base.safetensors", "0" * 64)
    adapted, images = small_model(), torch.randn(2, 3, 16, 16)
    adapted.load_state_dict(merge_lora({**base.state_dict(), **load_file(path)}))
    torch.testing.assert_close(adapted(images), tuned(images), atol=1e-5, rtol=0)
    assert (base(images) - tuned(images)).abs().max() > 1e-3
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()[ADAPTER]) == {"base": "base.safetensors", "base_sha256": "0" * 64}
