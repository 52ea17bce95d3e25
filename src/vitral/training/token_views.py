"""Views of images for cached tokens: the plain one, its mirror image and augmented ones, computed chunk by chunk.

Each chunk has an entry of its own in the cache until all views are complete, so that a killed pass loses at most one.
"""

import hashlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitral.cache import read_entry
from vitral.data.augment import Augment
from vitral.data.batches import Batch, BatchLoader, ImageDataset
from vitral.data.dataset import Item
from vitral.data.randomness import random_generator
from vitral.errors import DataError
from vitral.inference.loaded_model import LoadedModel
from vitral.inference.pipeline import make_loader
from vitral.model.vit import ViT

PLAIN, MIRRORED = 0, 1
"""The first two views of an image; all others are augmented."""
BATCH = 32
CHUNK = 32 * BATCH
"""A killed pass loses at most so many images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPlan:
    """The images and tokens to keep."""

    trained: int
    """Number of trained blocks, the last ones."""
    views: int
    viewed: int
    """Number of images, the first ones, that have all views; the others have the plain one."""
    view_patches: int
    """Number of patches in all views but the plain one."""
    augment: Augment
    seed: int
    workers: int = 0


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Chunk:
    """Some images in one view: what the file of tokens does not hold."""

    indices: Tensor
    """(rows,): those of the readable images."""
    features: Tensor
    """(rows, D) inputs of the head; none in other views than the plain one."""
    bad: Sequence[tuple[int, str]]
    digest: str
    """SHA-256 of the tokens."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class View:
    """A view of the images that is written chunk by chunk."""

    model: LoadedModel
    plan: TokenPlan
    number: int
    loader: BatchLoader
    tokens: Tensor
    """(rows, N, D): its part of the file."""
    row_of: dict[int, int]
    """The row of each readable image that the plain view has so far."""

    def rows(self, indices: Tensor) -> list[int]:
        """Return the rows of the images of a chunk: in the plain view those after all others."""
        if self.number == PLAIN:
            return list(range(len(self.row_of), len(self.row_of) + len(indices)))
        return [self.row_of[int(index)] for index in indices]

    def compute(self, start: int) -> Generator[int, None, Chunk]:
        """Yield the number of images done and return the chunk, whose tokens are in the file then."""
        indices, features = torch.empty(0, dtype=torch.long), torch.empty(0)
        bad: list[tuple[int, str]] = []
        for batch in self.loader.epoch(self.number, start=start // BATCH, stop=(start + CHUNK) // BATCH):
            bad += batch.bad
            if changed := [(index, reason) for index, reason in batch.bad if index in self.row_of]:
                index, reason = changed[0]
                raise DataError(f"{self.loader.images.items[index].key} was readable a moment ago: {reason}.")
            if len(batch.items):
                assert isinstance(batch.images, Tensor)
                indices = torch.cat([indices, batch.items])
                rows = self.rows(indices)[-len(batch.items) :]
                if self.number == PLAIN:
                    self.tokens[rows], pooled = self.model.tokens(batch.images, -self.plan.trained - 1)
                    features = torch.cat([features, pooled])
                else:
                    self.tokens[rows] = _view_tokens(self.model, batch, self.plan, self.number)
            yield len(indices) + len(bad)
        return Chunk(indices=indices, features=features, bad=bad, digest=self.digest(indices))

    def digest(self, indices: Tensor) -> str:
        return hashlib.sha256(self.tokens[self.rows(indices)].view(torch.uint8).numpy().data).hexdigest()

    def read(self, name: str) -> Chunk | None:
        """Return a chunk that a killed pass has left, if its tokens are intact in the file."""
        try:
            with np.load(BytesIO(read_entry("tokens", name) or b""), allow_pickle=False) as arrays:
                chunk = Chunk(
                    indices=torch.tensor(arrays["indices"]),
                    features=torch.tensor(arrays["features"]),
                    bad=[(int(index), str(reason)) for index, reason in arrays["bad"].reshape(-1, 2)],
                    digest=str(arrays["digest"]),
                )
            return chunk if self.digest(chunk.indices) == chunk.digest else None
        except Exception:  # none, damaged, or of other images
            return None


def chunk_name(path: Path, view: int, start: int) -> str:
    return hashlib.sha256(f"{path.name} {view} {start}".encode()).hexdigest() + ".npz"


def to_npz(chunk: Chunk) -> bytes:
    stream = BytesIO()
    np.savez(
        stream,
        indices=chunk.indices.numpy(),
        features=chunk.features.numpy(),
        bad=np.array([(str(index), reason) for index, reason in chunk.bad], dtype=np.str_).reshape(-1, 2),
        digest=np.array(chunk.digest),
    )
    return stream.getvalue()


def _view_tokens(model: LoadedModel, batch: Batch, plan: TokenPlan, view: int) -> Tensor:
    """Return the tokens of one view other than the plain one. Its patches depend on (seed, view, image)."""
    assert isinstance(model.model, ViT)
    assert isinstance(batch.images, Tensor)
    config = model.model.config
    patches = prod(config.grid(*config.image_hw))
    kept = None
    if plan.view_patches < patches:
        choose = partial(choose_tokens, patches=patches, kept=plan.view_patches, extras=config.extra_tokens)
        kept = torch.stack([choose(random_generator(plan.seed, view, int(index))) for index in batch.items])
    images = batch.images.flip(-1) if view == MIRRORED else batch.images
    return model.lower_tokens(images, len(model.model.blocks) - plan.trained, kept)


def choose_tokens(random: np.random.Generator, *, patches: int, kept: int, extras: int) -> Tensor:
    """Return the sorted indices of some patches of an image, and of the tokens before the patches."""
    chosen = extras + np.sort(random.permutation(patches)[:kept])
    return torch.from_numpy(np.concatenate([np.arange(extras), chosen]))  # pyright: ignore[reportUnknownMemberType]


def view_loader(model: LoadedModel, items: Sequence[Item], plan: TokenPlan, view: int) -> BatchLoader:
    loader = make_loader(model, items, multi_label=model.multi_label, batch_size=BATCH, workers=plan.workers)
    if view in (PLAIN, MIRRORED):
        return loader
    patch = model.model.config.step_hw
    images = ImageDataset(items, model.preprocess, augment=plan.augment, seed=plan.seed, patch=patch)
    return replace(loader, images=images)
