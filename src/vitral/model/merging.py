"""Token merging (ToMe, Bolya et al. 2023): each block merges the most similar patch tokens, so later blocks have fewer.

    attention -> match patch tokens by their keys -> average the R most similar pairs -> MLP

The patch tokens are divided into two sets by turns. Each token of the first set has one edge: to the token of the
second set with the most similar key. The R edges of the highest similarity are merged. A merged token is the mean of
its patches, and attention counts it as often as it has patches ("proportional attention"). Class token and registers
are never merged. Every image is matched on its own, so the result does not depend on the batch.

After the last block each patch has the vector of its token again. Pooling, `features` and `pool="none"` therefore see
the grid of the image, and a mean over the patches weights each token by its size.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from vitral.model.attention import Attention, Heads
from vitral.model.packing import Group, Merged, Packing, join

Sequences = Float[Tensor, "B _ D"]


class MergingAttention(Attention):
    """Proportional attention: a token of s patches attends as s equal tokens would, and also returns its keys."""

    def forward_with_keys(
        self, x: Float[Tensor, "B N D"], packing: Packing, record: bool = True
    ) -> tuple[Float[Tensor, "B N D"], list[Float[Tensor, "_ _ E"]]]:
        """Return the attention's output, and per group of images the keys, averaged over the heads."""
        parts = packing.split(self.to_qkv(x))
        keys = [torch.unflatten(qkv, -1, (3, self.heads, -1))[..., 1, :, :].mean(dim=-2) for qkv in parts]
        return self.project(self.mix(parts, packing, record)), keys

    def bias(self, q: Heads, group: Group) -> Tensor | None:
        """Return log(size) of each key, which equals as many copies of the key."""
        if group.merged is None:
            return None
        logarithms = F.pad(group.merged.sizes.log(), (group.extras, 0))  # class token and registers have size 1
        return logarithms[:, None, None].to(q.dtype)  # (B, N) -> (B, 1, 1, N)

    def fused(self, q: Heads, k: Heads, v: Heads, bias: Tensor | None) -> Heads:
        if bias is None or not torch.compiler.is_exporting():
            return super().fused(q, k, v, bias)
        weights = ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1) + bias).softmax(dim=-1)
        return weights @ v  # torch 2.13 fails to translate fused attention with a bias to ONNX


class Matching(NamedTuple):
    """The tokens of the first set that are merged, and the tokens of the second that they are merged into."""

    sources: Int[Tensor, "B merged"]
    targets: Int[Tensor, "B merged"]
    kept: Int[Tensor, "B kept"]
    """Tokens of the first set that stay, in order."""
    moved: Int[Tensor, "B tokens"]
    """The index of each token afterwards: first the kept ones, then the second set."""


def merge_tokens(
    x: Sequences, packing: Packing, keys: list[Float[Tensor, "_ _ E"]], count: int
) -> tuple[Sequences, Packing]:
    """Merge `count` pairs of patch tokens per image, at most half of its tokens. Return the tokens and their layout."""
    parts = zip(packing.split(x), packing.groups, keys, strict=True)
    tensors, groups = zip(*(merge_group(tokens, group, key, count) for tokens, group, key in parts), strict=True)
    return join(tensors), packing._replace(groups=tuple(groups))


def merge_group(x: Sequences, group: Group, keys: Float[Tensor, "B N E"], count: int) -> tuple[Sequences, Group]:
    """Merge tokens of images of the same size."""
    extras, patches = group.extras, x.shape[1] - group.extras
    count = min(count, patches // 2)
    if count == 0:
        return x, group
    first = extras % 2  # the sets alternate from the class token on, as in the paper's code
    matching = match(keys[:, extras:], first, count)
    before = group.merged
    dtype = torch.promote_types(x.dtype, torch.float32)
    sizes = x.new_ones(x.shape[0], patches, dtype=dtype) if before is None else before.sizes
    with _full_precision(x):
        merged_sizes = add_pairs(sizes[..., None], matching, first)
        sums = add_pairs(x[:, extras:].to(dtype) * sizes[..., None], matching, first)
    tokens = matching.moved if before is None else matching.moved.gather(1, before.tokens)
    x = torch.cat([x[:, :extras], (sums / merged_sizes).to(x.dtype)], dim=1)
    return x, group._replace(merged=Merged(merged_sizes[..., 0], tokens))


@torch.no_grad()
def match(keys: Float[Tensor, "B tokens E"], first: int, count: int) -> Matching:
    """Choose the pairs to merge: bipartite soft matching. The first set has every other token from `first` on."""
    with _full_precision(keys):
        unit = F.normalize(keys.to(torch.promote_types(keys.dtype, torch.float32)), dim=-1)
        similarity, nearest = (unit[:, first::2] @ unit[:, 1 - first :: 2].transpose(1, 2)).max(dim=-1)
    order = similarity.sort(dim=1, descending=True).indices
    sources, kept = order[:, :count], order[:, count:].sort(dim=1).values
    is_source = torch.zeros_like(nearest).scatter(1, sources, 1)
    moved_first = torch.where(is_source == 1, kept.shape[1] + nearest, (1 - is_source).cumsum(dim=1) - 1)
    second = torch.arange(keys.shape[1] - nearest.shape[1], device=keys.device)
    moved_second = (kept.shape[1] + second).expand(keys.shape[0], -1)
    number = torch.arange(keys.shape[1], device=keys.device)
    by_turns = number // 2 + (number % 2 != first) * nearest.shape[1]
    moved = torch.cat([moved_first, moved_second], dim=1)[:, by_turns]
    return Matching(sources=sources, targets=nearest.gather(1, sources), kept=kept, moved=moved)


def add_pairs(values: Float[Tensor, "B tokens C"], matching: Matching, first: int) -> Float[Tensor, "B fewer C"]:
    """Add the values of merged tokens. A matrix product adds in a fixed order on every device; scatter_add does not."""
    first_set, second_set = values[:, first::2], values[:, 1 - first :: 2]
    numbers = torch.arange(second_set.shape[1], device=values.device)
    is_target = (numbers[:, None] == matching.targets[:, None]).to(values.dtype)  # (B, second set, merged)
    return torch.cat([_rows(first_set, matching.kept), second_set + is_target @ _rows(first_set, matching.sources)], 1)


def unmerge(x: Sequences, packing: Packing) -> Sequences:
    """Return one token per patch again: that of the merged token which contains the patch."""
    if all(group.merged is None for group in packing.groups):
        return x
    return join([_unmerge_group(*pair) for pair in zip(packing.split(x), packing.groups, strict=True)])


def _unmerge_group(x: Sequences, group: Group) -> Sequences:
    if group.merged is None:
        return x
    return torch.cat([x[:, : group.extras], _rows(x[:, group.extras :], group.merged.tokens)], dim=1)


def _rows(x: Float[Tensor, "B _ C"], indices: Int[Tensor, "B chosen"]) -> Float[Tensor, "B chosen C"]:
    return x.gather(1, indices[..., None].expand(-1, -1, x.shape[2]))


def _full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Compute in float32 even under autocast, because a rounded similarity would choose other pairs."""
    is_lower = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if is_lower else nullcontext()
