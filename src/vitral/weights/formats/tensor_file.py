"""TensorFile: names and shapes of a checkpoint's tensors, known before any tensor is read."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitral.errors import WeightsError

Shape = tuple[int, ...]
SAFE_FORMATS = "safetensors, npz without pickled objects, and state dicts written by torch.save"
MAX_JSON_BYTES = 16 * 2**20
MAX_JSON_DEPTH = 100


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """Names and shapes of a checkpoint's tensors, and a function that reads one of them."""

    path: Path | None
    """None for a state dict in memory."""
    format: str
    """safetensors, npz, torch or memory."""
    shapes: Mapping[str, Shape]
    read: Callable[[str], Tensor]
    """Return a tensor by its name. Tensors of a safetensors file are views into its memory map."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of a safetensors file."""
    sidecars: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Content of config.json and preprocessor_config.json in the same folder, by file name."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Names of other content, with the reason for ignoring it."""
    notes: tuple[str, ...] = ()
    prefix: str = ""
    """Prefix that was removed from all names. Reports put it back."""

    @property
    def name(self) -> str:
        """Return the path, or words for a state dict in memory: the subject of error messages."""
        return "The state dict" if self.path is None else str(self.path)

    def shape(self, name: str, dimensions: int) -> Shape:
        """Return the shape of a tensor, or raise WeightsError if it is missing or has other dimensions."""
        if name not in self.shapes:
            raise WeightsError(f"{self.name} has no tensor {self.prefix}{name}, which this dialect requires.")
        shape = self.shapes[name]
        if len(shape) != dimensions or not all(shape):
            expected = f"expected {dimensions} dimensions, none of them empty"
            raise WeightsError(f"{self.name}: {self.prefix}{name} has shape {tuple(shape)}; {expected}.")
        return shape

    def below(self, prefix: str, reason: Callable[[str], str]) -> "TensorFile":
        """Return the tensors under a prefix, without it; ``reason(name)`` says why another tensor is ignored."""
        inside = {name.removeprefix(prefix): shape for name, shape in self.shapes.items() if name.startswith(prefix)}
        outside = {self.prefix + name: reason(name) for name in self.shapes if not name.startswith(prefix)}
        ignored = {**self.ignored, **outside}

        def read(name: str) -> Tensor:
            return self.read(prefix + name)

        return replace(self, shapes=inside, read=read, ignored=ignored, prefix=self.prefix + prefix)


def is_file_name(path: Path) -> bool:
    """Return whether a target path names a checkpoint file. Any other suffix belongs to a folder's name."""
    return path.suffix in (".safetensors", ".npz", ".pth", ".pt", ".bin")


def parse_json(text: str, name: str) -> dict[str, Any]:
    """Return a JSON object, or raise WeightsError; ``name`` is the subject of the message."""
    if len(text) > MAX_JSON_BYTES:
        raise WeightsError(f"{name} is larger than {MAX_JSON_BYTES // 2**20} MiB, the limit for JSON.")
    try:
        content = json.loads(text)
    except RecursionError:
        raise WeightsError(f"{name} is not valid JSON: it is nested too deeply.") from None
    except ValueError as error:
        raise WeightsError(f"{name} is not valid JSON: {str(error)[:200]}.") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{name} must be a JSON object (got {type(content).__name__}).")
    if _is_deeper(content, MAX_JSON_DEPTH):
        raise WeightsError(f"{name} is nested more than {MAX_JSON_DEPTH} levels deep.")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or raise WeightsError."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise WeightsError(f"{path} is larger than {MAX_JSON_BYTES // 2**20} MiB, the limit for JSON.")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise WeightsError(f"Cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise WeightsError(f"{path} is not valid JSON: it is not UTF-8.") from error
    return parse_json(text, str(path))


def _is_deeper(content: dict[str, Any], levels: int) -> bool:
    """Return whether JSON is nested deeper than so many levels, which no repr or recursion should meet."""
    layer: list[dict[str, Any] | list[Any]] = [content]
    for _ in range(levels):
        contents = (container.values() if isinstance(container, dict) else container for container in layer)
        layer = [value for values in contents for value in values if isinstance(value, dict | list)]
        if not layer:
            return False
    return True
