"""Convert a checkpoint to another dialect, and measure how far the outputs of the written file differ.

The file is written to a temporary folder, loaded again, run, compared, and kept only if it is equal.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from vitral.errors import VitralError, WeightsError, check_choice
from vitral.files import atomic_path, write_error
from vitral.model.network import Network
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import Checkpoint, LoadReport
from vitral.weights.formats.tensor_file import is_file_name
from vitral.weights.load import load
from vitral.weights.save import SaveReport, check_target, write_checkpoint
from vitral.weights.state_dict import build_on_meta

TOLERANCE = 1e-5
"""Largest difference between the source and the written file under the same constants."""
PRECISIONS = ("float32", "bfloat16", "float16")
_IMAGES = 2


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A converted checkpoint, and how far its outputs differ from the source."""

    source: str
    source_dialect: str
    target: Path
    dialect: str
    difference: float
    """Largest difference of features and logits, relative to the largest of them or 1, under the constants of the
    target library."""
    constants: dict[str, Any]
    """Config fields that the target library sets to another value; they cause ``difference`` to be above 0."""
    rounding: float
    """Difference caused by rounding to a lower precision."""
    images: int
    """Number of random images in the comparison."""
    notes: tuple[str, ...]
    report: LoadReport

    def as_dict(self) -> dict[str, Any]:
        """Return the conversion as plain JSON values."""
        keys = {"source_dialect": "from", "dialect": "to"}
        values = asdict(self) | {"target": str(self.target), "notes": list(self.notes)}
        return {keys.get(name, name): value for name, value in values.items()}


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: str,
    precision: str | None = None,
    overwrite: bool = False,
    preprocess: Preprocess | Mapping[str, Any] | None = None,
    **config_overrides: Any,
) -> Conversion:
    """Convert a checkpoint to another dialect and return how far its outputs differ.

    ``source``, ``preprocess`` and the keywords are those of ``vitral.load``; ``target`` and ``to`` are path and dialect
    of ``vitral.save``. ``precision`` rounds the weights: float32, bfloat16 or float16. The checksum of the source is
    verified.
    """
    target = check_target(target, to)
    if precision is not None:
        check_choice("precision", precision, PRECISIONS)
    if target.exists() and not overwrite:
        raise WeightsError(f"{target} already exists.", hint="Pass --overwrite (overwrite=True) to replace it.")
    checkpoint = load(source, preprocess=preprocess, verify=True, **config_overrides)
    assert checkpoint.report is not None
    rounding = 0.0 if precision is None else round_weights(checkpoint.model, precision)
    saved, difference = write_and_compare(checkpoint, target, to)
    return Conversion(
        source=str(source),
        source_dialect=checkpoint.report.dialect,
        target=target,
        dialect=to,
        difference=difference,
        constants=saved.constants,
        rounding=rounding,
        images=_IMAGES,
        notes=saved.notes,
        report=checkpoint.report,
    )


def write_and_compare(checkpoint: Checkpoint, target: Path, dialect: str) -> tuple[SaveReport, float]:
    """Write the file, run it, and move it to the target if it is equal; return the report and the difference."""
    final = target.absolute()  # "." has no name
    folder = ""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".convert-", dir=final.parent, ignore_cleanup_errors=True) as folder:
            temporary = Path(folder) / final.name
            saved = write_checkpoint(checkpoint, temporary, dialect=dialect)
            written = load(temporary, **saved.load_options).model
            difference = compare(checkpoint.model, written)
            if not difference <= TOLERANCE:
                raise VitralError(
                    f"The converted file does not match the source: outputs differ by {difference:.1e} (expected at "
                    f"most {TOLERANCE:.0e}). {target} was not written."
                )
            if saved.constants:
                difference = compare(checkpoint.model, with_constants(written, saved.constants))
            move_into_place(temporary, final)
    except OSError as error:
        raise write_error(target, error, WeightsError) from error
    except WeightsError as error:
        if isinstance(error.__cause__, Exception) and Path(folder).name in error.message:
            raise write_error(target, error.__cause__, WeightsError) from error  # name the target instead
        raise
    return saved, difference


def round_weights(model: Network, precision: str) -> float:
    """Round the weights in place and return the difference of the outputs."""
    before = deepcopy(model)
    model.to(getattr(torch, precision))
    return compare(before, deepcopy(model))


def with_constants(model: Network, constants: Mapping[str, Any]) -> Network:
    """Return the same weights in a network that computes with other constants."""
    network = build_on_meta(replace(model.config, **constants))
    network.load_state_dict(model.state_dict(), assign=True)
    return network.eval()


def compare(first: Network, second: Network) -> float:
    """Return the largest difference of features and logits on random images, relative to the largest value or 1.

    Features are compared because a head may be all zeros.
    """
    config = first.config
    images = torch.randn(_IMAGES, config.channels, *config.image_hw, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        outputs = [(model(images), model.features(images).pooled) for model in (first.float(), second.float())]
        pairs = zip(*outputs, strict=True)
        return max((a - b).abs().max().item() / max(1.0, a.abs().max().item()) for a, b in pairs)


def move_into_place(temporary: Path, target: Path) -> None:
    """Move a file or the files of a folder to the target; other files of an existing folder stay."""
    files = {target: temporary}
    if not is_file_name(temporary):
        files = {target / path.name: path for path in temporary.iterdir()}
    for final, written in files.items():
        with atomic_path(final) as pending:
            written.rename(pending)
