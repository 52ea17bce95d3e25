"""Describe a checkpoint: dialect, config, preprocessing, checksum, and what became of every tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral.files import sha256_of
from vitral.model.network import Config
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import LoadReport
from vitral.weights.dialects import native, plan_load
from vitral.weights.load import load_plan, open_source


@dataclass(frozen=True, kw_only=True)
class Description:
    """Content and identity of a checkpoint."""

    path: Path
    provenance: Mapping[str, Any] | None
    """Versions and source that files of our own format store."""
    bytes: int | None
    """Size of the file; None for a checkpoint in several files."""
    sha256: str | None
    """SHA-256 of the file; None for a checkpoint in several files."""
    data_sha256: str | None
    """SHA-256 of the tensors, which files of our own format store and which was verified."""
    parameters: int
    config: Config
    preprocess: Preprocess
    labels: tuple[str, ...] | None
    report: LoadReport

    def as_dict(self) -> dict[str, Any]:
        """Return the description as plain JSON values."""
        values = vars(self) | {"path": str(self.path), "config": native.config_as_dict(self.config)}
        values |= {"preprocess": self.preprocess.as_dict(), "report": self.report.as_dict()}
        optional = ("bytes", "sha256", "data_sha256")
        return {name: value for name, value in values.items() if value is not None or name not in optional}


def describe(source: str | Path, **config_overrides: Any) -> Description:
    """Load a checkpoint, verify its checksum, and return what it contains.

    Keywords are config fields to change, as in ``vitral.load``.
    """
    file = open_source(source)
    native.verify_file(file)
    metadata = native.read_metadata(file) if native.recognizes(file) else {}
    checkpoint = load_plan(plan_load(file, config_overrides), str(source), None, config_overrides)
    assert file.path is not None
    assert checkpoint.report is not None
    is_file = file.path.is_file()
    return Description(
        path=file.path,
        bytes=file.path.stat().st_size if is_file else None,
        sha256=sha256_of(file.path) if is_file else None,
        data_sha256=metadata.get("sha256"),
        provenance=metadata.get("provenance"),
        parameters=sum(parameter.numel() for parameter in checkpoint.model.parameters()),
        config=checkpoint.model.config,
        preprocess=checkpoint.preprocess,
        labels=checkpoint.labels,
        report=checkpoint.report,
    )
