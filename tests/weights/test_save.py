"""Save only models that the file loads as the same network."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import vitral
from tests.conftest import small_model
from vitral.model.block import Block
from vitral.weights.checkpoint import default_preprocess


class LouderBlock(Block):
    """A block of the same tensors that computes something else."""

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        return 2 * super().forward(*arguments, **options)


class OtherViT(vitral.ViT):
    """A subclass of the whole network."""


def swap_block(model: vitral.ViT) -> None:
    block = LouderBlock(model.config, 0)
    block.load_state_dict(model.blocks[0].state_dict())
    model.blocks[0] = block


def swap_activation(model: vitral.ViT) -> None:
    model.blocks[1].mlp.activate = nn.ReLU()


def add_module(model: vitral.ViT) -> None:
    model.norm.add_module("extra", nn.Identity())


def replace_forward(model: vitral.ViT) -> None:
    model.head.forward = lambda x: -x  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (swap_block, ["blocks.0", "LouderBlock", "vitral.model.block.Block"]),
        (swap_activation, ["blocks.1.mlp.activate", "ReLU", "GELU"]),
        (add_module, ["norm.extra", "Identity", "missing"]),
        (replace_forward, ["head"]),
    ],
)
def test_other_modules_are_refused(change: Any, names: list[str], tmp_path: Path) -> None:
    model = small_model()
    change(model)
    with pytest.raises(vitral.WeightsError) as caught:
        vitral.save(model, tmp_path / "x.safetensors")
    for name in names:
        assert name in str(caught.value)
    assert "torch.save(model.state_dict()" in str(caught.value.hint)
    assert not list(tmp_path.iterdir())


def test_a_subclass_of_the_network_is_refused(tmp_path: Path) -> None:
    model = OtherViT(small_model().config)
    with pytest.raises(vitral.WeightsError, match=r"the model itself.*OtherViT.*vitral\.model\.vit\.ViT"):
        vitral.save(model, tmp_path / "x.safetensors")


@torch.no_grad()
def test_a_parametrized_tensor_is_saved_with_its_value(tmp_path: Path) -> None:
    model = small_model()
    parametrizations.weight_norm(model.head)  # type: ignore[arg-type]
    vitral.save(model, tmp_path / "x.safetensors")
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(vitral.load(tmp_path / "x.safetensors").model(images), model(images), atol=1e-6, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_models_are_saved_as_what_they_wrap(whole: bool, tmp_path: Path) -> None:
    model = small_model()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compiled: Any = torch.compile(model) if whole else model
    if not whole:
        model.blocks[0] = torch.compile(model.blocks[0])  # type: ignore[assignment]
    vitral.save(compiled, tmp_path / "x.safetensors")
    state = vitral.load(tmp_path / "x.safetensors").model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_forward_hooks_are_noted(tmp_path: Path) -> None:
    model = small_model()
    model.blocks[1].register_forward_hook(lambda module, inputs, outputs: outputs)
    written = vitral.save(model, tmp_path / "x.safetensors")
    assert any("forward hooks of blocks.1" in note for note in written.notes)


def test_a_trained_mode_or_dtype_is_not_another_network(tmp_path: Path) -> None:
    vitral.save(small_model(dropout=0.1, drop_path=0.1, layer_scale=0.1).bfloat16().train(), tmp_path / "x.safetensors")
    assert vitral.load(tmp_path / "x.safetensors").model.config.dropout == 0.1


@pytest.mark.parametrize("dialect", ["timm", "torchvision"])
def test_saving_warns_of_the_constants_of_a_library(dialect: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=rf"{dialect} computes with norm_eps=1e-06"):
        written = vitral.save(small_model(norm_eps=1e-12), tmp_path / "x.safetensors", dialect=dialect)
    assert written.constants == {"norm_eps": 1e-6}
    assert any("norm_eps=1e-06" in note for note in written.notes)
    assert vitral.save(small_model(), tmp_path / "y.safetensors", dialect=dialect).constants == {}


def test_a_checkpoint_takes_one_label_per_class() -> None:
    model = small_model()
    for labels in (("a", "b"), "abcdefg", 5):
        with pytest.raises(vitral.ConfigError, match="label"):
            vitral.Checkpoint(model=model, preprocess=default_preprocess(model), labels=labels)  # type: ignore[arg-type]
    checkpoint = vitral.Checkpoint(model=model, preprocess=default_preprocess(model), labels=list("abcdefg"))  # type: ignore[arg-type]
    assert checkpoint.labels == tuple("abcdefg")
