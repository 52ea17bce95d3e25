"""Relevance, against an independent implementation of Chefer et al. (2021)."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vitral
from tests.conftest import small_model
from vitral import ConfigError, DataError
from vitral.inspection import relevance, relevance_bytes, rollout

POOLS: list[dict[str, Any]] = [
    dict(depth=3),
    dict(registers=2),
    dict(pool="mean"),
    dict(pool="token+mean", registers=1),
    dict(pool="map"),
    dict(pool="mean", norm_after_pool=True),
    dict(attention="axial"),
    dict(patch_size=1, stem=vitral.ConvStem(widths=(16, 16))),
]


def chefer(model: vitral.ViT, image: Tensor, label: int) -> Tensor:
    """Return the relevance of a class-token model, by equations 5 and 6 of the paper.

    The encoder is written out here from the weights: R = R + mean_h((dy/dA * A)+) R for each layer, and the row of
    the class token."""
    state, heads = model.state_dict(), model.config.heads
    rows = F.unfold(image[None], 4, stride=4)[0].T @ state["patches.project.weight"].T + state["patches.project.bias"]
    x = torch.cat([state["class_token"], rows]) + state["positions.0.table"]
    attention = []
    for index in range(model.config.depth):
        weight = {k.removeprefix(f"blocks.{index}."): v for k, v in state.items() if k.startswith(f"blocks.{index}.")}
        y = F.layer_norm(x, (48,), weight["norm1.weight"], weight["norm1.bias"], 1e-6)
        qkv = y @ weight["attention.to_qkv.weight"].T + weight["attention.to_qkv.bias"]
        q, k, v = (part.view(len(x), heads, -1).transpose(0, 1) for part in qkv.split(48, dim=1))
        matrix = torch.softmax(q @ k.transpose(1, 2) / 4.0, dim=-1).requires_grad_()  # head_dim is 16
        attention.append(matrix)
        y = (matrix @ v).transpose(0, 1).reshape(len(x), 48)
        x = x + y @ weight["attention.to_out.weight"].T + weight["attention.to_out.bias"]
        y = F.layer_norm(x, (48,), weight["norm2.weight"], weight["norm2.bias"], 1e-6)
        y = F.gelu(y @ weight["mlp.expand.weight"].T + weight["mlp.expand.bias"])
        x = x + y @ weight["mlp.contract.weight"].T + weight["mlp.contract.bias"]
    pooled = F.layer_norm(x, (48,), state["norm.weight"], state["norm.bias"], 1e-6)[0]
    logits = pooled @ state["head.weight"].T + state["head.bias"]
    torch.testing.assert_close(logits[None], model(image[None]), atol=1e-4, rtol=1e-4)  # the same network
    gradients = torch.autograd.grad(logits[label], attention)
    result = torch.eye(len(x))
    for matrix, gradient in zip(attention, gradients, strict=True):
        result = result + (matrix * gradient).clamp(min=0).mean(dim=0) @ result
    return result[0, 1:].detach().view(4, 4)


def test_it_equals_an_independent_implementation() -> None:
    model, images = small_model(depth=3), torch.randn(3, 3, 16, 16)
    labels = [4, 0, 6]
    maps = relevance(model, images, labels)
    assert maps.shape == (3, 4, 4)
    for image, label, map in zip(images, labels, maps, strict=True):
        expected = chefer(model, image, label)
        torch.testing.assert_close(map, expected, atol=1e-6 * expected.max().item() + 1e-9, rtol=1e-3)


@pytest.mark.parametrize("variant", POOLS, ids=str)
def test_mixed_sizes_and_batches_agree(variant: dict[str, Any]) -> None:
    model = small_model(**variant)
    images = [torch.randn(3, 16, 16), torch.randn(3, 8, 24), torch.randn(3, 16, 16)]
    maps = relevance(model, images, [1, 2, 3])
    assert [tuple(map.shape) for map in maps] == [(4, 4), (2, 6), (4, 4)]
    for image, label, map in zip(images, [1, 2, 3], maps, strict=True):
        single = relevance(model, image[None], torch.tensor([label]))[0]
        torch.testing.assert_close(map, single, atol=1e-5 * single.max().item(), rtol=1e-3)
        assert (map >= 0).all()
        assert map.max() > 0
        assert not map.requires_grad


def test_mean_pooling_starts_from_the_contribution_of_each_patch() -> None:
    """Without attention between patches, relevance is the positive contribution of each patch to the logit."""
    model = small_model(pool="mean")
    with torch.no_grad():
        for block in model.blocks:
            block.get_parameter("attention.to_out.weight").zero_()  # attention changes nothing: its gradient is 0
    images = torch.randn(1, 3, 16, 16)
    contributions = (model.features(images).patches[0] @ model.head.weight[2]).clamp(min=0) / 16
    expected = (contributions / contributions.sum()).view(4, 4).detach()
    torch.testing.assert_close(relevance(model, images, 2)[0], expected, atol=1e-6, rtol=1e-4)


def test_the_predicted_class_is_the_default() -> None:
    model, images = small_model(), torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(relevance(model, images), relevance(model, images, model(images).argmax(1)))
    other = (model(images).argmax(1) + 1) % 7
    assert not torch.allclose(relevance(model, images), relevance(model, images, other), rtol=1e-2)


@pytest.mark.parametrize("mode", ["frozen", "inference", "no_grad", "training", "checkpointing"])
def test_it_works_however_the_model_is_used(mode: str) -> None:
    model, images = small_model(), torch.randn(2, 3, 16, 16)
    expected = relevance(model, images)
    if mode == "frozen":
        model.requires_grad_(False)
    if mode == "training":
        model.train()
    model.gradient_checkpointing = mode == "checkpointing"
    with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode not in ("no_grad", "inference")):
        result = relevance(model, images.clone())
    torch.testing.assert_close(result, expected)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_wrong_labels_and_headless_models_are_refused() -> None:
    model, images = small_model(), torch.randn(2, 3, 16, 16)
    for labels in ([1], [1, 7], [-1, 0], torch.tensor([0.5, 1.0]), torch.tensor([True, False])):
        with pytest.raises(DataError, match="2 class indices from 0 to 6"):
            relevance(model, images, labels)
    with pytest.raises(ConfigError, match="predicts classes"):
        relevance(small_model(num_classes=0), images)
    with pytest.raises(ConfigError, match="predicts classes"):
        relevance(small_model(pool="none"), images)
    assert rollout(small_model(num_classes=0), images).shape == (2, 4, 4)


@pytest.mark.parametrize("trainable", [True, False])
def test_memory_is_what_the_backward_pass_saves(trainable: bool) -> None:
    """Count the bytes of the tensors that autograd keeps, besides the weights."""
    model = vitral.create("vit-ti16", num_classes=3, image_size=160).requires_grad_(trainable)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() if storage.data_ptr() not in weights else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        relevance(model, torch.randn(1, 3, 160, 160), 0)
    one_layer = 4 * 3 * 101 * 101
    assert sum(kept.values()) == pytest.approx(relevance_bytes(model.config, (10, 10)) - 3 * one_layer, rel=0.05)
    assert all(parameter.requires_grad == trainable for parameter in model.parameters())


MEASURE = """
import sys, torch, vitral
from vitral.inspection import relevance, relevance_bytes

def kilobytes(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

torch.set_num_threads(1)
model = vitral.create("vit-ti16", num_classes=3, image_size=512, patch_size=16, depth=16).eval()
images = torch.randn(1, 3, 512, 512)
relevance(model, images[..., :64, :64], 0)
open("/proc/self/clear_refs", "w").write("5")  # the peak starts here
before = kilobytes("VmRSS")
relevance(model, images, 0)
print((kilobytes("VmHWM") - before) * 1024 / relevance_bytes(model.config, (32, 32)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_grows_as_much_as_stated() -> None:
    """Gradients of all layers at once would add half. glibc returns freed tensors to the system at once here."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEASURE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert 0.85 < float(done.stdout) < 1.15
