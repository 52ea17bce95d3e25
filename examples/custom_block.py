"""Replace the MLP of every block by a gated one (SwiGLU) and train it beside the paper's MLP.

python examples/custom_block.py
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import vitral

CONFIG = vitral.ViTConfig(
    image_size=28, patch_size=7, channels=1, num_classes=10, width=64, depth=2, heads=4, mlp_width=128, pool="mean"
)


class GatedMLP(nn.Module):
    """SwiGLU ("GLU Variants Improve Transformer", Shazeer 2020) with as many parameters as the paper's MLP."""

    def __init__(self, width: int, mlp_width: int):
        super().__init__()
        hidden = 2 * mlp_width // 3  # three matrices instead of two
        self.gate, self.expand = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.contract = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        return self.contract(silu(self.gate(x)) * self.expand(x))


class GatedViT(vitral.ViT):
    """A Vision Transformer whose blocks have a gated MLP."""

    def __init__(self, config: vitral.ViTConfig):
        super().__init__(config)
        for block in self.blocks:
            block.mlp = GatedMLP(config.width, config.mlp_width)


def main() -> None:
    for network in (vitral.ViT, GatedViT):
        torch.manual_seed(0)
        model = network(CONFIG)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        settings: dict[str, Any] = dict(recipe="none", steps=100, batch_size=64, lr=4e-3, progress=False)
        run = vitral.train("builtin:digits", model=model, **settings)
        print(f"{network.__name__:<10} {parameters:>8,} parameters  test accuracy {run.test.top1:.1%}")
    print("One seed and 100 steps prove little: docs/how-to/extend.md compares networks over several seeds.")


if __name__ == "__main__":
    main()
