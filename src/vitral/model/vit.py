"""The Vision Transformer of "An Image is Worth 16x16 Words" (Dosovitskiy et al., 2021), on one page.

    image -> patches -> tokens + positions -> encoder -> norm -> pool -> head -> logits

Three things go beyond the paper: a list of images of any sizes is packed into one sequence without padding
(packing.py), positions follow the size of the image (positions.py), and blocks may merge similar tokens (merging.py).
Nothing here depends on how weights are stored.
Letters in shapes: B images, C channels, H and W pixels, N tokens, D width, K classes.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from vitral.errors import check_type
from vitral.model.block import build_block
from vitral.model.config import ViTConfig
from vitral.model.features import Features, build_features, choose_layers
from vitral.model.layers import build_dropout, initialize, normal_
from vitral.model.merging import unmerge
from vitral.model.noise import number_layers
from vitral.model.packing import Group, Packing, arrange, join
from vitral.model.parameter_groups import optimizer_groups
from vitral.model.patches import Patches
from vitral.model.pool import build_head, build_pool, build_representation
from vitral.model.positions import Positions, position_rows

Images = Float[Tensor, "B C H W"] | Sequence[Float[Tensor, "C _ _"]]
Sequences = Float[Tensor, "B _ D"]


class ViT(nn.Module):
    """A Vision Transformer, described by its ViTConfig."""

    def __init__(self, config: ViTConfig):
        check_type("config", config, ViTConfig, hint="Pass names to vitral.create.")
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False  # True: store only the input of each block, and recompute the rest

        self.patches = Patches(config)
        self.class_token = nn.Parameter(torch.empty(1, config.width)) if config.has_class_token else None
        self.registers = nn.Parameter(torch.empty(config.registers, config.width)) if config.registers else None
        self.positions = nn.ModuleList(Positions(config) for _ in range(config.position_tables))
        self.dropout = build_dropout(config.dropout)
        self.blocks = nn.ModuleList(build_block(config, index) for index in range(config.blocks))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.pool = build_pool(config)
        self.representation = build_representation(config)
        self.head = build_head(config)
        number_layers(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize class token and registers; every submodule initializes itself."""
        if self.class_token is not None:
            nn.init.zeros_(self.class_token)
        if self.registers is not None:
            initialize(self.registers, normal_(std=0.02))

    def forward(self, images: Images) -> Tensor | list[Tensor]:
        """Return logits (B, K) for (B, C, H, W), or for a list of (C, H, W) of any sizes.

        With pool 'none' every token has logits: (B, N, K), or a list of (N, K)."""
        x, packing = self.embed(images)
        x, _ = self.encode(x, packing)
        x = self.pool_tokens(x, packing)
        logits = self.head(self.representation(x))
        return packing.per_token(logits) if self.config.pool == "none" else logits

    def embed(self, images: Images) -> tuple[Sequences, Packing]:
        """Equation 1: z_0 = [x_class; x_p E] + E_pos."""
        stacks, packing = arrange(images, self.config, weight=self.patches.project.weight)
        return self.embed_patches([self.patches(stack) for stack in stacks], packing), packing

    def embed_patches(self, stacks: Sequence[Float[Tensor, "_ _ D"]], packing: Packing) -> Sequences:
        """Prepend class token and registers to patch tokens, join the stacks, and add positions."""
        x = join([self.prepend_extras(stack) for stack in stacks])
        return self.dropout(self.add_positions(x, packing, block=0))

    def encode(
        self, x: Sequences, packing: Packing, layers: Collection[int] = (), *, first: int = 0
    ) -> tuple[Sequences, dict[int, Sequences]]:
        """Equations 2 and 3 from block `first` on, then the final norm. Also return the outputs of chosen layers."""
        x, outputs = self.run_blocks(range(first, len(self.blocks)), x, packing, layers)
        return x if self.config.norm_after_pool else self.norm(x), outputs

    def run_blocks(
        self, blocks: range, x: Sequences, packing: Packing, layers: Collection[int] = ()
    ) -> tuple[Sequences, dict[int, Sequences]]:
        """Run some blocks, and also return the outputs of chosen layers: one token per patch, merged or not."""
        outputs: dict[int, Tensor] = {}
        for index in blocks:
            if index > 0 and self.config.position_at != "stem":  # embed has added those of the first block
                x = self.add_positions(x, packing, block=index)
            x, packing = self.run_block(self.blocks[index], x, packing)
            if index in layers:
                outputs[index] = unmerge(x, packing)
        return unmerge(x, packing), outputs

    def run_block(self, block: nn.Module, x: Sequences, packing: Packing) -> tuple[Sequences, Packing]:
        """Run a block. Gradient checkpointing discards its activations, except while attention is recorded."""
        checkpointed = self.gradient_checkpointing and torch.is_grad_enabled()
        if not checkpointed or block.get_submodule("attention").recorders:
            output = block(x, packing)
        else:
            output = cast("Any", checkpoint(partial(block, record=False), x, packing, use_reentrant=False))
        return output if self.config.merge else (output, packing)

    def pool_tokens(self, x: Sequences, packing: Packing) -> Tensor:
        """Equation 4: one vector per image. Heads that pool first apply the final norm here."""
        x = self.pool(x, packing)
        return self.norm(x) if self.config.norm_after_pool else x

    def pool_from(self, first: int, x: Float[Tensor, "B N D"], grid: tuple[int, int]) -> Float[Tensor, "B pooled"]:
        """Return the pooled vectors of tokens that have passed the blocks before `first`."""
        packing = Packing((Group(x.shape[0], grid, self.config.extra_tokens),), None)
        x, _ = self.encode(x, packing, first=first)
        return self.pool_tokens(x, packing)

    @overload
    def features(self, images: Tensor, layers: int | Iterable[int] = ()) -> Features: ...
    @overload
    def features(self, images: Sequence[Tensor], layers: int | Iterable[int] = ()) -> list[Features]: ...
    def features(self, images: Images, layers: int | Iterable[int] = ()) -> Features | list[Features]:
        """Return the tokens by name, also after the chosen layers; one Features per image for a list of images."""
        x, packing = self.embed(images)
        x, outputs = self.encode(x, packing, choose_layers(layers, len(self.blocks)))
        return build_features(x, outputs, self.pool_tokens(x, packing), packing, self.config)

    def prepend_extras(self, x: Sequences) -> Sequences:
        """Put class token and registers before the patches."""
        extras = [token.expand(x.shape[0], -1, -1) for token in (self.class_token, self.registers) if token is not None]
        return torch.cat([*extras, x], dim=1) if extras else x

    def add_positions(self, x: Sequences, packing: Packing, block: int) -> Sequences:
        if not self.positions:  # none, or relative, which the attention adds
            return x
        return x + position_rows(self.positions, x, packing, block)

    def reset_head(self, num_classes: int) -> "ViT":
        """Replace the head by a new one with zero weights, for another number of classes; 0 removes it."""
        bias = self.config.head_bias if num_classes else 0.0
        self.config = replace(self.config, num_classes=num_classes, head_bias=bias)
        self.head = build_head(self.config).to(self.norm.weight)
        return self

    def parameter_groups(self, lr: float, weight_decay: float, layer_decay: float = 1.0) -> list[dict[str, Any]]:
        """Return parameter groups for an optimizer, with weight decay for matrices only and layer-wise rates.

        The head learns at `lr`, each layer below it at `layer_decay` times the rate of the layer above."""
        return optimizer_groups(self, len(self.blocks), lr, weight_decay, layer_decay)
