"""From tokens to one vector an image: the class token, the mean of the patches, or attention pooling."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitral.model.block import MLP
from vitral.model.config import ViTConfig
from vitral.model.initialize import Linear, initialize, xavier_uniform_each_
from vitral.model.packing import Packing


class Pool(nn.Module):
    """Pools each image of a batch or packed sequence; rows in the order in which the images were given."""

    def forward(self, x: Float[Tensor, "B N D"], packing: Packing) -> Float[Tensor, "images D"]:
        parts = zip(packing.split(x), packing.groups, strict=True)
        return packing.in_order([self.pool(part, group.extras) for part, group in parts])

    def pool(self, x: Float[Tensor, "B N D"], extras: int) -> Float[Tensor, "B D"]:
        raise TypeError(f"{type(self).__name__} does not say how it pools")


class TokenPool(Pool):
    def pool(self, x: Float[Tensor, "B N D"], extras: int) -> Float[Tensor, "B D"]:
        return x[:, 0]


class MeanPool(Pool):
    def pool(self, x: Float[Tensor, "B N D"], extras: int) -> Float[Tensor, "B D"]:
        return x[:, extras:].mean(dim=1)


class MapPool(Pool):
    """Multi-head attention pooling of "Scaling Vision Transformers": a learnt probe asks all patches."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.probe = nn.Parameter(torch.empty(1, width))
        self.to_q = Linear(width, width, weight=nn.init.xavier_uniform_)
        self.to_kv = Linear(width, 2 * width, weight=xavier_uniform_each_(2))
        self.to_out = Linear(width, width, weight=nn.init.xavier_uniform_)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = MLP(config, dropout=0.0)  # the head has no dropout
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialize(self.probe, nn.init.xavier_uniform_)

    def pool(self, x: Float[Tensor, "B N D"], extras: int) -> Float[Tensor, "B D"]:
        q = self.to_q(self.probe).unflatten(-1, (self.heads, 1, -1)).expand(x.shape[0], -1, -1, -1)
        k, v = self.to_kv(x[:, extras:]).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        asked = F.scaled_dot_product_attention(q, k, v)
        y = self.to_out(asked.flatten(1))  # (B, heads, 1, head_dim) -> (B, D)
        return y + self.mlp(self.norm(y))


class NoPool(nn.Module):
    """Every token goes to the head."""

    def forward(self, x: Float[Tensor, "B N D"], packing: Packing) -> Float[Tensor, "B N D"]:
        return x


def build_pool(config: ViTConfig) -> nn.Module:
    if config.pool == "map":
        return MapPool(config)
    return {"token": TokenPool, "mean": MeanPool, "none": NoPool}[config.pool]()
