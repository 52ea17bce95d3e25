"""Compute the features of images, and keep them in the cache by a SHA-256 over everything they depend on."""

import hashlib
import json
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from io import BytesIO
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import PIL
import torch
from torch import Tensor

from vitral import __version__
from vitral.cache import cache_limit, has_entry, keep_entry, read_entry
from vitral.collectives import current_world, from_first, is_shared
from vitral.data.batches import Batch, BatchLoader, label_tensor
from vitral.data.dataset import Item
from vitral.data.decode import fast_jpeg
from vitral.data.scan import Progress
from vitral.inference.engines import describe_engine
from vitral.inference.engines.fingerprint import package_versions, weights_digest
from vitral.inference.pipeline import (
    ModelOutputs,
    join_outputs,
    make_loader,
    no_readable_image,
    outputs_of,
    run_batches,
    share_outputs,
)

if TYPE_CHECKING:
    from vitral.inference.loaded_model import Images, LoadedModel

CHUNK_IMAGES = 1024
"""About as many images share a file, so that a killed pass over a large dataset loses little."""


def cached_features(
    model: "LoadedModel",
    items: Sequence[Item],
    *,
    mirrored: bool = False,
    batch_size: int = 64,
    workers: int = 0,
    multi_label: bool = False,
    cache: bool = True,
    digest: "hashlib._Hash | None" = None,
) -> Generator[Progress, None, ModelOutputs]:
    """Yield progress and return the features of the images; ``mirrored`` flips each image horizontally.

    Features that are in the cache are read from it, the others are computed and kept chunk by chunk. The batches are
    the same either way, and so are the numbers. Pass the ``digest`` of the model if you have it. ``cache=False`` reads
    and keeps nothing. The processes of a command compute the batches in turn, and the first one has the cache.
    """
    world = current_world()
    loader = make_loader(model, items, multi_label=multi_label, batch_size=batch_size, workers=workers, world=world)
    starts = range(0, len(items), _chunk_size(batch_size))
    keys: dict[int, str] = {}
    if cache and world.is_first:
        keys = _chunk_keys(model_digest(model) if digest is None else digest, loader, mirrored=mirrored)
    read = ((start, _read_chunk(key, loader, start)) for start, key in keys.items())
    chunks = {start: features for start, features in read if features is not None}
    chunks = _share_chunks(chunks, items)
    cached = done = sum(len(_chunk(loader, start)) for start in chunks)
    batches = _load_missing(loader, [start for start in starts if start not in chunks])
    for start, group in groupby(batches, key=lambda pair: pair[0]):
        chunk_batches = (batch for _, batch in group)
        features = yield from run_batches(chunk_batches, partial(_compute, model, mirrored=mirrored), items, done=done)
        features = share_outputs(features)
        model.check_finite(features.outputs)
        done += len(_chunk(loader, start))
        chunks[start] = features
        if keys and features.outputs[:1].nbytes * len(items) <= cache_limit():  # else the last displace the first
            keep_entry("features", keys[start], _to_npz(features, start))
    return _combine(items, [chunks[start] for start in starts], cached)


def has_cached_features(
    model: "LoadedModel", items: Sequence[Item], *, batch_size: int, digest: "hashlib._Hash"
) -> bool:
    """Return whether the cache of the first process has the features of all these images."""
    keys = _chunk_keys(digest, make_loader(model, items, batch_size=batch_size), mirrored=False)
    return from_first(all(has_entry("features", key) for key in keys.values()))


def model_digest(model: "LoadedModel") -> "hashlib._Hash":
    """Return a digest of everything that features depend on except the images."""
    digest = weights_digest(model.model.state_dict())
    facts = [asdict(model.model.config), model.preprocess.as_dict(), model.precision, model.device.type]
    facts += [__version__, torch.__version__, PIL.__version__, getattr(fast_jpeg(), "__version__", "")]
    if model.engine is not None:
        facts += [describe_engine(model.engine), package_versions(), getattr(model.engine, "calibration", "")]
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return digest


def add_items(digest: "hashlib._Hash", items: Sequence[Item], stamps: dict[str, str]) -> None:
    """Add the images to a digest: their names, and size and time of their files, which `stamps` remembers."""
    for item in items:
        path = getattr(item.source, "path", "")
        if path not in stamps:
            stamps[path] = _file_stamp(path) if path else ""
        digest.update(f"{item.key}\t{item.source!r}\t{stamps[path]}\n".encode("utf-8", "surrogateescape"))


# ---- chunks ----


def _chunk_size(batch_size: int) -> int:
    """Return the number of images per chunk: whole batches, so that chunks do not change the batches."""
    return batch_size * max(1, CHUNK_IMAGES // batch_size)


def _chunk(loader: BatchLoader, start: int) -> Sequence[Item]:
    return loader.images.items[start : start + _chunk_size(loader.batch_size)]


def _chunk_keys(digest: "hashlib._Hash", loader: BatchLoader, *, mirrored: bool) -> dict[int, str]:
    """Return the name in the cache of each chunk, by its first item. Labels are not part of it."""
    stamps: dict[str, str] = {}
    keys: dict[int, str] = {}
    for start in range(0, len(loader.images), _chunk_size(loader.batch_size)):
        chunk = digest.copy()
        chunk.update(f"{mirrored} {loader.images.is_cached}\n".encode())  # is_cached: decoded whole, never shrunk
        add_items(chunk, _chunk(loader, start), stamps)
        keys[start] = f"{chunk.hexdigest()}.npz"
    return keys


def _file_stamp(path: str) -> str:
    try:
        stat = os.stat(path)
        return f"{stat.st_size} {stat.st_mtime_ns}"
    except (OSError, ValueError):
        return "missing"


def _load_missing(loader: BatchLoader, missing: Sequence[int]) -> Iterator[tuple[int, Batch]]:
    """Yield the batches of the missing chunks, each with the first item of its chunk.

    Chunks in a row are loaded in one go, so that worker processes do not wait at the end of each. Several processes
    meet after each chunk.
    """
    size = _chunk_size(loader.batch_size)
    if loader.world > 1:
        for start in missing:
            first = start // loader.batch_size
            yield from ((start, batch) for batch in loader.epoch(start=first, stop=first + size // loader.batch_size))
        return
    rows = groupby(enumerate(missing), key=lambda pair: pair[1] - pair[0] * size)
    for row in ([start for _, start in pairs] for _, pairs in rows):
        first, stop = row[0] // loader.batch_size, (row[-1] + size) // loader.batch_size
        for number, batch in enumerate(loader.epoch(start=first, stop=stop), first):
            yield number * loader.batch_size // size * size, batch


def _share_chunks(chunks: dict[int, ModelOutputs], items: Sequence[Item]) -> dict[int, ModelOutputs]:
    """Return the chunks of the first process, in every process."""
    if not is_shared():
        return chunks
    shared = {}
    for start in from_first(list(chunks)):
        rows = from_first(outputs_of(chunks[start]) if start in chunks else None)
        assert rows is not None
        shared[start] = join_outputs([rows], items)
    return shared


def _compute(model: "LoadedModel", images: "Images", *, mirrored: bool) -> Tensor:
    if mirrored:
        images = images.flip(-1) if isinstance(images, Tensor) else [image.flip(-1) for image in images]
    return model.features(images)


def _combine(items: Sequence[Item], chunks: Sequence[ModelOutputs], cached: int) -> ModelOutputs:
    """Return the features of all chunks. Raise DataError if no image is readable."""
    unreadable = tuple(bad for chunk in chunks for bad in chunk.unreadable)
    filled = [chunk for chunk in chunks if len(chunk.outputs)]
    if not filled:
        raise no_readable_image(items, unreadable)
    return ModelOutputs(
        items=items,
        outputs=torch.cat([chunk.outputs for chunk in filled]),
        labels=torch.cat([chunk.labels for chunk in filled]),
        indices=torch.cat([chunk.indices for chunk in filled]),
        unreadable=unreadable,
        cached=cached,
    )


# ---- files ----


def _read_chunk(key: str, loader: BatchLoader, start: int) -> ModelOutputs | None:
    """Return the cached features of a chunk, or None if there are none or the file is damaged."""
    content = read_entry("features", key)
    try:
        with np.load(BytesIO(content or b""), allow_pickle=False) as arrays:
            rows, order = (torch.from_numpy(arrays[name]) for name in ("rows", "order"))
            unreadable = tuple((str(name), str(reason)) for name, reason in arrays["unreadable"].reshape(-1, 2))
    except Exception:  # a damaged cache must never stop an evaluation
        return None
    items = _chunk(loader, start)
    is_consistent = (  # somebody may have edited the file
        order.ndim == 1
        and ((order >= 0) & (order < len(items))).all()
        and rows.ndim == 2
        and len(rows) == len(order) == len(items) - len(unreadable)
        and rows.isfinite().all()
    )
    if not is_consistent:
        return None
    labels = label_tensor([items[index] for index in order.tolist()], loader.classes, loader.multi_label)
    everything = loader.images.items
    return ModelOutputs(items=everything, outputs=rows, labels=labels, indices=order + start, unreadable=unreadable)


def _to_npz(features: ModelOutputs, start: int) -> bytes:
    stream = BytesIO()
    np.savez(
        stream,
        rows=features.outputs.numpy(),
        order=(features.indices - start).numpy(),
        unreadable=np.array(features.unreadable, dtype=np.str_).reshape(-1, 2),
    )
    return stream.getvalue()
