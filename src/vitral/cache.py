"""The cache: one folder and one size limit for everything that vitral can compute again.

Each kind of entry has its own folder, and each entry is one file, named by a SHA-256. Several processes may share the
cache: an entry is written whole or not at all, and an entry that disappears counts as missing. A cache that cannot be
read or written costs time, never a result. Only files with names like ours are counted and deleted, because
VITRAL_CACHE may be any folder.
"""

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from vitral.errors import ConfigError, VitralError, short_repr
from vitral.files import atomic_path

Kind = Literal["features", "shards", "tokens", "verified", "engines"]
"""features: of images; shards: indices of remote ones; tokens: of a run that trains its last blocks; verified: which
files had the right checksum; engines: how fast each one runs a model on this machine, and models in int8."""
DEFAULT_LIMIT = 10 * 10**9
"""Largest size of all entries together, in bytes, unless VITRAL_CACHE_LIMIT sets another."""
MAX_TEMPORARY_SECONDS = 24 * 3600
"""Temporary files older than this were left behind by a killed process."""
_NAME = re.compile(r"[0-9a-f]{64}(\.npz|\.json)?")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}(\.npz|\.json)?\.[0-9]+\.tmp")
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """How much of the disk some entries use."""

    files: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    path: Path
    bytes: int
    used: int
    """Time of the last use, in nanoseconds."""
    is_temporary: bool


def cache_folder() -> Path:
    """Return vitral's cache folder: VITRAL_CACHE, or the platform's. RuntimeError for a user without a home."""
    if folder := os.environ.get("VITRAL_CACHE"):
        return Path(folder).expanduser()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "vitral" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "vitral"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitral"


def cache_limit() -> int:
    """Return the size limit in bytes: VITRAL_CACHE_LIMIT, such as 20GB, or the default."""
    text = os.environ.get("VITRAL_CACHE_LIMIT", "").strip()
    if not text:
        return DEFAULT_LIMIT
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        problem = f"VITRAL_CACHE_LIMIT is not a size (got {short_repr(text)}; expected bytes or a size such as 20GB)."
        raise ConfigError(problem, hint="Set it to 20GB, for example, or unset it.")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


# ---- entries ----


def has_entry(kind: Kind, name: str) -> bool:
    """Return whether the cache has this entry, without marking it as used."""
    try:
        return _path(kind, name).is_file()
    except (OSError, RuntimeError):
        return False


def read_entry(kind: Kind, name: str) -> bytes | None:
    """Return the content of an entry and mark it as used, or return None if there is none."""
    cache_limit()  # a wrong setting is reported before hours of work, not after them
    try:
        path = _path(kind, name)
        content = path.read_bytes()
    except (OSError, RuntimeError):
        return None
    with suppress(OSError):  # read-only, or deleted by another process
        os.utime(path)
    return content


def keep_entry(kind: Kind, name: str, content: bytes) -> None:
    """Write an entry and prune the cache. Do nothing if it exceeds the limit or the disk refuses it."""
    limit = cache_limit()
    if len(content) > limit:
        return
    with suppress(OSError, RuntimeError, VitralError):
        with atomic_path(_path(kind, name)) as temporary:
            temporary.write_bytes(content)
        prune(limit)


def _path(kind: Kind, name: str) -> Path:
    assert _NAME.fullmatch(name), name
    return cache_folder() / kind / name


# ---- size ----


def usage() -> dict[Kind, Usage]:
    """Return the size of each kind of entry, temporary files included."""
    return {kind: _sum(_entries(kind)) for kind in get_args(Kind)}


def prune(limit: int | None = None) -> None:
    """Delete the least recently used entries beyond the limit, and temporary files of killed processes."""
    limit = cache_limit() if limit is None else limit
    entries = [entry for kind in get_args(Kind) for entry in _entries(kind)]
    total = sum(entry.bytes for entry in entries)
    for entry in sorted(entries, key=lambda entry: entry.used):
        is_surplus = total > limit and not entry.is_temporary
        if (is_surplus or _is_abandoned(entry)) and _delete(entry):
            total -= entry.bytes


def clear(kind: Kind | None = None) -> dict[Kind, Usage]:
    """Delete all entries, or those of one kind, and return what was deleted. Files being written stay."""
    kinds: tuple[Kind, ...] = get_args(Kind) if kind is None else (kind,)
    return {kind: _sum(filter(_delete, _settled(kind))) for kind in kinds}


def _entries(kind: Kind) -> Iterator[_Entry]:
    """Yield the files of a kind; those that other processes delete meanwhile are left out."""
    with suppress(OSError, RuntimeError), os.scandir(cache_folder() / kind) as files:
        for file in files:
            is_temporary = _TEMPORARY.fullmatch(file.name) is not None
            if is_temporary or _NAME.fullmatch(file.name):
                with suppress(OSError):
                    status = file.stat(follow_symlinks=False)
                    size, used = status.st_size, status.st_mtime_ns
                    yield _Entry(path=Path(file.path), bytes=size, used=used, is_temporary=is_temporary)


def _settled(kind: Kind) -> list[_Entry]:
    return [entry for entry in _entries(kind) if not entry.is_temporary or _is_abandoned(entry)]


def _is_abandoned(entry: _Entry) -> bool:
    return entry.is_temporary and time.time() - entry.used / 1e9 > MAX_TEMPORARY_SECONDS


def _delete(entry: _Entry) -> bool:
    """Delete a file and return whether it is gone. A process that has opened it can read on; Windows keeps it then."""
    try:
        entry.path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _sum(entries: Iterable[_Entry]) -> Usage:
    sizes = [entry.bytes for entry in entries]
    return Usage(files=len(sizes), bytes=sum(sizes))
