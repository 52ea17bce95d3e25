"""Tokens of the frozen lower blocks, computed once per image and view, for training the blocks above them.

The plain view of an image is complete, because the linear probe and the validation need it. Other views only serve
training, which leaves out patches anyway: they run the lower blocks alone, on some of the patches.

The tokens are kept as bfloat16 in a memory-mapped file. It lies in the cache folder under a key of everything it
depends on, with its SHA-256 beside it: a resumed run uses it if it is intact and computes it again otherwise. A
killed pass continues from the chunks of its views that are complete.
"""

import json
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from math import ceil, prod
from pathlib import Path

import torch
from torch import Tensor

from vitral.cache import cache_folder, cache_limit, keep_entry
from vitral.collectives import current_world
from vitral.data.batches import label_tensor
from vitral.data.dataset import Item
from vitral.data.scan import Progress
from vitral.errors import DataError
from vitral.evaluation.feature_cache import add_items
from vitral.files import flush_to_disk, sha256_of, write_json
from vitral.inference.engines.fingerprint import weights_digest
from vitral.inference.loaded_model import LoadedModel
from vitral.model.config import ViTConfig
from vitral.model.vit import ViT
from vitral.training.token_views import CHUNK, PLAIN, TokenPlan, View, chunk_name, to_npz, view_loader

MAX_DISK_FRACTION = 0.5
"""Largest fraction of the free disk space that the tokens of a run may take."""
MIN_PATCHES = 48
"""A training step uses at least this many patches of an image."""
UPPER_FIELDS = ("pool", "class_token", "norm_after_pool", "representation", "num_classes", "head_bias", "drop_path")
"""Fields of a network that the tokens of its lower blocks do not depend on."""
VIEW_PATCHES = 1.5
"""Other views than the plain one keep this many times the patches of a step, so that steps still draw among them."""


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
                    self.path.with_name(chunk_name(self.path, view, start)).unlink(missing_ok=True)


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
        loader = view_loader(model, images, plan, number)
        view = View(model=model, plan=plan, number=number, loader=loader, tokens=tokens, row_of=row_of)
        for start in range(0, len(images), CHUNK):
            name = chunk_name(path, number, start)
            if (chunk := view.read(name)) is None:
                computing = view.compute(start)
                while True:
                    try:
                        yield Progress(done=done + next(computing), total=total)
                    except StopIteration as end:
                        chunk = end.value
                        break
                keep_entry("tokens", name, to_npz(chunk))
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
