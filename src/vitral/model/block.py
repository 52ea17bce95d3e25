"""One block of the encoder (equations 2 and 3 of the paper): norm, attention, norm, MLP, each branch added back."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitral.model.attention import Attention, AxialAttention
from vitral.model.config import ViTConfig
from vitral.model.initialize import Linear, normal_
from vitral.model.packing import Packing

ACTIVATIONS = {
    "gelu-tanh": lambda: nn.GELU(approximate="tanh"),
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
}


class Block(nn.Module):
    """A pre-norm Transformer block."""

    def __init__(self, config: ViTConfig, index: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attention = build_attention(config, index)
        self.after_attention = Branch(config, index)
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = MLP(config, dropout=config.dropout)
        self.after_mlp = Branch(config, index)

    def forward(self, x: Float[Tensor, "B N D"], packing: Packing, unseen: bool = False) -> Float[Tensor, "B N D"]:
        x = x + self.after_attention(self.attention(self.norm1(x), packing, unseen), packing)
        x = x + self.after_mlp(self.mlp(self.norm2(x)), packing)
        return x


class MLP(nn.Module):
    def __init__(self, config: ViTConfig, *, dropout: float):
        super().__init__()
        initial = dict(weight=nn.init.xavier_uniform_, bias=normal_(std=1e-6))
        self.expand = Linear(config.width, config.mlp_width, **initial)
        self.activate = ACTIVATIONS[config.activation]()
        self.dropout = build_dropout(dropout)
        self.contract = Linear(config.mlp_width, config.width, **initial)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return self.contract(self.dropout(self.activate(self.expand(x))))


class Branch(nn.Module):
    """What happens to a branch before it is added back: dropout, layer scale, stochastic depth."""

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
            x = x * self.kept(x, packing)
        return x

    def kept(self, x: Tensor, packing: Packing) -> Tensor:
        """0 for the images whose branch is dropped, else what keeps the mean: (B, 1, 1), or (1, T, 1) when packed."""
        keep = 1 - self.drop_path
        images = sum(group.images for group in packing.groups)
        kept = x.new_empty(images).bernoulli_(keep) / keep
        if len(packing.groups) == 1:
            return kept[:, None, None]
        tokens = [group.tokens for group in packing.groups for _ in range(group.images)]
        return kept.repeat_interleave(torch.tensor(tokens, device=x.device), output_size=x.shape[1])[None, :, None]


def build_attention(config: ViTConfig, index: int) -> Attention:
    if config.attention == "full":
        return Attention(config)
    return AxialAttention(config, along="rows" if index % 2 == 0 else "columns")


def build_dropout(rate: float) -> nn.Module:
    return nn.Dropout(rate) if rate else nn.Identity()
