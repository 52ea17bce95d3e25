"""One block of the encoder (equations 2 and 3 of the paper): norm, attention, norm, MLP, both with a residual sum."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitral.model.attention import Attention, AxialAttention
from vitral.model.config import ViTConfig
from vitral.model.layers import MLP, build_dropout
from vitral.model.merging import MergingAttention, merge_tokens
from vitral.model.noise import Noisy, draw_kept_images
from vitral.model.packing import Packing


class Block(nn.Module):
    """A pre-norm Transformer block."""

    def __init__(self, config: ViTConfig, index: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attention = build_attention(config, index)
        self.after_attention = Branch(config, index)
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = MLP(config.width, config.mlp_width, activation=config.activation, dropout=config.dropout)
        self.after_mlp = Branch(config, index)

    def forward(self, x: Float[Tensor, "B N D"], packing: Packing, record: bool = True) -> Float[Tensor, "B N D"]:
        x = x + self.after_attention(self.attention(self.norm1(x), packing, record), packing)
        x = x + self.after_mlp(self.mlp(self.norm2(x)), packing)
        return x


class MergingBlock(Block):
    """A block that merges tokens between attention and MLP, and also returns the layout of those that are left."""

    def __init__(self, config: ViTConfig, index: int):
        super().__init__(config, index)
        self.merge = config.merge

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Float[Tensor, "B N D"], packing: Packing, record: bool = True
    ) -> tuple[Float[Tensor, "B _ D"], Packing]:
        assert isinstance(self.attention, MergingAttention)
        mixed, keys = self.attention.forward_with_keys(self.norm1(x), packing, record)
        x = x + self.after_attention(mixed, packing)
        x, packing = merge_tokens(x, packing, keys, self.merge)
        return x + self.after_mlp(self.mlp(self.norm2(x)), packing), packing


class Branch(Noisy, nn.Module):
    """The end of a branch, before the residual sum: dropout, layer scale, stochastic depth."""

    def __init__(self, config: ViTConfig, index: int):
        super().__init__()
        self.dropout = build_dropout(config.dropout)
        self.initial_scale = config.layer_scale
        self.scale = None if config.layer_scale is None else nn.Parameter(torch.empty(config.width))
        self.drop_path = config.drop_path * (index / (config.blocks - 1) if config.blocks > 1 else 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.scale is not None and self.initial_scale is not None:
            nn.init.constant_(self.scale, self.initial_scale)

    def extra_repr(self) -> str:
        return f"drop_path={self.drop_path:.3g}, layer_scale={self.initial_scale}"

    def forward(self, x: Float[Tensor, "B N D"], packing: Packing) -> Float[Tensor, "B N D"]:
        x = self.dropout(x)
        if self.scale is not None:
            x = x * self.scale
        if self.drop_path and self.training:
            x = x * self.draw_factors(x, packing)
        return x

    def draw_factors(self, x: Tensor, packing: Packing) -> Tensor:
        """Draw 0 for images whose branch is dropped, else 1 / keep: (B, 1, 1), or (1, T, 1) for packed images."""
        keep = 1 - self.drop_path
        images = sum(group.images for group in packing.groups)
        factors = draw_kept_images(keep, x, self.layer, images, packing.order) / keep
        if len(packing.groups) == 1:
            return factors[:, None, None]
        tokens = [group.tokens for group in packing.groups for _ in range(group.images)]
        return factors.repeat_interleave(torch.tensor(tokens, device=x.device), output_size=x.shape[1])[None, :, None]


def build_block(config: ViTConfig, index: int) -> Block:
    return MergingBlock(config, index) if config.merge else Block(config, index)


def build_attention(config: ViTConfig, index: int) -> Attention:
    if config.merge:
        return MergingAttention(config)
    return Attention(config) if config.attention == "full" else AxialAttention(config, axis=index % 2)
