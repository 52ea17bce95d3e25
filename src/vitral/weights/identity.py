"""Which file this is: its size and SHA-256, and for our own whether its numbers are those that were written."""

import hashlib
from pathlib import Path
from typing import Any

from vitral.errors import WeightsError
from vitral.weights.dialects import native
from vitral.weights.formats.detect import open_tensors
from vitral.weights.hub import locate


def identify(source: str | Path) -> dict[str, Any]:
    """WeightsError when a file of ours does not match its own checksum."""
    file = open_tensors(locate(source))
    identity: dict[str, Any] = {"path": str(file.path), "provenance": None}
    if file.path.is_file():
        identity |= {"bytes": file.path.stat().st_size, "sha256": _digest(file.path)}
    if native.recognise(file):
        told = native.read_metadata(file)
        if not native.verify(file):
            raise WeightsError(
                f"{file.path} is damaged: its numbers do not match the checksum that was written with them.",
                hint="Copy or download it again.",
            )
        identity |= {"provenance": told.get("provenance"), "data_sha256": told["sha256"]}
    return identity


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
