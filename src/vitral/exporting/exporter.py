"""Export a model to ONNX or torch.export, and keep the file only if its outputs equal the model's.

    trace -> write to a temporary folder -> run the file -> compare -> move into place

The file takes uint8 images of the model's size and normalizes them itself, so that nobody has to copy a mean or a
standard deviation. Its metadata describes the preprocessing and the labels as JSON.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitral import __version__
from vitral.errors import ConfigError, VitralError, WeightsError, did_you_mean, first_line
from vitral.files import atomic_files
from vitral.inference.engines import onnx_graph as onnx
from vitral.inference.engines.graph import PixelModel, trace
from vitral.inference.engines.onnxruntime import open_onnx
from vitral.model.network import Network
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.dialects.native import config_as_dict
from vitral.weights.save import as_checkpoint

TOLERANCE = 1e-4
"""Largest allowed difference, relative to the largest logit or 1: other kernels add in another order."""
BATCH_SIZES = (1, 3)
PT2_MEMBER = "vitral.json"
"""Member of a .pt2 archive with the JSON that describes the model."""

Run = Callable[[np.ndarray], np.ndarray]
"""Runs a file: images -> outputs."""


def write_pt2(program: torch.export.ExportedProgram, path: Path, output: str, metadata: str) -> None:
    content = BytesIO()  # torch's own file writer kills the process on a full disk
    torch.export.save(program, content, extra_files={PT2_MEMBER: metadata})
    path.write_bytes(content.getbuffer())


def load_pt2(path: Path) -> Run:
    """Load a file that vitral wrote a moment ago: loading a foreign one can run code."""
    module = torch.export.load(BytesIO(path.read_bytes())).module()

    def run(images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return module(torch.from_numpy(images)).numpy()

    return run


class Target(NamedTuple):
    """A format: how to write a file, and how to load it."""

    write: Callable[[torch.export.ExportedProgram, Path, str, str], None]
    load: Callable[[Path], Run]


def load_onnx(path: Path) -> Run:
    session = open_onnx(path).session
    return lambda images: session.run(None, {"images": images})[0]


TARGETS = {"onnx": Target(onnx.write, load_onnx), "pt2": Target(write_pt2, load_pt2)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The file that was written, and how far its outputs are from the model's."""

    path: str
    to: str
    bytes: int
    difference: float
    """Largest difference of any output, relative to the largest output or 1."""
    images: int
    """Number of images that were compared."""
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def export(
    model: Checkpoint | Network,
    path: str | Path,
    *,
    to: str,
    overwrite: bool = False,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Exported:
    """Write the file, run it, and keep it only if its outputs equal the model's. Pass each stage to ``on_stage``."""
    checkpoint = as_checkpoint(model, preprocess=None, labels=None)
    target, path = check_target(to, path, overwrite), Path(path)
    output = "logits" if checkpoint.model.config.num_classes else "features"
    with _errors_of(to), atomic_files(path) as temporary:
        on_stage("tracing the model")
        network = PixelModel(deepcopy(checkpoint.model).float().cpu(), checkpoint.preprocess).eval()
        batches = [random_images(checkpoint, size) for size in BATCH_SIZES]
        expected = compute_outputs(network, batches)
        if to == "onnx":
            onnx.unfuse_relative_attention(network)
        program = trace(network, batches[-1])
        on_stage(f"writing {path.name}")
        target.write(program, temporary, output, json.dumps(file_metadata(checkpoint), ensure_ascii=False))
        on_stage("comparing the outputs")
        difference = compare(target.load(temporary), batches, expected)
        sizes = [file.stat().st_size for file in temporary.parent.iterdir()]
        check_target(to, path, overwrite)  # somebody may have written a file there in the meantime
    if to == "onnx" and len(sizes) == 1:
        data_path(path.resolve()).unlink(missing_ok=True)  # weights of the file that was replaced
    notes = tuple(export_notes(checkpoint, expected))
    return Exported(path=str(path), to=to, bytes=sum(sizes), difference=difference, images=len(expected), notes=notes)


def check_target(to: str, path: str | Path, overwrite: bool) -> Target:
    """Return the format, or raise before any work if the file cannot be written."""
    if to not in TARGETS:
        raise ConfigError(f"to must be one of {', '.join(TARGETS)} (got {to!r}).", hint=did_you_mean(str(to), TARGETS))
    if not isinstance(path, str | Path):
        raise ConfigError(f"path must be a file name (got {path!r}).")
    path = Path(path)
    if path.is_dir():
        raise WeightsError(f"{path} is a folder; expected a file name.")
    if path.suffix != f".{to}":
        raise ConfigError(f"{path} must end in .{to}.", hint=f"Use {path.with_suffix(f'.{to}').name}.")
    for file in (path, data_path(path)) if to == "onnx" else (path,):
        if os.path.lexists(file) and not overwrite:
            raise WeightsError(f"{file} already exists.", hint="Pass --overwrite to replace it.")
    if not path.parent.is_dir():
        raise WeightsError(f"Cannot write {path}: the folder {path.parent} does not exist.", hint="Create it first.")
    if to == "onnx":
        onnx.check_packages()
    return TARGETS[to]


def data_path(path: Path) -> Path:
    """Return where ONNX stores the weights of a model that is too large for one file."""
    return path.with_name(f"{path.name}.data")


@contextmanager
def _errors_of(to: str) -> Iterator[None]:
    """Turn the many exceptions of torch's exporter and of the runtimes into one sentence."""
    try:
        yield
    except VitralError:
        raise
    except Exception as error:
        raise VitralError(f"Cannot export this model to {to}: {first_line(error)}.") from error


def file_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the description that is stored in the file."""
    return {
        "vitral": __version__,
        "config": config_as_dict(checkpoint.model.config),
        "preprocess": checkpoint.preprocess.as_dict(),
        "labels": checkpoint.labels,
        "multi_label": checkpoint.multi_label,
        "assumed": list(checkpoint.report.assumed) if checkpoint.report else [],
    }


def random_images(checkpoint: Checkpoint, count: int) -> Tensor:
    shape = (count, checkpoint.preprocess.channels, *checkpoint.preprocess.size)
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


def compute_outputs(network: nn.Module, batches: Sequence[Tensor]) -> np.ndarray:
    with torch.inference_mode():
        outputs = torch.cat([network(images) for images in batches]).numpy()
    if not np.isfinite(outputs).all():
        raise WeightsError("The model produced NaN or Inf; its weights are too large or damaged.")
    return outputs


def compare(run: Run, batches: Sequence[Tensor], expected: np.ndarray) -> float:
    """Return the largest relative difference of any output; raise VitralError if it exceeds the tolerance."""
    outputs = np.concatenate([run(images.numpy()) for images in batches])
    difference = float(np.abs(outputs - expected).max()) / max(1.0, float(np.abs(expected).max()))
    if not difference <= TOLERANCE:  # also if it is NaN
        problem = f"The exported file's outputs differ from the model's by {difference:.1e}"
        raise VitralError(f"{problem} (expected at most {TOLERANCE:.0e}); it was deleted.")
    return difference


def export_notes(checkpoint: Checkpoint, outputs: np.ndarray) -> Iterator[str]:
    """Yield what somebody who uses the file should know."""
    config = checkpoint.model.config
    for assumption in checkpoint.report.assumed if checkpoint.report else ():
        yield f"assumed: {assumption}"
    if not np.ptp(outputs, axis=0).any():
        yield "All images have the same output because the head is untrained, so the comparison proves nothing."
    if not config.num_classes:
        yield "The model has no head; the file outputs features."
    if config.pool == "none":
        yield "The model has one output per token: (batch, tokens, classes)."
    if checkpoint.preprocess.resize == "native":
        height, width = checkpoint.preprocess.size
        yield f"The model takes images of any size, but this file only takes {height} x {width}."
