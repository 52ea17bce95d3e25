"""Count the operations of a cell, as the paper counts them."""

from collections.abc import Mapping
from typing import Any

from vitral.model.config import ViTConfig
from vitral.model.cost import count_cost
from vitral.model.network import Config
from vitral.training.config import Masking
from vitral.training.tasks.masked_patches import MaskedPatchHead


def training_flops(config: Config, settings: Mapping[str, Any], steps: int) -> float:
    """Return the operations of a training run: three forward passes per image and step."""
    flops = count_cost(config).forward_flops
    if settings.get("objective") == "masked-patches":  # its head runs on the corrupted patches only
        assert isinstance(config, ViTConfig)
        fields = {name.removeprefix("masking."): settings[name] for name in settings if name.startswith("masking.")}
        masking = Masking(**fields)
        rows, columns = config.grid(*config.image_hw)
        head = MaskedPatchHead(config, masking).head
        flops += 2 * masking.corrupted_patches(rows * columns) * head.weight.numel()
    return 3.0 * flops * settings["batch_size"] * steps


def evaluation_flops(config: Config, evaluations: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Return the operations of a forward pass in every evaluation that has a size of its own."""
    sizes = {name: options["image_size"] for name, options in evaluations.items() if "image_size" in options}
    return {
        name: count_cost(config, tuple(size) if isinstance(size, list) else (size, size)).forward_flops
        for name, size in sizes.items()
    }
