"""Compiled torch: the network as one program of torch.compile, with its weights frozen into it.

It computes batches of one size, because each other size would be compiled again: smaller batches are padded.
"""

import shutil
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import numpy as np
import torch

from vitral.errors import ConfigError
from vitral.inference.engines.graph import build_outputs
from vitral.inference.engines.torch_eager import as_tensor, computing
from vitral.model.network import Network
from vitral.preprocess import Preprocess


@dataclass(frozen=True, kw_only=True)
class CompiledEngine:
    """A compiled network on the CPU or a GPU."""

    program: Any
    size: tuple[int, int]
    batch: int
    device: torch.device
    precision: str
    name: str = "compiled"

    def logits(self, images: np.ndarray) -> np.ndarray:
        """Return (B, K) logits in float32."""
        return self._run(images, output=1)

    def features(self, images: np.ndarray) -> np.ndarray:
        """Return (B, D), the input of the head, in float32."""
        return self._run(images, output=0)

    def _run(self, images: np.ndarray, *, output: int) -> np.ndarray:
        rows: list[np.ndarray] = []
        for start in range(0, len(images), self.batch):
            part = as_tensor(images[start : start + self.batch])
            padded = part.new_zeros(self.batch, *part.shape[1:])
            padded[: len(part)] = part
            with computing(self.device, self.precision):
                outputs = self.program(padded.to(self.device))
            rows.append(outputs[output][: len(part)].float().cpu().numpy())
        return np.concatenate(rows)


def find_compiler() -> str | None:
    """Return the C++ compiler that torch.compile needs on a CPU, or None."""
    names = ("cl",) if sys.platform == "win32" else ("g++", "clang++", "c++")
    return next(filter(None, map(shutil.which, names)), None)


def build_compiled(
    model: Network, preprocess: Preprocess, *, device: torch.device, precision: str, batch: int
) -> CompiledEngine:
    """Compile the network and run it once, which takes up to minutes."""
    if device.type == "cpu" and find_compiler() is None:
        raise ConfigError("engine='compiled' needs a C++ compiler.", hint="Install g++, or pass engine='torch'.")
    inductor: Any = import_module("torch._inductor.config")

    network = build_outputs(model, preprocess).to(device)
    program = cast(Any, torch).compile(network, dynamic=False)
    engine = CompiledEngine(program=program, size=preprocess.size, batch=batch, device=device, precision=precision)
    with inductor.patch(freezing=device.type == "cpu"):
        engine.features(np.zeros((batch, preprocess.channels, *preprocess.size), np.uint8))
    return engine
