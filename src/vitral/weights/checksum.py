"""Verify the SHA-256 that our own files store about their tensors.

Verification reads the whole file. ``once=True`` remembers verified files by path, size and modification time in
vitral's cache folder, so that only the first prediction with a file pays for it.
"""

import hashlib
from contextlib import suppress
from pathlib import Path

from vitral.errors import WeightsError
from vitral.files import cache_folder
from vitral.weights.dialects import native
from vitral.weights.formats.opening import open_tensors
from vitral.weights.formats.tensor_file import TensorFile
from vitral.weights.hub import locate


def verify_checksum(source: str | Path, *, once: bool = False) -> None:
    """Raise WeightsError if a file of ours does not match its checksum; files of other dialects have none."""
    verify_file(open_tensors(locate(source)), once=once)


def verify_file(file: TensorFile, *, once: bool = False) -> None:
    """Raise WeightsError if an open file of ours does not match its checksum."""
    if file.path is None or not native.recognizes(file):
        return
    marker = _marker(file.path) if once else None
    if marker is not None and marker.exists():
        return
    if not native.has_valid_checksum(file):
        raise WeightsError(
            f"{file.path} is damaged or was changed: the SHA-256 of its tensors does not match its metadata.",
            hint="Copy or download it again.",
        )
    if marker is not None:
        with suppress(OSError):  # a cache that cannot be written only costs time
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()


def _marker(path: Path) -> Path | None:
    """Return the cache entry of a file, or None without a cache folder."""
    try:
        path = path.resolve()
        status = path.stat()
        key = hashlib.sha256(f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode("utf-8", "surrogateescape"))
        return cache_folder() / "verified" / key.hexdigest()
    except (OSError, RuntimeError):
        return None
