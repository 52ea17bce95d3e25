"""Choose the weights to train (all, head, last blocks or LoRA), and write the adapter file of a partial training."""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.errors import ConfigError, check_int
from vitral.model.network import Network
from vitral.model.vit import ViT
from vitral.training.config import ResolvedTune
from vitral.training.sharding import whole
from vitral.weights.formats.safetensors import write_safetensors

ADAPTER = "vitral.adapter"
LORA_LAYERS = ("attention.to_qkv", "attention.to_out", "mlp.expand", "mlp.contract")


class LowRank(nn.Module):
    """The update b a x of LoRA (Hu et al. 2021), as a forward hook of its layer. It starts at 0, since b is zero.

    The weight of the layer needs no gradient, which saves a third of a step.
    """

    def __init__(self, weight: Tensor, rank: int):
        super().__init__()
        outputs, inputs = weight.shape
        self.a = nn.Parameter(torch.empty(rank, inputs, device=weight.device, dtype=weight.dtype))
        self.b = nn.Parameter(torch.zeros(outputs, rank, device=weight.device, dtype=weight.dtype))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output + F.linear(F.linear(inputs[0], self.a), self.b)


def choose_parameters(model: Network, tune: ResolvedTune) -> None:
    """Freeze the weights that are not trained, and add LoRA's matrices."""
    if tune.what == "all":
        return
    model.requires_grad_(False)
    for module in (model.head, model.representation):
        module.requires_grad_(True)
    if tune.what == "last-blocks":
        check_int("tune.blocks", tune.blocks, minimum=1, maximum=len(model.blocks))
        for module in (*model.blocks[-tune.blocks :], model.norm):
            module.requires_grad_(True)
        if isinstance(model, ViT):
            model.pool.requires_grad_(True)
    if tune.what == "lora":
        if not isinstance(model, ViT):
            raise ConfigError(
                "tune.what=lora updates the matrices of attention and MLP, but a BiT has none.",
                hint="Use tune.what=head, last-blocks or all.",
            )
        add_lora(model, tune.rank)


def add_lora(model: ViT, rank: int) -> None:
    check_int("tune.rank", rank, minimum=1, maximum=model.config.width)
    for block in model.blocks:
        for name in LORA_LAYERS:
            layer = block.get_submodule(name)
            assert isinstance(layer.weight, Tensor)
            lora = LowRank(layer.weight, rank)
            layer.add_module("lora", lora)
            layer.register_forward_hook(lora)


def merge_lora(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with LoRA's products added to their matrices, under the plain names."""
    merged = {name: tensor for name, tensor in state.items() if ".lora." not in name}
    for name in state.keys() - merged.keys():
        layer, _, part = name.rpartition(".lora.")
        if part == "b":
            merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + state[name] @ state[f"{layer}.lora.a"]
    return merged


def save_adapter(path: Path, model: Network, base: str, sha256: str | None) -> None:
    """Write the trained weights alone, with the SHA-256 of the checkpoint that they belong to."""
    tensors = {name: whole(p).cpu().contiguous() for name, p in model.named_parameters() if p.requires_grad}
    write_safetensors(path, tensors, {ADAPTER: json.dumps({"base": base, "base_sha256": sha256})})
