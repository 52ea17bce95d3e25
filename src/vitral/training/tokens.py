"""Tokens of the frozen lower blocks, computed once per image and view, for training the blocks above them.

The plain view of an image is complete, because the linear probe and the validation need it. Other views only serve
training, which leaves out patches anyway: they run the lower blocks alone, on some of the patches.

The tokens are kept as bfloat16 in a memory-mapped file. It lies in the cache folder under a key of everything it
depends on, with its SHA-256 beside it: a resumed run uses it if it is intact and computes it again otherwise. While it
is written, each chunk has an entry of its own in the cache, from which a killed pass continues.
"""

import hashlib
import json
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import BytesIO
from math import ceil, prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitral.cache import cache_folder, cache_limit, keep_entry, read_entry
from vitral.collectives import current_world
from vitral.data.augment import Augment
from vitral.data.batches import Batch, BatchLoader, ImageDataset, label_tensor
from vitral.data.dataset import Item
from vitral.data.randomness import random_generator
from vitral.data.scan import Progress
from vitral.errors import DataError
from vitral.evaluation.feature_cache import add_items
from vitral.files import flush_to_disk, sha256_of, write_json
from vitral.inference.engines.fingerprint import weights_digest
from vitral.inference.loaded_model import LoadedModel
from vitral.inference.pipeline import make_loader
from vitral.model.config import ViTConfig
from vitral.model.vit import ViT

PLAIN, MIRRORED = 0, 1
"""The first two views of an image; all others are augmented."""
BATCH = 32
CHUNK = 32 * BATCH
"""A killed pass loses at most so many images."""
MAX_DISK_FRACTION = 0.5
"""Largest fraction of the free disk space that the tokens of a run may take."""
MIN_PATCHES = 48
"""A training step uses at least this many patches of an image."""
UPPER_FIELDS = ("pool", "class_token", "norm_after_pool", "representation", "num_classes", "head_bias", "drop_path")
"""Fields of a network that the tokens of its lower blocks do not depend on."""
VIEW_PATCHES = 1.5
"""Other views than the plain one keep this many times the patches of a step, so that steps still draw among them."""


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
class TokenSet:
    """The tokens of the readable images of a split."""

    items: Sequence[Item]
    """All images of the split, unreadable ones included."""
    tokens: Tensor
    """(images, N, D) in bfloat16, memory-mapped: the plain view."""
    views: Tensor
    """(views - 1, viewed images, M, D): the other views of the first images, with fewer patches."""
    labels: Tensor
    indices: Tensor
    """(images,): the index in ``items`` of each row."""
    unreadable: tuple[tuple[str, str], ...]
    path: Path
    computed: float = 0.0
    """Fraction of all views that was computed, and not left by a killed pass."""

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
            images = [len(self.items), *[self.views.shape[1]] * len(self.views)]
            for view, count in enumerate(images):
                for start in range(0, count, CHUNK):
                    self.path.with_name(_chunk_name(self.path, view, start)).unlink(missing_ok=True)


def count_patches(config: ViTConfig, dropped: float) -> tuple[int, int]:
    """Return how many patches of an image a training step uses, and how many a view other than the plain one keeps.

    Networks whose blocks depend on the positions of all patches use all of them.
    """
    rows, columns = config.grid(*config.image_hw)
    if config.position_at != "stem" or config.position == "relative" or config.attention != "full":
        return rows * columns, rows * columns
    step = min(rows * columns, max(MIN_PATCHES, round(rows * columns * (1 - dropped))))
    return step, min(rows * columns, ceil(VIEW_PATCHES * step))


def affordable_views(model: ViT, plan: TokenPlan, images: int) -> int:
    """Return how many views per image the disk has room for, at most those of the plan; 0 if not even one fits."""
    with suppress(OSError, RuntimeError):
        free = min(MAX_DISK_FRACTION * shutil.disk_usage(_tokens_folder()).free, cache_limit())
        fitting = (views for views in range(plan.views, 0, -1) if token_bytes(model, plan, images, views) <= free)
        return next(fitting, 0)
    return 0


def token_bytes(model: ViT, plan: TokenPlan, images: int, views: int) -> int:
    """Return the size of the file."""
    return 2 * sum(map(prod, _shapes(model, replace(plan, views=views), images)))


def _shapes(model: ViT, plan: TokenPlan, images: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the plain view and of the others."""
    extras, width = model.config.extra_tokens, model.config.width
    plain = (images, extras + prod(model.config.grid(*model.config.image_hw)), width)
    return plain, (plan.views - 1, plan.viewed, extras + plan.view_patches, width)


def compute_tokens(
    model: LoadedModel, items: Sequence[Item], plan: TokenPlan
) -> Generator[Progress, None, tuple[TokenSet, Tensor]]:
    """Yield progress and return the tokens of the images and the inputs of the head, which the plain view gives.

    An image that cannot be read is left out of all views.
    """
    path = _tokens_folder() / _key(model, items, plan)
    with _removed_unless_complete(path):
        return (yield from _write_tokens(model, items, plan, path))


@contextmanager
def _removed_unless_complete(path: Path) -> Generator[None]:
    """Remove a file that is not written to its end, unless somebody interrupted it and may continue.

    Some systems forbid that; there the cache removes it later.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Chunk:
    """Some images in one view: what the file of tokens does not hold."""

    indices: Tensor
    """(rows,): those of the readable images."""
    features: Tensor
    """(rows, D) inputs of the head; none in other views than the plain one."""
    bad: Sequence[tuple[int, str]]
    digest: str
    """SHA-256 of the tokens."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _View:
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

    def compute(self, start: int) -> Generator[int, None, _Chunk]:
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
        return _Chunk(indices=indices, features=features, bad=bad, digest=self.digest(indices))

    def digest(self, indices: Tensor) -> str:
        return hashlib.sha256(self.tokens[self.rows(indices)].view(torch.uint8).numpy().data).hexdigest()

    def read(self, name: str) -> _Chunk | None:
        """Return a chunk that a killed pass has left, if its tokens are intact in the file."""
        try:
            with np.load(BytesIO(read_entry("tokens", name) or b""), allow_pickle=False) as arrays:
                chunk = _Chunk(
                    indices=torch.tensor(arrays["indices"]),
                    features=torch.tensor(arrays["features"]),
                    bad=[(int(index), str(reason)) for index, reason in arrays["bad"].reshape(-1, 2)],
                    digest=str(arrays["digest"]),
                )
            return chunk if self.digest(chunk.indices) == chunk.digest else None
        except Exception:  # none, damaged, or of other images
            return None


def _write_tokens(
    model: LoadedModel, items: Sequence[Item], plan: TokenPlan, path: Path
) -> Generator[Progress, None, tuple[TokenSet, Tensor]]:
    assert isinstance(model.model, ViT)
    plain, views = _open(path, _shapes(model.model, plan, len(items)))
    total, done, computed = len(items) + (plan.views - 1) * plan.viewed, 0, 0
    row_of: dict[int, int] = {}
    features: list[Tensor] = []
    bad: list[tuple[int, str]] = []
    for number in range(plan.views):
        images, tokens = (items, plain) if number == PLAIN else (items[: plan.viewed], views[number - 1])
        loader = _view_loader(model, images, plan, number)
        view = _View(model=model, plan=plan, number=number, loader=loader, tokens=tokens, row_of=row_of)
        for start in range(0, len(images), CHUNK):
            name = _chunk_name(path, number, start)
            if (chunk := view.read(name)) is None:
                computing = view.compute(start)
                while True:
                    try:
                        yield Progress(done=done + next(computing), total=total)
                    except StopIteration as end:
                        chunk = end.value
                        break
                keep_entry("tokens", name, _to_npz(chunk))
                computed += min(CHUNK, len(images) - start)
            done += min(CHUNK, len(images) - start)
            if number == PLAIN:
                row_of |= {int(index): row for index, row in zip(chunk.indices, view.rows(chunk.indices), strict=True)}
                features.append(chunk.features)
                bad += chunk.bad
    if not row_of:
        raise DataError(f"None of the {len(items)} images is readable{f': {bad[0][1]}' if bad else ''}.")
    write_json(_facts_path(path), {"images": len(items), "unreadable": bad, "sha256": _flush(path)})
    indices = torch.tensor(list(row_of), dtype=torch.long)
    labels = label_tensor([items[index] for index in row_of], len(model.labels), model.multi_label)
    token_set = _token_set(items, path, (plain, views), indices, labels, dict(bad))
    return replace(token_set, computed=computed / total), model.check_finite(torch.cat(features))


def _chunk_name(path: Path, view: int, start: int) -> str:
    return hashlib.sha256(f"{path.name} {view} {start}".encode()).hexdigest() + ".npz"


def _to_npz(chunk: _Chunk) -> bytes:
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


def restore_tokens(model: LoadedModel, items: Sequence[Item], plan: TokenPlan) -> Generator[Progress, None, TokenSet]:
    """Return the tokens of a run that is resumed: from their file if it is intact, or computed again."""
    path = _tokens_folder() / _key(model, items, plan)
    assert isinstance(model.model, ViT)
    shapes = _shapes(model.model, plan, len(items))
    try:
        facts = json.loads(_facts_path(path).read_text(encoding="utf-8"))
        unreadable = {int(index): str(reason) for index, reason in facts["unreadable"]}
        is_intact = path.stat().st_size == 2 * sum(map(prod, shapes)) and sha256_of(path) == facts["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        is_intact, unreadable = False, {}
    if not is_intact:
        tokens, _ = yield from compute_tokens(model, items, plan)
        return tokens
    indices = torch.tensor([index for index in range(len(items)) if index not in unreadable], dtype=torch.long)
    labels = label_tensor([items[int(index)] for index in indices], len(model.labels), model.multi_label)
    return _token_set(items, path, _map(path, shapes), indices, labels, unreadable)


def _token_set(
    items: Sequence[Item],
    path: Path,
    stored: tuple[Tensor, Tensor],
    indices: Tensor,
    labels: Tensor,
    unreadable: Mapping[int, str],
) -> TokenSet:
    plain, views = stored
    return TokenSet(
        items=items,
        tokens=plain[: len(indices)],
        views=views,
        labels=labels,
        indices=indices,
        unreadable=tuple((items[index].key, reason) for index, reason in unreadable.items()),
        path=path,
    )


def _view_loader(model: LoadedModel, items: Sequence[Item], plan: TokenPlan, view: int) -> BatchLoader:
    loader = make_loader(model, items, multi_label=model.multi_label, batch_size=BATCH, workers=plan.workers)
    if view in (PLAIN, MIRRORED):
        return loader
    patch = model.model.config.step_hw
    images = ImageDataset(items, model.preprocess, augment=plan.augment, seed=plan.seed, patch=patch)
    return replace(loader, images=images)


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
    config = {name: value for name, value in asdict(network.config).items() if name not in UPPER_FIELDS}
    facts = (model.preprocess, model.precision, model.device.type, config, plan, torch.__version__)
    digest.update(repr(facts).encode())
    add_items(digest, items, {})
    rank = current_world().rank  # each process computes and keeps its own
    return f"{digest.hexdigest()}-{rank}" if rank else digest.hexdigest()


def _open(path: Path, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Return memory-mapped tensors of bfloat16, one after the other in a file: that of a killed pass, or a new one."""
    _facts_path(path).unlink(missing_ok=True)  # the hash of an older file
    size = 2 * sum(map(prod, shapes))
    if not path.is_file() or path.stat().st_size != size:
        path.unlink(missing_ok=True)
        with path.open("wb") as stream:
            stream.truncate(size)
    return _map(path, shapes)


def _map(path: Path, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    sizes = [prod(shape) for shape in shapes]
    whole = torch.from_file(str(path), shared=True, size=sum(sizes), dtype=torch.bfloat16)
    return whole[: sizes[0]].view(shapes[0]), whole[sizes[0] :].view(shapes[1])


def _flush(path: Path) -> str:
    flush_to_disk(path)
    return sha256_of(path)
