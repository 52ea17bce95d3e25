"""From tokens to one vector per image, by the class token, the mean of the patches or attention; then to the head."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.model.layers import MLP, Linear, build_activation, initialize, lecun_normal_, xavier_uniform_each_
from vitral.model.packing import Packing

Sequences = Float[Tensor, "B N D"]


class TokenPool(nn.Module):
    """Take the class token, which comes first."""

    def forward(self, x: Sequences, packing: Packing) -> Float[Tensor, "images D"]:
        return pool_groups(x, packing, lambda x, extras: x[:, 0])


class MeanPool(nn.Module):
    """Average the patches."""

    def forward(self, x: Sequences, packing: Packing) -> Float[Tensor, "images D"]:
        return pool_groups(x, packing, lambda x, extras: x[:, extras:].mean(dim=1))


class TokenMeanPool(nn.Module):
    """Concatenate the class token and the mean of the patches (the linear evaluation of DINOv2)."""

    def forward(self, x: Sequences, packing: Packing) -> Float[Tensor, "images _"]:
        return pool_groups(x, packing, lambda x, extras: torch.cat([x[:, 0], x[:, extras:].mean(dim=1)], dim=1))


class MapPool(nn.Module):
    """Multi-head attention pooling of "Scaling Vision Transformers": a learned probe attends to all patches."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.probe = nn.Parameter(torch.empty(1, width))
        self.to_q = Linear(width, width, weight=nn.init.xavier_uniform_)
        self.to_kv = Linear(width, 2 * width, weight=partial(xavier_uniform_each_, projections=2))
        self.to_out = Linear(width, width, weight=nn.init.xavier_uniform_)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = MLP(width, config.mlp_width, activation=config.activation, dropout=0.0)  # no dropout in the head
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialize(self.probe, nn.init.xavier_uniform_)

    def forward(self, x: Sequences, packing: Packing) -> Float[Tensor, "images D"]:
        return pool_groups(x, packing, self.attend)

    def attend(self, x: Sequences, extras: int) -> Float[Tensor, "B D"]:
        return self.transform(F.scaled_dot_product_attention(*self.project(x, extras)))

    def attend_with_weights(self, x: Sequences, extras: int) -> tuple[Float[Tensor, "B D"], Tensor]:
        """Do the same without the fused kernel, and also return the probe's attention (B, heads, 1, patches)."""
        q, k, v = self.project(x, extras)
        weights = ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.transform(weights @ v), weights

    def project(self, x: Sequences, extras: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the query of the probe and the keys and values of the patches, each (B, heads, tokens, head_dim)."""
        q = self.to_q(self.probe).unflatten(-1, (self.heads, 1, -1)).expand(x.shape[0], -1, -1, -1)
        k, v = self.to_kv(x[:, extras:]).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def transform(self, mixed: Float[Tensor, "B H 1 E"]) -> Float[Tensor, "B D"]:
        y = self.to_out(mixed.flatten(1))  # (B, heads, 1, head_dim) -> (B, D)
        return y + self.mlp(self.norm(y))


class NoPool(nn.Module):
    """Pass every token to the head."""

    def forward(self, x: Sequences, packing: Packing) -> Sequences:
        return x


def pool_groups(x: Sequences, packing: Packing, pool: Callable[[Tensor, int], Tensor]) -> Float[Tensor, "images _"]:
    """Pool each group of images with `pool(x, extras)`. Return one row per image, in list order."""
    groups = zip(packing.split(x), packing.groups, strict=True)
    return packing.in_order([pool(tokens, group.extras) for tokens, group in groups])


def build_pool(config: ViTConfig) -> nn.Module:
    if config.pool == "map":
        return MapPool(config)
    return {"token": TokenPool, "mean": MeanPool, "token+mean": TokenMeanPool, "none": NoPool}[config.pool]()


def build_representation(config: ViTConfig) -> nn.Module:
    """Return the hidden layer of the pre-training head (section 3.1)."""
    if config.representation is None:
        return nn.Identity()
    hidden = Linear(config.pooled_width, config.representation, weight=lecun_normal_)
    return nn.Sequential(hidden, build_activation(config.representation_activation))


def build_head(config: ViTConfig | BiTConfig) -> nn.Module:
    """Return a linear layer with zero weights and a constant bias; nothing for 0 classes."""
    if not config.num_classes:
        return nn.Identity()
    bias = partial(nn.init.constant_, val=config.head_bias)
    return Linear(config.representation or config.pooled_width, config.num_classes, weight=nn.init.zeros_, bias=bias)
