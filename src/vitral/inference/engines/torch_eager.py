"""Eager torch: the reference engine, which runs every model and every input."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from vitral.data.transforms import normalize
from vitral.model.network import Network
from vitral.preprocess import Preprocess


def as_tensor(images: np.ndarray) -> torch.Tensor:
    """Return an array as a tensor that shares its memory."""
    return torch.from_numpy(images)  # pyright: ignore[reportUnknownMemberType]


@contextmanager
def computing(device: torch.device, precision: str) -> Generator[None]:
    """Disable gradients and compute in a precision."""
    is_lower = precision != "float32"
    dtype = getattr(torch, precision) if is_lower else torch.bfloat16
    with torch.inference_mode(), torch.autocast(device.type, dtype=dtype, enabled=is_lower):
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchEngine:
    """A network in evaluation mode on its device."""

    model: Network
    preprocess: Preprocess
    device: torch.device
    precision: str = "float32"
    name: str = "torch"

    @property
    def size(self) -> tuple[int, int]:
        return self.preprocess.size

    def logits(self, images: np.ndarray) -> np.ndarray:
        """Return (B, K) logits in float32."""
        with computing(self.device, self.precision):
            return self.model(self._normalize(images)).float().cpu().numpy()

    def features(self, images: np.ndarray) -> np.ndarray:
        """Return (B, D), the input of the head, in float32."""
        with computing(self.device, self.precision):
            pooled = self.model.features(self._normalize(images)).pooled
            return self.model.representation(pooled).float().cpu().numpy()

    def _normalize(self, images: np.ndarray) -> torch.Tensor:
        return normalize(as_tensor(images).to(self.device), self.preprocess)
