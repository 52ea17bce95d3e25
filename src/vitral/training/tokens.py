"""Tokens of the frozen lower blocks, computed once per image and view, for training the blocks above them.

The tokens are kept as bfloat16 in a memory-mapped file. It lies in the cache folder under a key of everything it
depends on, with its SHA-256 beside it: a resumed run uses it if it is intact and computes it again otherwise.
"""

import json
import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitral.cache import cache_folder, cache_limit
from vitral.data.augment import Augment, random_generator
from vitral.data.batches import Batch, BatchLoader, ImageDataset, epoch_order, label_tensor
from vitral.data.dataset import Item
from vitral.data.scan import Progress
from vitral.errors import DataError
from vitral.evaluation.feature_cache import add_items, weights_digest
from vitral.files import flush_to_disk, sha256_of, write_json
from vitral.inference.loaded_model import LoadedModel
from vitral.model.vit import ViT

PLAIN, MIRRORED = 0, 1
"""The first two views of an image; all others are augmented."""
BATCH = 32
MAX_DISK_FRACTION = 0.5
"""Largest fraction of the free disk space that the tokens of a run may take."""
MIN_PATCHES = 64
"""An image keeps at least this many patches in a training step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPlan:
    """Which tokens of which images to keep."""

    trained: int
    """Number of trained blocks, the last ones."""
    views: int
    viewed: int
    """Number of images, the first ones, that have all views; the others have the plain one."""
    augment: Augment
    seed: int
    classes: int
    multi_label: bool
    workers: int = 0


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TokenSet:
    """The tokens of the readable images of a split."""

    items: Sequence[Item]
    """All images of the split, unreadable ones included."""
    tokens: Tensor
    """(views, images, N, D) in bfloat16, memory-mapped. Rows past those with all views have the first only."""
    labels: Tensor
    indices: Tensor
    """(images,): the index in ``items`` of each row."""
    unreadable: tuple[tuple[str, str], ...]
    grid: tuple[int, int]
    path: Path

    def __len__(self) -> int:
        return len(self.indices)

    def rows_before(self, item: int) -> int:
        """Return how many rows belong to the items before this one."""
        return int((self.indices < item).sum())

    def remove(self) -> None:
        """Delete the files. Where a system forbids that while they are mapped, the cache removes them later."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
            _facts_path(self.path).unlink(missing_ok=True)


def token_bytes(model: ViT, images: int, views: int) -> int:
    """Return the size of the file."""
    rows, columns = model.config.grid(*model.config.image_hw)
    return 2 * views * images * (model.config.extra_tokens + rows * columns) * model.config.width


def affordable_views(model: ViT, images: int, views: int) -> int:
    """Return how many views per image the disk has room for, at most `views`; 0 if not even one fits."""
    with suppress(OSError, RuntimeError):
        folder = _tokens_folder()
        free = MAX_DISK_FRACTION * shutil.disk_usage(folder).free
        return min(views, int(min(free, cache_limit()) // max(1, token_bytes(model, images, 1))))
    return 0


def compute_tokens(
    model: LoadedModel, items: Sequence[Item], plan: TokenPlan
) -> Generator[Progress, None, tuple[TokenSet, list[Tensor]]]:
    """Yield progress and return the tokens of the images and, for each view, the input of the head.

    An image that cannot be read is left out of all views.
    """
    path = _tokens_folder() / f"{_key(model, items, plan)}"
    assert isinstance(model.model, ViT)
    grid = model.model.config.grid(*model.model.config.image_hw)
    total = len(items) + (plan.views - 1) * plan.viewed
    stored: Tensor | None = None
    features: list[list[Tensor]] = [[] for _ in range(plan.views)]
    labels: list[Tensor] = []
    indices: list[Tensor] = []
    bad: list[tuple[int, str]] = []
    done = 0
    for view in range(plan.views):
        row = 0
        for batch in _view_loader(model, items[: plan.viewed] if view else items, plan, view).epoch(view):
            if len(batch.items):
                assert isinstance(batch.images, Tensor)
                images = batch.images.flip(-1) if view == MIRRORED else batch.images
                tokens, pooled = model.tokens(images, -plan.trained - 1)
                stored = _create(path, (plan.views, len(items), *tokens.shape[1:])) if stored is None else stored
                stored[view, row : row + len(tokens)] = tokens
                row += len(tokens)
                features[view].append(pooled)
            if not view:
                labels, indices, bad = [*labels, batch.labels], [*indices, batch.items], [*bad, *batch.bad]
            done += len(batch.items) + len(batch.bad)
            yield Progress(done=done, total=total)
    if stored is None:
        raise DataError(f"None of the {len(items)} images is readable{f': {bad[0][1]}' if bad else ''}.")
    facts = {"views": plan.views, "images": len(items), "shape": list(stored.shape[2:]), "unreadable": bad}
    write_json(_facts_path(path), {**facts, "sha256": _flush(path)})
    tokens = TokenSet(
        items=items,
        tokens=stored[:, : sum(map(len, indices))],
        labels=torch.cat(labels),
        indices=torch.cat(indices),
        unreadable=tuple((items[index].key, reason) for index, reason in bad),
        grid=grid,
        path=path,
    )
    return tokens, [model.check_finite(torch.cat(view)) for view in features]


def restore_tokens(model: LoadedModel, items: Sequence[Item], plan: TokenPlan) -> Generator[Progress, None, TokenSet]:
    """Return the tokens of a run that is resumed: from their file if it is intact, or computed again."""
    path = _tokens_folder() / f"{_key(model, items, plan)}"
    assert isinstance(model.model, ViT)
    try:
        facts = json.loads(_facts_path(path).read_text(encoding="utf-8"))
        shape = (facts["views"], facts["images"], *facts["shape"])
        unreadable = {int(index): str(reason) for index, reason in facts["unreadable"]}
        is_intact = sha256_of(path) == facts["sha256"] and path.stat().st_size == 2 * int(np.prod(shape))
    except (OSError, ValueError, KeyError, TypeError):
        is_intact, shape, unreadable = False, (), {}
    if not is_intact:
        tokens, _ = yield from compute_tokens(model, items, plan)
        return tokens
    stored = torch.from_file(str(path), shared=True, size=int(np.prod(shape)), dtype=torch.bfloat16).view(shape)
    indices = torch.tensor([index for index in range(len(items)) if index not in unreadable], dtype=torch.long)
    return TokenSet(
        items=items,
        tokens=stored[:, : len(indices)],
        labels=label_tensor([items[int(index)] for index in indices], plan.classes, plan.multi_label),
        indices=indices,
        unreadable=tuple((items[index].key, reason) for index, reason in unreadable.items()),
        grid=model.model.config.grid(*model.model.config.image_hw),
        path=path,
    )


def _view_loader(model: LoadedModel, items: Sequence[Item], plan: TokenPlan, view: int) -> BatchLoader:
    augment = None if view in (PLAIN, MIRRORED) else plan.augment
    patch = model.model.config.step_hw
    images = ImageDataset(items, model.preprocess, augment=augment, seed=plan.seed, patch=patch)
    return BatchLoader(
        images=images, batch_size=BATCH, classes=plan.classes, multi_label=plan.multi_label, workers=plan.workers
    )


def _tokens_folder() -> Path:
    folder = cache_folder() / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _facts_path(path: Path) -> Path:
    return path.with_suffix(".json")


def _key(model: LoadedModel, items: Sequence[Item], plan: TokenPlan) -> str:
    """Return a SHA-256 over everything that the tokens depend on, which the upper blocks are not part of."""
    network = model.model
    upper = tuple(f"blocks.{index}." for index in range(len(network.blocks) - plan.trained, len(network.blocks)))
    lower = {
        name: tensor
        for name, tensor in network.state_dict().items()
        if not name.startswith((*upper, "norm.", "pool.", "representation.", "head."))
    }
    digest = weights_digest(lower)
    facts = (model.preprocess, model.precision, model.device.type, network.config.image_hw, plan, torch.__version__)
    digest.update(repr(facts).encode())
    add_items(digest, items, {})
    return digest.hexdigest()


def _create(path: Path, shape: tuple[int, ...]) -> Tensor:
    """Return a new memory-mapped tensor of bfloat16."""
    _facts_path(path).unlink(missing_ok=True)  # the hash of an older file
    path.unlink(missing_ok=True)
    size = int(np.prod(shape))
    with path.open("wb") as stream:
        stream.truncate(2 * size)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16).view(shape)


def _flush(path: Path) -> str:
    flush_to_disk(path)
    return sha256_of(path)


# ---- batches ----


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
    dropped: float = 0.0
    """Fraction of the patches to leave out of each image."""

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of batches. A shuffled epoch drops the last, smaller batch unless it is the only one."""
        whole, rest = divmod(len(self.rows), self.batch_size)
        return max(1, whole) if self.shuffle else whole + (rest > 0)

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, from batch `start` on."""
        order = torch.tensor(epoch_order(len(self.rows), self.seed, epoch, shuffle=self.shuffle))
        for number in range(start, self.batches_per_epoch):
            rows = self.rows[order[number * self.batch_size : (number + 1) * self.batch_size]]
            tokens = torch.stack([self._tokens(int(row), epoch) for row in rows]).float()
            yield Batch(images=tokens, labels=self.images.labels[rows], items=self.images.indices[rows])

    def _tokens(self, row: int, epoch: int) -> Tensor:
        if not self.shuffle:
            return self.images.tokens[0, row]
        random = random_generator(self.seed, epoch, row)
        tokens = self.images.tokens[int(random.integers(len(self.images.tokens))), row]
        if not self.dropped:
            return tokens
        patches = len(tokens) - self.extras
        kept = np.sort(random.permutation(patches)[: max(MIN_PATCHES, round(patches * (1 - self.dropped)))])
        return tokens[np.concatenate([np.arange(self.extras), self.extras + kept])]


Loader = BatchLoader | TokenLoader
