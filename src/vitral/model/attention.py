"""Multi-head self-attention: with the fused kernel, with visible weights for recording, and axial.

Linear layers run on the packed sequence; the products of queries and keys stay within each image.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitral.model.config import ViTConfig
from vitral.model.layers import Linear, xavier_uniform_each_
from vitral.model.packing import Group, Packing, join
from vitral.model.positions import RelativePositions

Recorder = Callable[[list[Tensor], Packing], None]
Heads = Float[Tensor, "B H _ E"]
GroupHeads = Float[Tensor, "_ H _ E"]
"""One group of a packed list; groups differ in the number of images."""


class Attention(nn.Module):
    """Multi-head self-attention of the paper's appendix A."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.drop_rate = config.attention_dropout
        self.to_qkv = Linear(width, 3 * width, weight=partial(xavier_uniform_each_, projections=3))
        self.relative = RelativePositions(config) if config.position == "relative" else None
        self.to_out = Linear(width, width, weight=nn.init.xavier_uniform_)
        self.recorders: tuple[Recorder, ...] = ()  # set by record_attention

    def forward(self, x: Float[Tensor, "B N D"], packing: Packing, record: bool = True) -> Float[Tensor, "B N D"]:
        """Attend within each image. `record=False` skips the recorders, for a repeated computation."""
        return self.project(self.mix(packing.split(self.to_qkv(x)), packing, record))

    def mix(self, parts: Sequence[Float[Tensor, "_ _ QKV"]], packing: Packing, record: bool) -> Sequence[GroupHeads]:
        """Mix the values of each group by attention, and pass the weights to the recorders."""
        groups = zip(parts, packing.groups, strict=True)
        if not (record and self.recorders):
            return [self.attend(*self.split_heads(qkv), group) for qkv, group in groups]
        pairs = [self.attend_with_weights(*self.split_heads(qkv), group) for qkv, group in groups]
        mixed, weights = zip(*pairs, strict=True)
        for recorder in self.recorders:
            recorder(list(weights), packing)
        return mixed

    def project(self, mixed: Sequence[GroupHeads]) -> Float[Tensor, "B N D"]:
        return self.to_out(join([y.transpose(1, 2).flatten(2) for y in mixed]))  # (B, heads, N, head_dim) -> (B, N, D)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"recorders": ()}  # a copy or pickle of the model is not recorded

    def split_heads(self, qkv: Float[Tensor, "B N QKV"]) -> tuple[Heads, Heads, Heads]:
        x = torch.unflatten(qkv, -1, (3, self.heads, -1))
        q, k, v = x.permute(2, 0, 3, 1, 4)  # 3 x (B, heads, N, head_dim)
        return q, k, v

    def attend(self, q: Heads, k: Heads, v: Heads, group: Group) -> Heads:
        """Mix the values by attention, with the fused kernel."""
        return self.fused(q, k, v, self.bias(q, group))

    def bias(self, q: Heads, group: Group) -> Tensor | None:
        """Return what is added to the products of queries and keys, or None."""
        return None if self.relative is None else self.relative(q, group)

    def attend_with_weights(self, q: Heads, k: Heads, v: Heads, group: Group) -> tuple[Heads, Tensor]:
        """Do the same without the fused kernel, and also return the attention weights (B, heads, N, N)."""
        logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        if (bias := self.bias(q, group)) is not None:
            logits = logits + bias
        if (visible := self.visible_keys(group, q.device)) is not None:
            logits = logits.masked_fill(~visible, float("-inf"))
        weights = logits.softmax(dim=-1)
        return F.dropout(weights, self.drop_rate, self.training) @ v, weights

    def fused(self, q: Heads, k: Heads, v: Heads, bias: Tensor | None) -> Heads:
        dropout = self.drop_rate if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)

    def visible_keys(self, group: Group, device: torch.device) -> Tensor | None:
        """Return (N, N): the keys that each query attends to; None for all keys."""
        return None


class AxialAttention(Attention):
    """Axial attention of appendix D.6.

    Patches attend to their row (or column), the class token and the registers. Class token and registers attend to all.
    """

    def __init__(self, config: ViTConfig, *, axis: int):
        super().__init__(config)
        self.axis = axis  # of the grid: 0 attends along rows, 1 along columns

    def attend(self, q: Heads, k: Heads, v: Heads, group: Group) -> Heads:
        extras = group.extras
        bias = self.bias(q, group)
        q_line, k_line, v_line = self.to_lines(q[:, :, extras:], group), *(self.with_extras(x, group) for x in (k, v))
        patches = self.from_lines(self.fused(q_line, k_line, v_line, self.line_bias(bias, group)), group)
        if not extras:
            return patches
        extra_tokens = self.fused(q[:, :, :extras], k, v, None if bias is None else bias[:, :, :extras])
        return torch.cat([extra_tokens, patches], dim=2)

    def to_lines(self, x: Heads, group: Group) -> Float[Tensor, "lines H _ E"]:
        """Split patches into rows or columns, which become the batch."""
        x = torch.unflatten(x, 2, group.grid)  # (B, heads, rows, columns, head_dim)
        return x.movedim(2 + self.axis, 1).flatten(0, 1)

    def from_lines(self, x: Float[Tensor, "lines H _ E"], group: Group) -> Heads:
        """Join rows or columns into patches again."""
        lines = group.grid[self.axis]
        x = torch.unflatten(x, 0, (x.shape[0] // lines, lines))
        return x.movedim(1, 2 + self.axis).flatten(2, 3)

    def with_extras(self, x: Heads, group: Group) -> Float[Tensor, "lines H _ E"]:
        """Prepend the class token and registers of its image to each line."""
        lines = self.to_lines(x[:, :, group.extras :], group)
        extras = x[:, :, : group.extras].repeat_interleave(group.grid[self.axis], dim=0)
        return torch.cat([extras, lines], dim=2)

    def line_bias(self, bias: Tensor | None, group: Group) -> Tensor | None:
        """Return the bias of each line: (B, heads, N, N) -> (lines, heads, line, extras + line)."""
        if bias is None:
            return None
        rows = self.to_lines(bias[:, :, group.extras :], group)  # (lines, heads, line, N)
        extra_keys, patch_keys = rows[..., : group.extras], rows[..., group.extras :]
        grid, lines = torch.unflatten(patch_keys, -1, group.grid), group.grid[self.axis]
        grid = torch.unflatten(grid, 0, (grid.shape[0] // lines, lines)).movedim(self.axis - 2, 2)
        same_line = grid.diagonal(dim1=1, dim2=2).movedim(-1, 1).flatten(0, 1)  # key line = query line
        return torch.cat([extra_keys, same_line], dim=-1)

    def visible_keys(self, group: Group, device: torch.device) -> Tensor | None:
        rows, columns = group.grid
        patch = torch.arange(rows * columns, device=device)
        extras = torch.full((group.extras,), -1, device=device)
        line = torch.cat([extras, patch % columns if self.axis else patch // columns])
        return (line[:, None] == line) | (line[:, None] < 0) | (line < 0)
