"""The Vision Transformer of "An Image is Worth 16x16 Words" (Dosovitskiy et al., 2021), on one page.

    image -> patches -> tokens + positions -> encoder -> norm -> pool -> head -> logits

What is unusual here: images may come as a list of any sizes, packed behind each other without padding (packing.py);
positions follow the size of the image (positions.py); and nothing in this file knows how weights are stored.
Letters in shapes: B images, C channels, H and W pixels, N tokens, D width, K classes.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitral.errors import ConfigError
from vitral.model.block import ACTIVATIONS, Block, build_dropout
from vitral.model.config import ViTConfig
from vitral.model.features import Features, name_features
from vitral.model.initialize import Linear, constant_, initialize, lecun_normal_, normal_
from vitral.model.layers import chosen_layers
from vitral.model.packing import Packing, arrange, join
from vitral.model.patches import Patches
from vitral.model.pool import build_pool
from vitral.model.positions import Positions

Images = Float[Tensor, "B C H W"] | Sequence[Float[Tensor, "C _ _"]]
Sequences = Float[Tensor, "B _ D"]


class ViT(nn.Module):
    """A Vision Transformer, as its ViTConfig describes it."""

    def __init__(self, config: ViTConfig):
        if not isinstance(config, ViTConfig):
            raise ConfigError(f"ViT takes a ViTConfig, and this is {config!r}.", hint="A name goes to vitral.create.")
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False  # True: keep only what enters each block, compute the rest again backwards

        self.patches = Patches(config)
        self.class_token = nn.Parameter(torch.empty(1, config.width)) if config.has_class_token else None
        self.registers = nn.Parameter(torch.empty(config.registers, config.width)) if config.registers else None
        self.positions = nn.ModuleList(Positions(config) for _ in range(config.position_tables))
        self.dropout = build_dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.blocks))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.pool = build_pool(config)
        self.representation = build_representation(config)
        self.head = build_head(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Of the model's own two; every part resets its own."""
        if self.class_token is not None:
            nn.init.zeros_(self.class_token)
        if self.registers is not None:
            initialize(self.registers, normal_(std=0.02))

    def forward(self, images: Images) -> Any:
        """(B, C, H, W), or a list of (C, H, W) of any sizes -> logits (B, K).

        With pool 'none' every token has logits: (B, N, K), or a list of (N, K)."""
        x, packing = self.embed(images)
        x, _ = self.encode(x, packing)
        x = self.pool_tokens(x, packing)
        logits = self.head(self.representation(x))
        return packing.per_token(logits) if self.config.pool == "none" else logits

    def embed(self, images: Images) -> tuple[Sequences, Packing]:
        """Equation 1: z_0 = [x_class; x_p E] + E_pos."""
        stacks, packing = arrange(images, self.config, weight=self.patches.project.weight)
        return self.place([self.patches(stack) for stack in stacks], packing), packing

    def place(self, stacks: Sequence[Float[Tensor, "_ _ D"]], packing: Packing) -> Sequences:
        """The tokens of patches behind class token and registers, all with their positions."""
        x = join([self.prepend_extras(stack) for stack in stacks])
        return self.dropout(self.add_positions(x, packing, block=0))

    def encode(
        self, x: Sequences, packing: Packing, layers: Collection[int] = ()
    ) -> tuple[Sequences, dict[int, Sequences]]:
        """Equations 2 and 3, block by block, and the final norm on all tokens; also what the given layers put out."""
        kept = {}
        for index, block in enumerate(self.blocks):
            if index > 0 and self.config.position_at != "stem":  # the first has had them from embed
                x = self.add_positions(x, packing, block=index)
            x = self.recompute(block, x, packing) if self.recomputes(block) else block(x, packing)
            if index in layers:
                kept[index] = x
        return x if self.config.norm_after_pool else self.norm(x), kept

    def recomputes(self, block: nn.Module) -> bool:
        """Whether a block's insides are forgotten and computed again on the way back; not while they are recorded."""
        wanted = self.gradient_checkpointing and torch.is_grad_enabled()
        return wanted and not block.get_submodule("attention").recorders

    def recompute(self, block: nn.Module, x: Sequences, packing: Packing) -> Sequences:
        return checkpoint(partial(block, unseen=True), x, packing, use_reentrant=False)

    def pool_tokens(self, x: Sequences, packing: Packing) -> Tensor:
        """Equation 4: one vector an image. The final norm comes here for heads that pool first."""
        x = self.pool(x, packing)
        return self.norm(x) if self.config.norm_after_pool else x

    @overload
    def features(self, images: Tensor, layers: int | Iterable[int] = ()) -> Features: ...
    @overload
    def features(self, images: Sequence[Tensor], layers: int | Iterable[int] = ()) -> list[Features]: ...
    def features(self, images: Images, layers: int | Iterable[int] = ()) -> Features | list[Features]:
        """The tokens by name, and those behind any layers asked for; a list of images gives a list of Features."""
        x, packing = self.embed(images)
        x, kept = self.encode(x, packing, chosen_layers(layers, len(self.blocks)))
        return name_features(x, kept, self.pool_tokens(x, packing), packing, self.config)

    def prepend_extras(self, x: Sequences) -> Sequences:
        """Class token and registers go ahead of the patches."""
        extras = [token.expand(x.shape[0], -1, -1) for token in (self.class_token, self.registers) if token is not None]
        return torch.cat([*extras, x], dim=1) if extras else x

    def add_positions(self, x: Sequences, packing: Packing, block: int) -> Sequences:
        if not self.positions:  # none, or relative, which lives in the attention
            return x
        shared = len(self.positions) == 1
        return x + self.positions[0 if shared else block](packing, like=x)


def build_representation(config: ViTConfig) -> nn.Module:
    """The hidden layer of the pre-training head (section 3.1)."""
    if config.representation is None:
        return nn.Identity()
    hidden = Linear(config.width, config.representation, weight=lecun_normal_)
    return nn.Sequential(hidden, ACTIVATIONS[config.representation_activation]())


def build_head(config: ViTConfig) -> nn.Module:
    if config.num_classes == 0:
        return nn.Identity()
    width = config.representation or config.width
    return Linear(width, config.num_classes, weight=nn.init.zeros_, bias=constant_(config.head_bias))
