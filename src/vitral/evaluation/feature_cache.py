"""Keep computed features on disk, keyed by a SHA-256 over everything they depend on."""

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import PIL
import torch
from torch import Tensor

from vitral import __version__
from vitral.data.dataset import Item
from vitral.data.decode import fast_jpeg
from vitral.errors import VitralError
from vitral.files import atomic_path, cache_folder
from vitral.inference.pipeline import ModelOutputs

if TYPE_CHECKING:
    from vitral.inference.loaded_model import LoadedModel

MAX_BYTES = 2 * 2**30
"""Largest size of the cache; the least recently used files go first."""
MAX_TEMPORARY_SECONDS = 24 * 3600
"""Temporary files older than this were left behind by a killed process."""


def features_folder() -> Path:
    """Return the folder of the cached features. Raise RuntimeError for a user without a home folder."""
    return cache_folder() / "features"


def model_digest(model: "LoadedModel") -> "hashlib._Hash":
    """Return a digest of everything that features depend on except the images."""
    digest = weights_digest(model.model.state_dict())
    facts = [asdict(model.model.config), model.preprocess.as_dict(), model.precision, model.device.type]
    facts += [__version__, torch.__version__, PIL.__version__, getattr(fast_jpeg(), "__version__", "")]
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return digest


def weights_digest(tensors: Mapping[str, Tensor]) -> "hashlib._Hash":
    """Return a digest of names and values."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest


def cache_key(model: "hashlib._Hash", items: Sequence[Item]) -> str:
    """Return the key of these images for the model with this digest."""
    digest = model.copy()
    stamps: dict[str, str] = {}
    for item in items:
        path = getattr(item.source, "path", "")
        if path not in stamps:
            stamps[path] = _file_stamp(path) if path else ""
        line = f"{item.key}\t{item.label}\t{item.source!r}\t{stamps[path]}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _file_stamp(path: str) -> str:
    try:
        stat = os.stat(path)
        return f"{stat.st_size} {stat.st_mtime_ns}"
    except (OSError, ValueError):
        return "missing"


def is_cached(key: str) -> bool:
    """Return whether the cache has features under this key."""
    with suppress(RuntimeError):
        return (features_folder() / f"{key}.npz").is_file()
    return False


def read_features(key: str, items: Sequence[Item]) -> ModelOutputs | None:
    """Return the cached features of these images, or None if there are none or the file is damaged."""
    try:
        path = features_folder() / f"{key}.npz"
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            rows, labels, indices = (torch.from_numpy(arrays[name]) for name in ("rows", "labels", "order"))
            unreadable = tuple((str(name), str(reason)) for name, reason in arrays["unreadable"].reshape(-1, 2))
        os.utime(path)
    except Exception:  # a damaged cache must never stop an evaluation
        return None
    is_consistent = (  # somebody may have edited the file
        indices.ndim == 1
        and ((indices >= 0) & (indices < len(items))).all()
        and rows.ndim == 2
        and len(rows) == len(labels) == len(indices) == len(items) - len(unreadable)
        and rows.isfinite().all()
    )
    if not is_consistent:
        return None
    return ModelOutputs(items=items, outputs=rows, labels=labels, indices=indices, unreadable=unreadable)


def keep_features(key: str, features: ModelOutputs) -> None:
    """Write features to the cache. Do nothing if they are too large or the disk refuses them."""
    if features.outputs.nbytes > MAX_BYTES:
        return
    with suppress(RuntimeError, OSError, VitralError):
        folder = features_folder()
        with atomic_path(folder / f"{key}.npz") as temporary, temporary.open("wb") as stream:
            np.savez(
                stream,
                rows=features.outputs.numpy(),
                labels=features.labels.numpy(),
                order=features.indices.numpy(),
                unreadable=np.array(features.unreadable, dtype=np.str_).reshape(-1, 2),
            )
        _prune(folder)


def _prune(folder: Path) -> None:
    """Delete the least recently used files beyond the size limit, and old temporary files."""
    stats = {path: path.stat() for pattern in ("*.npz", ".*.tmp", "*.part") for path in folder.glob(pattern)}
    total = 0
    for path in sorted(stats, key=lambda path: stats[path].st_mtime, reverse=True):
        is_stale = path.suffix != ".npz" and time.time() - stats[path].st_mtime > MAX_TEMPORARY_SECONDS
        total += stats[path].st_size
        if is_stale or total > MAX_BYTES:
            path.unlink(missing_ok=True)
            total -= stats[path].st_size
