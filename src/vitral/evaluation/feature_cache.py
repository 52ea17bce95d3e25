"""Features on the disk: computed once for a model and its pictures, and found again by what they depend on.

The key is a SHA-256 over the numbers of the network, its config, the preprocessing, the precision, the versions of what
computes them, and every picture: its place, and the size and time of the file that it is in.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import PIL
import torch

from vitral import __version__
from vitral.data.dataset import Item
from vitral.data.decode import fast_jpeg
from vitral.inference.loaded_model import LoadedModel
from vitral.inference.pipeline import ModelOutputs

LARGEST = 2 * 2**30
"""Bytes that are kept; the oldest go first."""


def cache_folder() -> Path:
    if told := os.environ.get("VITRAL_CACHE"):
        return Path(told) / "features"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home()) / "vitral" / "features"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "vitral" / "features"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitral" / "features"


def digest_of(ready: LoadedModel) -> "hashlib._Hash":
    """Of all but the pictures."""
    digest = hashlib.sha256()
    for name, tensor in ready.model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    told = [asdict(ready.model.config), ready.preprocess.as_dict(), ready.precision, ready.device.type]
    told += [__version__, torch.__version__, PIL.__version__, getattr(fast_jpeg(), "__version__", "")]
    digest.update(json.dumps(told, sort_keys=True, default=str).encode())
    return digest


def key_of(model: "hashlib._Hash", items: Sequence[Item]) -> str:
    digest = model.copy()
    files: dict[str, str] = {}
    for item in items:
        path = getattr(item.source, "path", None)
        if path is not None and path not in files:
            files[path] = _state_of(path)
        line = f"{item.key}\t{item.label}\t{item.source!r}\t{files.get(path or '', '')}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _state_of(path: str) -> str:
    try:
        found = os.stat(path)
        return f"{found.st_size} {found.st_mtime_ns}"
    except (OSError, ValueError):
        return "missing"


def has(key: str) -> bool:
    with suppress(RuntimeError):  # somebody without a home
        return (cache_folder() / f"{key}.npz").is_file()
    return False


def read(key: str, items: Sequence[Item]) -> ModelOutputs | None:
    """What was kept; None where there is nothing, or it is damaged."""
    try:
        path = cache_folder() / f"{key}.npz"
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            rows, labels, order = (torch.from_numpy(arrays[name]) for name in ("rows", "labels", "order"))
            unreadable = tuple((str(name), str(why)) for name, why in arrays["unreadable"].reshape(-1, 2))
        os.utime(path)
    except Exception:  # a cache is never the reason to stop, whatever was done to its files
        return None
    found = ModelOutputs(items=items, rows=rows, labels=labels, order=order, unreadable=unreadable)
    return found if _fits(found) else None


def _fits(found: ModelOutputs) -> bool:
    """Whether these can be the features of the pictures: somebody may have written into the file."""
    pictures = len(found.items)
    is_in_order = found.order.ndim == 1 and ((found.order >= 0) & (found.order < pictures)).all()
    return bool(
        is_in_order
        and found.rows.ndim == 2
        and len(found.rows) == len(found.labels) == len(found.order)
        and len(found.order) + len(found.unreadable) == pictures
        and found.rows.isfinite().all()
    )


def keep(key: str, found: ModelOutputs) -> None:
    """Where they have room: larger ones are computed again."""
    if found.rows.nbytes > LARGEST:
        return
    try:
        folder = cache_folder()
    except RuntimeError:  # somebody without a home
        return
    path, aside = folder / f"{key}.npz", folder / f"{key}.{os.getpid()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as stream:
            np.savez(
                stream,
                rows=found.rows.numpy(),
                labels=found.labels.numpy(),
                order=found.order.numpy(),
                unreadable=np.array(found.unreadable, dtype=np.str_).reshape(-1, 2),
            )
        aside.replace(path)
        _prune(folder)
    except OSError:  # no room, or no right to write: then they are computed again
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def _prune(folder: Path) -> None:
    """The oldest go, and what was left by a process that was killed."""
    states = {path: path.stat() for path in (*folder.glob("*.npz"), *folder.glob("*.part"))}
    total = 0
    for path in sorted(states, key=lambda path: states[path].st_mtime, reverse=True):
        is_left = path.suffix == ".part" and time.time() - states[path].st_mtime > 24 * 3600
        total += states[path].st_size
        if is_left or total > LARGEST:
            path.unlink(missing_ok=True)
            total -= states[path].st_size
