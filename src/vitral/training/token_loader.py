"""Batches of cached tokens, for training and measuring the blocks above them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vitral.data.batches import Batch, BatchLoader, epoch_order, share_batches
from vitral.data.randomness import random_generator
from vitral.training.token_views import choose_tokens
from vitral.training.tokens import TokenSet


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TokenLoader:
    """Batches of tokens in a repeatable order, as `BatchLoader` has them of images.

    The view of an image and the patches that are left out depend on (seed, epoch, row).
    """

    images: TokenSet
    batch_size: int
    rows: Tensor
    """The rows of ``images`` to use."""
    shuffle: bool = False
    seed: int = 0
    extras: int = 0
    """Tokens before the patches, which are never left out."""
    patches: int = 0
    """Number of patches to draw from each image of a shuffled epoch."""
    rank: int = 0
    world: int = 1

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of batches. A shuffled epoch drops the last, smaller batch unless it is the only one."""
        whole, rest = divmod(len(self.rows), self.batch_size)
        return max(1, whole) if self.shuffle else whole + (rest > 0)

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, from batch `start` on."""
        order = torch.tensor(epoch_order(len(self.rows), self.seed, epoch, shuffle=self.shuffle))
        numbers = range(start, self.batches_per_epoch)
        batches = [self.rows[order[number * self.batch_size : (number + 1) * self.batch_size]] for number in numbers]
        for rows in share_batches(batches, self.rank, self.world, split=self.shuffle):
            tokens = [self._tokens(int(row), epoch) for row in rows]
            images = torch.stack(tokens).float() if tokens else tokens
            yield Batch(images=images, labels=self.images.labels[rows], items=self.images.indices[rows])

    def _tokens(self, row: int, epoch: int) -> Tensor:
        if not self.shuffle:
            return self.images.tokens[row]
        random, views = random_generator(self.seed, epoch, row), self.images.views
        view = int(random.integers(len(views) + 1))
        tokens = views[view - 1, row] if view else self.images.tokens[row]
        if (patches := len(tokens) - self.extras) <= self.patches:
            return tokens
        return tokens[choose_tokens(random, patches=patches, kept=self.patches, extras=self.extras)]


Loader = BatchLoader | TokenLoader
