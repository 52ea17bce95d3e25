"""What is trained: everything, the head, the last blocks, or LoRA, and the small file that the latter leaves."""

import copy
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitral.errors import ConfigError, WeightsError
from vitral.files import atomic_path
from vitral.model.network import Network
from vitral.model.vit import ViT
from vitral.training.config import Tune

ADAPTER = "vitral.adapter"

LORA_LAYERS = ("attention.to_qkv", "attention.to_out", "mlp.expand", "mlp.contract")


class LowRank(nn.Module):
    """W x + b a x (LoRA, Hu et al. 2021): starts as W, since b is zero. W itself needs no gradient, which saves a third
    of a step."""

    def __init__(self, weight: Tensor, rank: int):
        super().__init__()
        outputs, inputs = weight.shape
        self.a = nn.Parameter(torch.empty(rank, inputs, device=weight.device, dtype=weight.dtype))
        self.b = nn.Parameter(torch.zeros(outputs, rank, device=weight.device, dtype=weight.dtype))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """As a hook behind its layer."""
        return output + F.linear(F.linear(inputs[0], self.a), self.b)


def choose_parameters(model: Network, tune: Tune) -> None:
    """Freezes what is not to be trained, and adds LoRA's matrices."""
    if tune.what in ("all", "auto"):
        return
    model.requires_grad_(False)
    for part in (model.head, model.representation):
        part.requires_grad_(True)
    if tune.what == "last-blocks":
        if not 1 <= tune.blocks <= len(model.blocks):
            raise ConfigError(f"tune.blocks={tune.blocks} must be from 1 to the network's {len(model.blocks)} blocks.")
        for part in (*model.blocks[-tune.blocks :], model.norm):
            part.requires_grad_(True)
        if isinstance(model, ViT):
            model.pool.requires_grad_(True)
    if tune.what == "lora":
        if not isinstance(model, ViT):
            raise ConfigError(
                "tune.what='lora' adds to the matrices of attention and MLP, and a BiT has none.",
                hint="Use tune.what=head, last-blocks or all.",
            )
        add_lora(model, tune.rank)


def add_lora(model: ViT, rank: int) -> None:
    if rank < 1 or rank > model.config.width:
        raise ConfigError(f"tune.rank={rank} must be from 1 to the width {model.config.width}.")
    for block in model.blocks:
        for name in LORA_LAYERS:
            layer = block.get_submodule(name)
            layer.lora = LowRank(layer.weight, rank)  # type: ignore[arg-type]
            layer.register_forward_hook(layer.lora)


def merged_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with LoRA's products added to the matrices that they belong to, under their plain names."""
    merged = {name: tensor for name, tensor in state.items() if ".lora." not in name}
    for name in state.keys() - merged.keys():
        layer, _, part = name.rpartition(".lora.")
        if part == "b":
            merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + state[name] @ state[f"{layer}.lora.a"]
    return merged


def adapter_state(model: Network) -> dict[str, Tensor]:
    """Only what was trained."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name in trained}


def save_adapter(path: Path, model: Network, base: str, sha256: str | None) -> None:
    """The trained part alone, with the SHA-256 of the checkpoint that it belongs to."""
    told = {"base": base, "base_sha256": sha256}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in adapter_state(model).items()}
    with atomic_path(path) as aside:
        save_file(tensors, aside, metadata={ADAPTER: json.dumps(told)})


def load_adapter(model: ViT, path: Path) -> ViT:
    """The base with what an adapter learnt, merged: an ordinary network again."""
    with safe_open(path, framework="pt") as file:
        if ADAPTER not in (file.metadata() or {}):
            raise WeightsError(f"{path} is no adapter: it does not name its base.")
    tensors = load_file(path)
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if name.endswith(".lora.a")}
    adapted = copy.deepcopy(model)
    if ranks:
        add_lora(adapted, ranks.pop())
    state = adapted.state_dict()
    for name, tensor in tensors.items():
        if name not in state or state[name].shape != tensor.shape:
            raise WeightsError(f"{path} does not fit this network: {name} has shape {tuple(tensor.shape)}.")
    merged = ViT(model.config)
    merged.load_state_dict(merged_state({**state, **tensors}))
    return merged.train(model.training)
