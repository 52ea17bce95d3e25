"""Files: atomic writes, locks, hashes, and file names as text. No other module renames a temporary file."""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

from vitral.errors import VitralError, WeightsError


@contextmanager
def atomic_path(path: Path, error: type[VitralError] = WeightsError) -> Iterator[Path]:
    """Yield a temporary path beside the target and rename it over the target on success.

    A reader sees the old file or the new one, never a part of one. Failures raise ``error`` and leave the old file.
    """
    try:
        path = path.resolve()  # a link stays; its target is replaced
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as cause:
        raise error(f"Cannot write {path}: {cause}.") from cause
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # safetensors creates files that only their owner can read
        flush_to_disk(temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError, ValueError, _safetensors_error()) as cause:
        # torch.save reports a full disk as a RuntimeError, safetensors as an error of its own.
        raise write_error(path, cause, error) from cause
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def is_leftover(path: Path) -> bool:
    """Return whether a file is what `atomic_path` leaves behind if its process is killed."""
    return re.fullmatch(r"\..+\.[0-9]+\.tmp", path.name) is not None


@contextmanager
def atomic_files(path: Path) -> Iterator[Path]:
    """Yield a path of the same name in a temporary folder; on success, move every file written there beside the target.

    For formats that write several files: the target itself is moved last, so that it never refers to a missing one.
    """
    path = path.resolve()  # a link stays; its target is replaced
    try:
        with TemporaryDirectory(prefix=".write-", dir=path.parent, ignore_cleanup_errors=True) as folder:
            yield Path(folder) / path.name
            for written in sorted(Path(folder).iterdir(), key=lambda file: file.name == path.name):
                flush_to_disk(written)
                written.replace(path.with_name(written.name))
    except OSError as cause:
        raise write_error(path, cause, WeightsError) from cause


def write_error(path: Path, cause: Exception, error: type[VitralError]) -> VitralError:
    """Return the error of a file that cannot be written; its exit code is 1 if the disk is full."""
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    is_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
    if "No space left" in reason or "inline_container" in reason:  # safetensors; torch.save
        reason, is_full = "No space left on device", True
    failure = error(f"Cannot write {path}: {reason}.")
    if is_full:
        failure.exit_code = 1
    return failure


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside the target; on success, rename it unless another process wrote the target."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        try:
            temporary.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _safetensors_error() -> type[Exception]:
    module = sys.modules.get("safetensors")
    return OSError if module is None else module.SafetensorError


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str, error: type[VitralError] = WeightsError) -> None:
    """Write a text file atomically, as UTF-8."""
    with atomic_path(path, error) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: object, error: type[VitralError] = WeightsError) -> None:
    """Write an object as indented JSON, atomically."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n", error)


def flush_to_disk(path: Path) -> None:
    """fsync a file or a folder."""
    if path.is_dir() and os.name == "nt":
        return  # Windows has no handle for folders
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows only flushes writable handles
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def flush_and_hash(path: Path) -> str:
    """fsync a file while its SHA-256 is computed, which takes as long as the slower of the two; return the SHA-256."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        flushing = thread.submit(flush_to_disk, path)
        digest = sha256_of(path)
        flushing.result()
    return digest


def try_lock(handle: int) -> bool:
    """Lock an open file for this process. Return False if another process holds the lock."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(handle, 2**30, os.SEEK_SET)  # locked bytes cannot be read, and the process id at the start should be
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        finally:
            os.lseek(handle, 0, os.SEEK_SET)
        return True
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)  # a file system without locks must not keep anybody from working
    return True


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file. To find out, this takes the lock for an instant."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not try_lock(handle)
    finally:
        os.close(handle)


def as_text(name: str) -> str:
    """Return a name that can be written anywhere: bytes that are not UTF-8 and lone surrogates become escapes."""
    try:
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:
        return name.encode("utf-8", "backslashreplace").decode("utf-8")


_HARMLESS = "\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{IDEOGRAPHIC SPACE}\N{ZERO WIDTH JOINER}"


def printable(text: str) -> str:
    """Replace control characters: names may contain anything, and a terminal must not obey it."""
    unknown = "\N{REPLACEMENT CHARACTER}"
    return "".join(letter if letter.isprintable() or letter in _HARMLESS else unknown for letter in text)


def to_json(value: object, stream: TextIO, indent: int | None = None) -> str:
    """Return JSON that the stream can encode: plain letters if it is Unicode, escapes otherwise."""
    is_unicode = (stream.encoding or "utf-8").lower().replace("-", "").startswith("utf")
    return json.dumps(value, indent=indent, ensure_ascii=not is_unicode)
