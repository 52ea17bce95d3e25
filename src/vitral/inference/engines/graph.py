"""Trace a network with its normalization: the graph that other runtimes compile."""

from collections.abc import Generator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from vitral.data.transforms import scale_and_shift
from vitral.errors import first_line
from vitral.inference.image_sizes import SizeRange
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


def trace(network: nn.Module, example: Tensor, sizes: SizeRange | None = None) -> torch.export.ExportedProgram:
    """Trace the network for any batch of images of the example's size, or of `sizes`.

    The sides of an example for several sizes must differ, because torch treats equal numbers as the same variable.
    """
    dimensions: dict[int, Any] = {0: torch.export.Dim("batch", min=1)}
    if sizes is not None:
        for axis, step, maximum in zip((2, 3), sizes.multiple_of, sizes.maximum, strict=True):
            if step == 1:  # torch finds the smallest map that it can trace; the graph computes smaller ones as well
                dimensions[axis] = torch.export.Dim.AUTO(max=maximum)
            else:
                name = ("rows", "columns")[axis - 2]
                dimensions[axis] = step * torch.export.Dim(name, min=1, max=maximum // step)
    with torch.no_grad():
        return torch.export.export(network, (example,), dynamic_shapes=(dimensions,))


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
