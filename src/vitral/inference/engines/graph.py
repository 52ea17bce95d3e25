"""Trace a network with its normalization: the graph that other runtimes compile."""

from collections.abc import Generator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn

from vitral.data.transforms import scale_and_shift
from vitral.errors import first_line
from vitral.model.network import Network
from vitral.preprocess import Preprocess


class PixelModel(nn.Module):
    """The network with its normalization: uint8 (B, C, H, W) -> logits."""

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


class PixelOutputs(PixelModel):
    """The network with its normalization: uint8 (B, C, H, W) -> features, and logits if it has a head."""

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        features = self.model.features(images.to(torch.float32) * self.scale + self.shift)
        pooled = self.model.representation(features.pooled)
        return (pooled, self.model.head(pooled)) if self.model.config.num_classes else (pooled,)


class CannotTraceError(Exception):
    """The network cannot become a graph; the message is the reason."""


def build_outputs(model: Network, preprocess: Preprocess) -> PixelOutputs:
    """Return the network that engines run, with weights of its own. Raise CannotTraceError if they cannot."""
    if model.config.pool == "none":
        raise CannotTraceError("the model outputs one vector per token")
    return PixelOutputs(deepcopy(model).float().cpu(), preprocess).eval()


def trace(network: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """Trace the network for images of one size and any batch size."""
    with torch.no_grad():
        return torch.export.export(network, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))


def trace_outputs(network: PixelOutputs, preprocess: Preprocess) -> torch.export.ExportedProgram:
    """Trace the network of an engine for images of the model's size. Raise CannotTraceError if torch cannot."""
    example = torch.zeros(3, preprocess.channels, *preprocess.size, dtype=torch.uint8)
    with reporting_reasons():
        return trace(network, example)


@contextmanager
def reporting_reasons() -> Generator[None]:
    """Turn what exporters and converters raise, which is nearly anything, into CannotTraceError."""
    try:
        yield
    except Exception as error:
        raise CannotTraceError(reason_of(error)) from error


def reason_of(error: Exception) -> str:
    """Return the line that names the reason: usually the first, but OpenVINO lists unknown operators further down."""
    lines = [line.strip("- ") for line in str(error).splitlines() if "No conversion rule found" in line]
    return lines[0] if lines else first_line(error)
