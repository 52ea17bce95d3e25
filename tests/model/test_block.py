"""Blocks apply dropout as in the paper, stochastic depth and layer scale."""

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import small_model
from vitral import ViT


def names_of_dropouts(model: ViT) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Dropout)]


def test_dropout_modules_are_those_of_the_paper() -> None:
    """After adding positions, after the attention's output, and after each of the two MLP layers (B.1)."""
    assert names_of_dropouts(small_model(dropout=0.1, depth=1)) == [
        "dropout",
        "blocks.0.after_attention.dropout",
        "blocks.0.mlp.dropout",
        "blocks.0.after_mlp.dropout",
    ]
    assert names_of_dropouts(small_model()) == []


def test_each_dropout_is_applied_once_as_in_the_paper() -> None:
    model = small_model(dropout=0.3, depth=1).train()
    block = model.blocks[0]
    outputs: dict[str, Tensor] = {}
    inputs: dict[str, list[Tensor]] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, i, o, name=name: outputs.__setitem__(name, o))
        if isinstance(module, nn.Dropout):
            module.register_forward_pre_hook(lambda m, i, name=name: inputs.setdefault(name, []).append(i[0]))
    images = torch.randn(2, 3, 16, 16)
    model(images)
    tokens = model.prepend_extras(model.patches(images))
    expected = {
        "dropout": tokens + model.positions[0].table,
        "blocks.0.after_attention.dropout": outputs["blocks.0.attention.to_out"],
        "blocks.0.mlp.dropout": outputs["blocks.0.mlp.activate"],
        "blocks.0.after_mlp.dropout": outputs["blocks.0.mlp.contract"],
    }
    assert {name: len(calls) for name, calls in inputs.items()} == dict.fromkeys(expected, 1)
    for name, value in expected.items():
        assert torch.equal(inputs[name][0], value), name
    # The outputs of the dropouts are used: by the last layer of the MLP, and by the residual sums.
    dropped = outputs["blocks.0.mlp.dropout"]
    assert torch.equal(block.mlp.contract(dropped), outputs["blocks.0.mlp.contract"])
    total = outputs["dropout"] + outputs["blocks.0.after_attention.dropout"] + outputs["blocks.0.after_mlp.dropout"]
    torch.testing.assert_close(outputs["blocks.0"], total)


def test_the_head_has_no_dropout() -> None:
    assert not any("pool" in name for name in names_of_dropouts(small_model(dropout=0.1, pool="map")))


@pytest.mark.parametrize("field", ["dropout", "attention_dropout", "drop_path"])
def test_randomness_only_in_training(field: str) -> None:
    model = small_model(**{field: 0.5})
    images = torch.randn(4, 3, 16, 16)
    assert torch.equal(model(images), model(images))
    torch.testing.assert_close(model(images), small_model()(images))
    model.train()
    assert not torch.equal(model(images), model(images))


def test_attention_dropout_while_recording() -> None:
    """The mean over many draws equals that of the fused kernel."""
    import vitral

    model = small_model(attention_dropout=0.3, depth=1).train()
    images = torch.randn(1, 3, 16, 16).expand(2000, -1, -1, -1)
    with torch.no_grad():
        fused = model(images).mean(0)
        with vitral.record_attention(model) as maps:
            explicit = model(images).mean(0)
    torch.testing.assert_close(fused, explicit, atol=0.03, rtol=0)
    torch.testing.assert_close(maps[0].sum(-1), torch.ones(2000, 3, 17))  # recorded before dropout


def test_stochastic_depth_drops_whole_images_and_keeps_the_mean() -> None:
    model = small_model(drop_path=0.4, depth=3).train()
    branch = model.blocks[2].after_mlp
    assert small_model(drop_path=0.4, depth=1).blocks[0].after_mlp.drop_path == 0.4
    assert [block.after_mlp.drop_path for block in model.blocks] == pytest.approx([0, 0.2, 0.4])
    images = torch.randn(500, 3, 16, 16)
    _, packing = model.embed(images)
    out = branch(torch.ones(500, 17, 48), packing)
    per_image = out.flatten(1)
    assert ((per_image == 0).all(1) | torch.isclose(per_image, torch.tensor(1 / 0.6)).all(1)).all()
    assert (per_image[:, 0] == 0).float().mean().item() == pytest.approx(0.4, abs=0.07)


def test_stochastic_depth_drops_whole_images_when_packed() -> None:
    model = small_model(drop_path=0.5, depth=2).train()
    images = [torch.randn(3, *size) for size in [(16, 16), (8, 24)] * 20]
    x, packing = model.embed(images)
    out = model.blocks[1].after_mlp(torch.ones_like(x), packing)
    per_image = packing.per_image(packing.split(out))
    assert {float(value) for factors in per_image for value in factors.unique()} == {0.0, 2.0}
    assert all(len(factors.unique()) == 1 for factors in per_image)


def test_layer_scale_multiplies_each_branch() -> None:
    model, plain = small_model(layer_scale=0.1, depth=1), small_model(depth=1)
    state = model.state_dict()
    for branch, layer in (("after_attention", "attention.to_out"), ("after_mlp", "mlp.contract")):
        scale = state.pop(f"blocks.0.{branch}.scale")
        for kind in ("weight", "bias"):
            tensor = state[f"blocks.0.{layer}.{kind}"]
            state[f"blocks.0.{layer}.{kind}"] = tensor * (scale[:, None] if tensor.ndim == 2 else scale)
    plain.load_state_dict(state)
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(images), plain(images), atol=1e-5, rtol=1e-5)
