"""TensorFile: the tensors of a checkpoint, whatever wrote it. What is inside is known before anything is read."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitral.errors import WeightsError

Shape = tuple[int, ...]
SAFE_FORMATS = "safetensors, npz without pickled objects, or a state dict saved by torch.save"
_LARGEST_JSON = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """Names and shapes of a checkpoint's tensors, and the way to read each."""

    path: Path
    format: str
    """safetensors, npz or torch."""
    shapes: Mapping[str, Shape]
    read: Callable[[str], Tensor]
    """A tensor by its name; on safetensors a view into the memory map."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """That of safetensors."""
    beside: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """JSON files of the same folder, by name."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """What the file holds besides the tensors: name and reason."""
    notes: tuple[str, ...] = ()
    prefix: str = ""
    """What was taken off all names; reports put it back."""

    def shape(self, name: str, sides: int) -> Shape:
        """The shape of a tensor that must be there with so many sides."""
        if name not in self.shapes:
            raise WeightsError(f"{self.path} lacks {self.prefix}{name}, without which it is no such checkpoint.")
        if len(self.shapes[name]) != sides or not all(self.shapes[name]):
            seen = f"shape {tuple(self.shapes[name])}"
            raise WeightsError(f"{self.path}: {self.prefix}{name} has {seen}, and {sides} sides above 0 are expected.")
        return self.shapes[name]

    def below(self, prefix: str, why: Callable[[str], str]) -> "TensorFile":
        """Only what is under a prefix, without it; for the rest ``why`` gives the reason to leave it."""
        inside = {name.removeprefix(prefix): shape for name, shape in self.shapes.items() if name.startswith(prefix)}
        left = {name: why(name) for name in self.shapes if not name.startswith(prefix)}
        read = self.read
        return replace(
            self,
            shapes=inside,
            read=lambda name: read(prefix + name),
            ignored={**self.ignored, **{self.prefix + name: reason for name, reason in left.items()}},
            prefix=self.prefix + prefix,
        )


def is_file(path: Path) -> bool:
    """Whether a path to be written names a checkpoint file; else it is a folder, dots or not."""
    return path.suffix in (".safetensors", ".npz", ".pth", ".pt", ".bin")


def read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise WeightsError(f"{path} is larger than 16 MiB, which no description of a model is.")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is no valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} must hold a JSON object, and holds a {type(content).__name__}.")
    return content
