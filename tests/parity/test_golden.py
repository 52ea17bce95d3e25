"""Logits equal those of Google's own JAX model for checkpoints in Google's layout, within 2e-5.

The names are mapped here, so the network is verified without vitral's loader.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vitral import ResNetStem, ViT, ViTConfig

GOLDEN = Path(__file__).parent / "golden"
Arrays = dict[str, np.ndarray]


def tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def convolution(array: np.ndarray) -> Tensor:
    return tensor(array.transpose(3, 2, 0, 1))


def norm(arrays: Arrays, theirs: str, ours: str) -> dict[str, Tensor]:
    return {
        f"{ours}.weight": tensor(arrays[f"{theirs}/scale"].reshape(-1)),
        f"{ours}.bias": tensor(arrays[f"{theirs}/bias"].reshape(-1)),
    }


def dense(arrays: Arrays, theirs: str, ours: str) -> dict[str, Tensor]:
    return {f"{ours}.weight": tensor(arrays[f"{theirs}/kernel"].T), f"{ours}.bias": tensor(arrays[f"{theirs}/bias"])}


def block(arrays: Arrays, theirs: str, ours: str, old: bool) -> dict[str, Tensor]:
    attention, second, mlp = ("1", "2", "3") if old else ("0", "1", "0")
    attention = f"{theirs}/MultiHeadDotProductAttention_{attention}"
    width = arrays[f"{attention}/out/bias"].shape[0]
    state = norm(arrays, f"{theirs}/LayerNorm_0", f"{ours}.norm1")
    state |= norm(arrays, f"{theirs}/LayerNorm_{second}", f"{ours}.norm2")
    projections = [f"{attention}/{name}" for name in ("query", "key", "value")]
    state[f"{ours}.attention.to_qkv.weight"] = torch.cat(
        [tensor(arrays[f"{name}/kernel"].reshape(width, -1).T) for name in projections]
    )
    state[f"{ours}.attention.to_qkv.bias"] = torch.cat(
        [tensor(arrays[f"{name}/bias"].reshape(-1)) for name in projections]
    )
    state[f"{ours}.attention.to_out.weight"] = tensor(arrays[f"{attention}/out/kernel"].reshape(-1, width).T)
    state[f"{ours}.attention.to_out.bias"] = tensor(arrays[f"{attention}/out/bias"])
    state |= dense(arrays, f"{theirs}/MlpBlock_{mlp}/Dense_0", f"{ours}.mlp.expand")
    state |= dense(arrays, f"{theirs}/MlpBlock_{mlp}/Dense_1", f"{ours}.mlp.contract")
    return state


def resnet(arrays: Arrays, stages: list[int]) -> dict[str, Tensor]:
    stem = "patches.stem"
    state = {f"{stem}.root.weight": convolution(arrays["conv_root/kernel"])}
    state |= norm(arrays, "gn_root", f"{stem}.root_norm")
    for stage, units in enumerate(stages):
        for unit in range(units):
            theirs, ours = f"block{stage + 1}/unit{unit + 1}", f"{stem}.stages.{stage}.{unit}"
            names = {f"conv{i}": f"conv{i}" for i in (1, 2, 3)} | {"conv_proj": "shortcut"}
            norms = {f"gn{i}": f"norm{i}" for i in (1, 2, 3)} | {"gn_proj": "shortcut_norm"}
            for name, our in names.items():
                if f"{theirs}/{name}/kernel" in arrays:
                    state[f"{ours}.{our}.weight"] = convolution(arrays[f"{theirs}/{name}/kernel"])
            for name, our in norms.items():
                if f"{theirs}/{name}/scale" in arrays:
                    state |= norm(arrays, f"{theirs}/{name}", f"{ours}.{our}")
    return state


def load(arrays: Arrays, fields: dict[str, Any]) -> ViT:
    config = ViTConfig(
        width=fields["hidden"],
        depth=fields["layers"],
        heads=fields["heads"],
        mlp_width=fields["mlp"],
        patch_size=fields["patch"],
        image_size=tuple(fields["size"]),
        num_classes=fields["classes"],
        pool={"token": "token", "gap": "mean"}[fields["pool"]],
        representation=fields.get("representation"),
        stem=ResNetStem(stages=tuple(fields["resnet"])) if "resnet" in fields else None,
    )
    kernel = convolution(arrays["embedding/kernel"]).flatten(1)
    state = {"patches.project.weight": kernel, "patches.project.bias": tensor(arrays["embedding/bias"])}
    state["positions.0.table"] = tensor(arrays["Transformer/posembed_input/pos_embedding"][0])
    if "cls" in arrays:
        state["class_token"] = tensor(arrays["cls"][0])
    for i in range(config.depth):
        old = fields.get("numbering") == "old"
        state |= block(arrays, f"Transformer/encoderblock_{i}", f"blocks.{i}", old)
    state |= norm(arrays, "Transformer/encoder_norm", "norm") | dense(arrays, "head", "head")
    if config.representation:
        state |= dense(arrays, "pre_logits", "representation.0")
    if "resnet" in fields:
        state |= resnet(arrays, fields["resnet"])
    model = ViT(config).eval()
    model.load_state_dict(state, strict=True)
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", ["token", "gap", "prelogits", "hybrid"])
def test_logits_of_googles_own_model(name: str) -> None:
    expected = np.load(GOLDEN / f"{name}.expected.npz")
    model = load(dict(np.load(GOLDEN / f"{name}.npz")), json.loads(str(expected["config"])))
    images = tensor(expected["images"].transpose(0, 3, 1, 2))
    torch.testing.assert_close(model(images), tensor(expected["logits"]), atol=2e-5, rtol=0)
    packed = model(list(images))
    torch.testing.assert_close(packed, tensor(expected["logits"]), atol=2e-5, rtol=0)
