"""A network as a file for other programs, with the proof that it answers the same.

    trace -> write aside -> run what was written -> compare -> put in place

The file takes pixels (uint8, already of the right size) and subtracts and divides by itself, so nobody has to copy a
mean or a deviation; how a picture becomes those pixels, and the labels, are written into it as JSON.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vitral import __version__
from vitral.data.transforms import scale_and_shift
from vitral.errors import ConfigError, VitralError, WeightsError, did_you_mean, first_line
from vitral.exporting import onnx, pt2
from vitral.model.network import Network
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.dialects.config_json import config_as_dict
from vitral.weights.save import as_checkpoint

TOLERANCE = 1e-4
"""Of logits beside the largest of them, or 1: other kernels add in another order."""
BATCHES = (1, 3)


class Target(Protocol):
    """A kind of file: what it needs, how it is written, and how it is asked."""

    def check(self) -> None: ...
    def prepare(self, network: nn.Module) -> None: ...
    def write(self, program: torch.export.ExportedProgram, path: Path, answers: str, description: str) -> None: ...
    def ask(self, path: Path) -> Callable[[np.ndarray], np.ndarray]: ...


TARGETS: Mapping[str, Target] = {"onnx": onnx, "pt2": pt2}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, and how far its answers are from the network's."""

    path: str
    to: str
    bytes: int
    difference: float
    """The largest one, divided by the largest logit or 1."""
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
        self.register_buffer("scale", scale.clone())
        self.register_buffer("shift", shift.clone())

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.to(torch.float32) * self.scale + self.shift)


def export(
    what: Checkpoint | Network,
    path: str | Path,
    *,
    to: str,
    overwrite: bool = False,
    tell: Callable[[str], None] = lambda stage: None,
) -> Exported:
    """Writes the file, asks it, and keeps it only if it answers as the network does. ``tell`` hears of each stage."""
    checkpoint = as_checkpoint(what, preprocess=None, labels=None)
    target, path = check_target(to, path, overwrite), Path(path)
    name = "logits" if checkpoint.model.config.num_classes else "features"
    with written_aside(path, to) as aside:
        tell("following the network")
        network = FromPixels(deepcopy(checkpoint.model).float().cpu(), checkpoint.preprocess).eval()
        batches = [random_pixels(checkpoint, count) for count in BATCHES]
        expected = answers_of(network, batches)
        target.prepare(network)
        program = trace(network, batches[-1])
        tell(f"writing {to}")
        target.write(program, aside, name, json.dumps(describe(checkpoint), ensure_ascii=False))
        tell("asking what was written")
        difference = compare(target.ask(aside), batches, expected)
        size = sum(written.stat().st_size for written in aside.parent.iterdir())
        check_target(to, path, overwrite)  # something may have been put there since
    notes = tuple(notes_on(checkpoint, expected))
    return Exported(path=str(path), to=to, bytes=size, difference=difference, images=len(expected), notes=notes)


def check_target(to: str, path: str | Path, overwrite: bool) -> Target:
    """Before anything is loaded or computed: whether this can be written there."""
    if to not in TARGETS:
        raise ConfigError(f"to={to!r} must be one of {', '.join(TARGETS)}.", hint=did_you_mean(str(to), TARGETS))
    if not isinstance(path, str | Path):
        raise ConfigError(f"An exported file is written to a path, and this is {path!r}.")
    path = Path(path)
    if path.is_dir():
        raise WeightsError(f"{path} is a folder, and a file should be written there.")
    if path.suffix != f".{to}":
        raise ConfigError(f"{path} must be the name of a file that ends in .{to}.")
    for there in (path, beside(path)) if to == "onnx" else (path,):
        if os.path.lexists(there) and not overwrite:
            raise WeightsError(f"{there} exists, and nothing is overwritten by accident.", hint="Give --overwrite.")
    if not path.parent.is_dir():
        raise WeightsError(f"{path} cannot be written: there is no folder {path.parent}.")
    TARGETS[to].check()
    return TARGETS[to]


def beside(path: Path) -> Path:
    """Where ONNX keeps the numbers of a network that is too large for one file."""
    return path.with_name(f"{path.name}.data")


@contextmanager
def written_aside(path: Path, to: str) -> Iterator[Path]:
    """A path of the same name in a folder of its own; what is there when all went well takes its place."""
    try:
        path = path.resolve()  # a link stays, and what it points to is replaced
        with TemporaryDirectory(prefix=".export-", dir=path.parent, ignore_cleanup_errors=True) as folder:
            yield Path(folder) / path.name
            made = sorted(Path(folder).iterdir(), reverse=True)  # the numbers before the network
            for written in made:
                written.replace(path.with_name(written.name))
            if to == "onnx" and len(made) == 1:  # the numbers of one that was there before
                beside(path).unlink(missing_ok=True)
    except VitralError:
        raise
    except OSError as error:
        raise WeightsError(f"{path} cannot be written: {error.strerror or error}.") from error
    except Exception as error:  # of torch's exporter and of the runtimes, which know many
        raise VitralError(f"This network could not be exported to {to}: {first_line(error)}.") from error


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the file says of itself."""
    return {
        "vitral": __version__,
        "config": config_as_dict(checkpoint.model.config),
        "preprocess": checkpoint.preprocess.as_dict(),
        "labels": checkpoint.labels,
        "multi_label": checkpoint.multi_label,
        "assumed": list(assumptions(checkpoint)),
    }


def assumptions(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What the weights' file did not tell."""
    return checkpoint.report.assumed if checkpoint.report is not None else ()


def random_pixels(checkpoint: Checkpoint, count: int) -> Tensor:
    shape = (count, checkpoint.preprocess.channels, *checkpoint.preprocess.size)
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


def answers_of(network: nn.Module, batches: Sequence[Tensor]) -> np.ndarray:
    with torch.inference_mode():
        answers = torch.cat([network(images) for images in batches]).numpy()
    if not np.isfinite(answers).all():
        raise WeightsError("The network's answers are no finite numbers: its weights are too large or damaged.")
    return answers


def trace(network: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """One size of pictures, any number of them."""
    with torch.no_grad():
        return torch.export.export(network, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))


def compare(ask: Callable[[np.ndarray], np.ndarray], batches: Sequence[Tensor], expected: np.ndarray) -> float:
    """The largest difference of any answer, beside the largest answer; VitralError where it is too large."""
    found = np.concatenate([ask(images.numpy()) for images in batches])
    difference = float(np.abs(found - expected).max()) / max(1.0, float(np.abs(expected).max()))
    if not difference <= TOLERANCE:  # also where it is no number
        raise VitralError(
            f"What was written does not answer the same: it differs by {difference:.1e}, and {TOLERANCE:.0e} is "
            "allowed. Nothing was kept."
        )
    return difference


def notes_on(checkpoint: Checkpoint, answers: np.ndarray) -> Iterator[str]:
    config = checkpoint.model.config
    yield from (f"assumed: {said}" for said in assumptions(checkpoint))
    if not np.ptp(answers, axis=0).any():
        yield "All pictures get the same answer, since the head is not trained: the comparison says nothing."
    if not config.num_classes:
        yield "The network has no head: the file answers with features."
    if config.pool == "none":
        yield "The network answers for every token: (batch, tokens, classes)."
    if checkpoint.preprocess.resize == "native":
        height, width = checkpoint.preprocess.size
        yield f"The network takes pictures of any size, and this file only those of {height} x {width}."
