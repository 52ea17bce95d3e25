"""Read files of object stores and web servers (s3://, gs://, https://) by ranges of bytes, through fsspec.

Failed requests are repeated. A request that keeps failing raises DataError: a network is not a property of an image.
"""

import hashlib
import io
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

from vitral.data.headers import check_bytes
from vitral.errors import DataError, VitralError, first_line, missing_package

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

ATTEMPTS = 5
FIRST_WAIT = 0.5
"""Seconds before the second attempt; each later one waits twice as long."""
SECONDS_WITHOUT_DATA = 60
BLOCK_BYTES = 2**23
"""Bytes per request of a file that is read from its start to its end."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+://")
_NETWORK = "Check the address, the network and your access to it."
Result = TypeVar("Result")


class _Store(Protocol):
    """A file system of fsspec."""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes: ...
    def info(self, path: str) -> dict[str, Any]: ...
    def invalidate_cache(self) -> None: ...
    def ls(self, path: str, detail: bool) -> list[str]: ...
    def unstrip_protocol(self, name: str) -> str: ...
    def _strip_protocol(self, path: str) -> str: ...


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a store, as the store described it when it was listed."""

    url: str
    size: int
    stamp: str
    """The store's checksum or time of the last change, if it has one."""


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """A member of a tar shard on a store, by its offset."""

    url: str
    offset: int
    size: int
    digest: bytes
    """The start of its SHA-256, by which a replaced shard is noticed."""

    def read(self) -> bytes:
        check_bytes(self.size)
        return self.verify(read_range(self.url, self.offset, self.offset + self.size))

    def verify(self, content: bytes) -> bytes:
        """Return the content, or raise DataError if it is not what the index of the shard was made from."""
        if short_digest(content) == self.digest:
            return content
        hint = "Start the command again to index it again."
        raise DataError(f"{without_query(self.url)} has changed while it was in use.", hint=hint)


def short_digest(content: bytes) -> bytes:
    """Return the first 16 bytes of the SHA-256."""
    return hashlib.sha256(content).digest()[:16]


def is_url(name: str) -> bool:
    """Return whether a dataset is on an object store or a web server. A Windows drive has only one letter."""
    return _URL.match(name) is not None


def without_query(url: str) -> str:
    """Return the address without its query, which may hold a signature, for messages."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def file_name(url: str) -> str:
    """Return the last part of the path."""
    return urlsplit(url).path.rstrip("/").rpartition("/")[2]


# ---- requests ----


def read_range(url: str, start: int, end: int) -> bytes:
    """Return the bytes from `start` up to `end`."""

    def read(store: _Store, path: str) -> bytes:
        content = store.cat_file(path, start=start, end=end)
        if len(content) > end - start:
            hint = "Serve the shards by a server or a store that does."
            raise DataError(f"{without_query(url)}: the server does not support requests for ranges.", hint=hint)
        if len(content) < end - start:
            raise OSError(f"{len(content):,} of {end - start:,} bytes arrived")
        return content

    return b"" if start >= end else _repeat(url, read)


def read_file(url: str) -> bytes | None:
    """Return the content of a small file, or None if there is none."""
    try:
        return _repeat(url, lambda store, path: store.cat_file(path))
    except _NotFoundError:
        return None


def find_file(url: str) -> RemoteFile:
    """Return the size of a file and what else its store knows of it."""
    info = _repeat(url, lambda store, path: store.info(path))
    if info.get("type") != "file" or not isinstance(info.get("size"), int):
        raise DataError(f"{without_query(url)} is not a file of known size.", hint=_NETWORK)
    stamps = (str(info[name]) for name in ("ETag", "etag", "LastModified", "mtime", "updated") if info.get(name))
    return RemoteFile(url, info["size"], next(stamps, ""))


def list_files(url: str) -> list[str]:
    """Return the addresses of the files in a folder, sorted."""

    def list_all(store: _Store, path: str) -> list[str]:
        store.invalidate_cache()
        names = store.ls(path, detail=False)
        return sorted({store.unstrip_protocol(name) for name in names})

    return _repeat(url, list_all)


class RemoteStream(io.RawIOBase):
    """A file that is read from its start to its end, block by block."""

    def __init__(self, file: RemoteFile):
        self._file, self._position = file, 0
        self._block, self._block_start = memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: "WriteableBuffer") -> int:
        target = memoryview(buffer).cast("B")
        offset = self._position - self._block_start
        if not 0 <= offset < len(self._block):
            end = min(self._position + BLOCK_BYTES, self._file.size)
            self._block = memoryview(read_range(self._file.url, self._position, end))
            self._block_start, offset = self._position, 0
        piece = self._block[offset : offset + len(target)]
        target[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


class _NotFoundError(DataError):
    """The store has no such file."""


def _repeat(url: str, request: Callable[[_Store, str], Result]) -> Result:
    """Return the result of a request. Raise DataError if no attempt succeeds."""
    store, path = _open_store(url)
    for attempt in range(ATTEMPTS):
        try:
            return request(store, path)
        except VitralError:
            raise
        except Exception as error:  # every store has exceptions of its own
            if isinstance(error, FileNotFoundError) and not _hides_failure(error.__cause__):
                raise _NotFoundError(f"{without_query(url)} not found.", hint=_NETWORK) from error
            if isinstance(error, PermissionError) or attempt == ATTEMPTS - 1:
                times = "" if isinstance(error, PermissionError) else f" ({attempt + 1} attempts)"
                reason = first_line(error)
                raise DataError(f"Cannot read {without_query(url)}: {reason}{times}.", hint=_NETWORK) from error
        time.sleep(FIRST_WAIT * 2**attempt)
    raise AssertionError("unreachable")


def _hides_failure(cause: BaseException | None) -> bool:
    """Return whether a file only seems to be missing: fsspec reports failed connections to web servers as such."""
    if isinstance(cause, FileNotFoundError):
        return False
    is_response = type(cause).__module__.startswith("aiohttp") and getattr(cause, "status", None) not in (404, 410)
    return is_response or isinstance(cause, OSError | TimeoutError)


def _open_store(url: str) -> tuple[_Store, str]:
    """Return the file system of an address, and the path there."""
    address = url.rpartition("::")[2]
    store = _make_store(url.partition("://")[0], os.getpid())
    return store, store._strip_protocol(address)


@lru_cache(maxsize=16)
def _make_store(protocol: str, process: int) -> _Store:
    """Return one file system for all threads of a process; fsspec on its own would make one per thread."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise missing_package("fsspec", "remote", f"{protocol}://") from None
    options: dict[str, Any] = {}
    if protocol in ("http", "https"):
        from aiohttp import ClientTimeout

        timeout = ClientTimeout(sock_connect=SECONDS_WITHOUT_DATA, sock_read=SECONDS_WITHOUT_DATA)
        options = {"client_kwargs": {"timeout": timeout}}
    try:
        return cast(_Store, url_to_fs(f"{protocol}://", **options)[0])
    except ImportError as error:
        raise DataError(f"{protocol}:// needs another package: {first_line(error)}.") from error
    except ValueError as error:
        hint = "Use s3://, gs:// or https://, for example."
        raise DataError(f"{protocol}:// is not a known kind of address.", hint=hint) from error
