"""A network as a file for other programs, with the proof that it answers the same.

    trace -> write aside -> run what was written -> compare -> put in place

The file takes pixels (uint8, already of the right size) and subtracts and divides by itself, so nobody has to copy a
mean or a deviation; how a picture becomes those pixels, and the labels, are written into it as JSON.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vitral import __version__
from vitral.data.pixels import scale_and_shift
from vitral.engines import onnx, pt2
from vitral.errors import ConfigError, VitralError, WeightsError, did_you_mean
from vitral.model.network import Network, in_float32
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.config_json import config_as_dict

TOLERANCE = 1e-4
"""Of logits beside the largest of them, or 1: other kernels add in another order."""
BATCHES = (1, 3)


class Target(Protocol):
    """A kind of file: how it is written, and how it is asked."""

    def check(self) -> None: ...
    def write(self, program: torch.export.ExportedProgram, path: Path, description: str) -> None: ...
    def ask(self, path: Path) -> Callable[[np.ndarray], np.ndarray]: ...


TARGETS: Mapping[str, Target] = {"onnx": onnx, "pt2": pt2}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, and how far its answers are from the network's."""

    path: str
    to: str
    bytes: int
    difference: float
    """The largest one of the logits, beside a scale of 1 or their largest."""
    images: int
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class FromPixels(nn.Module):
    """uint8 (B, C, H, W) -> logits: the network with its subtraction and division."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: Network, preprocess: Preprocess):
        super().__init__()
        self.model = model
        scale, shift = scale_and_shift(preprocess.mean, preprocess.std, torch.device("cpu"))
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.to(torch.float32) * self.scale + self.shift)


def export(
    checkpoint: Checkpoint,
    path: str | Path,
    *,
    to: str,
    overwrite: bool = False,
    tell: Callable[[str], None] = lambda stage: None,
) -> Exported:
    """Writes the file, asks it, and keeps it only if it answers as the network does. ``tell`` hears of each stage."""
    target = find_target(to)
    path = Path(path)
    check_path(path, f".{to}", overwrite)
    target.check()
    network = FromPixels(in_float32(checkpoint.model).eval().cpu(), checkpoint.preprocess)
    try:
        aside = Path(mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise WeightsError(f"{path} cannot be written: {error.strerror}.") from error
    try:
        tell("following the network")
        program = trace(network, checkpoint)
        tell(f"writing {to}")
        target.write(program, aside / path.name, json.dumps(describe(checkpoint), ensure_ascii=False))
        tell("asking what was written")
        difference, images, notes = prove(network, target.ask(aside / path.name), checkpoint)
        size = sum(written.stat().st_size for written in aside.iterdir())
        for written in aside.iterdir():  # large networks have their numbers in a file beside
            written.replace(path.with_name(written.name))
    except OSError as error:
        raise WeightsError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        rmtree(aside, ignore_errors=True)
    return Exported(path=str(path), to=to, bytes=size, difference=difference, images=images, notes=tuple(notes))


def find_target(to: str) -> Target:
    if to not in TARGETS:
        raise ConfigError(f"to={to!r} must be one of {', '.join(TARGETS)}.", hint=did_you_mean(str(to), TARGETS))
    return TARGETS[to]


def check_path(path: Path, ending: str, overwrite: bool) -> None:
    if path.suffix != ending:
        raise ConfigError(f"{path} must end in {ending}.")
    if path.is_dir():
        raise WeightsError(f"{path} is a folder, and a file should be written there.")
    if path.exists() and not overwrite:
        raise WeightsError(f"{path} exists, and nothing is overwritten by accident.", hint="Give --overwrite.")
    if not path.parent.is_dir():
        raise WeightsError(f"{path} cannot be written: there is no folder {path.parent}.")


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the file says of itself."""
    return {
        "vitral": __version__,
        "config": config_as_dict(checkpoint.model.config),
        "preprocess": checkpoint.preprocess.as_dict(),
        "labels": checkpoint.labels,
        "multi_label": checkpoint.multi_label,
    }


def trace(network: nn.Module, checkpoint: Checkpoint) -> torch.export.ExportedProgram:
    """One size of pictures, any number of them."""
    example = random_pixels(checkpoint, 2)
    with torch.no_grad():
        return torch.export.export(network, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))


def random_pixels(checkpoint: Checkpoint, count: int) -> Tensor:
    config = checkpoint.model.config
    chance = torch.Generator().manual_seed(count)
    return torch.randint(256, (count, config.channels, *config.image_hw), dtype=torch.uint8, generator=chance)


def prove(
    network: nn.Module, ask: Callable[[np.ndarray], np.ndarray], checkpoint: Checkpoint
) -> tuple[float, int, list[str]]:
    """The largest difference over batches of several sizes, the number of pictures, and what the proof leaves open."""
    differences, largest, notes = [], 0.0, []
    for count in BATCHES:
        images = random_pixels(checkpoint, count)
        with torch.inference_mode():
            expected = network(images).numpy()
        largest = max(largest, float(np.abs(expected).max()))
        differences.append(float(np.abs(ask(images.numpy()) - expected).max()) / max(1.0, largest))
    difference = max(differences)
    if not difference <= TOLERANCE:
        raise VitralError(
            f"What was written does not answer the same: it differs by {difference:.1e}, and {TOLERANCE:.0e} is "
            "allowed. Nothing was kept."
        )
    if largest == 0:
        notes.append("All logits are 0, since the head is not trained: the comparison says nothing.")
    if checkpoint.preprocess.resize == "native":
        height, width = checkpoint.model.config.image_hw
        notes.append(f"The network takes pictures of any size, and this file only those of {height} x {width}.")
    return difference, sum(BATCHES), notes
