"""ONNX Runtime on the CPU. This module does not import torch, so that exported files start quickly."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitral.devices import available_cores
from vitral.errors import missing_package

if TYPE_CHECKING:
    from vitral.model.network import Network
    from vitral.preprocess import Preprocess

MAX_CONTENT = 1536 * 2**20
"""Largest weights in bytes, because a model in one protobuf ends at 2 GiB."""


@dataclass(frozen=True, kw_only=True)
class OnnxRuntimeEngine:
    """A session of ONNX Runtime, which several threads may share."""

    session: Any
    outputs: tuple[str, ...]
    """Names of the outputs: features, logits or both."""
    size: tuple[int, int] | None
    precision: str = "float32"
    name: str = "onnxruntime"

    def logits(self, images: np.ndarray) -> np.ndarray:
        """Return (B, K) logits in float32."""
        return self.session.run(["logits"], {"images": images})[0]

    def features(self, images: np.ndarray) -> np.ndarray:
        """Return (B, D), the input of the head, in float32."""
        return self.session.run(["features"], {"images": images})[0]

    @property
    def metadata(self) -> Mapping[str, str]:
        """Return the entries of the file's metadata."""
        return self.session.get_modelmeta().custom_metadata_map


def open_session(model: Path | bytes, size: tuple[int, int] | None = None) -> Any:  # noqa: ANN401
    """Return the onnxruntime.InferenceSession of a model, on all cores that this process may use.

    For `size`, it computes in advance what a model with a dynamic size computes from the size alone.
    """
    try:
        onnxruntime: Any = import_module("onnxruntime")
    except ImportError:
        raise missing_package("onnxruntime", "fast", "Running an .onnx file") from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = available_cores()
    for name, side in zip(("height", "width"), size or (), strict=False):
        options.add_free_dimension_override_by_name(name, side)
    source = str(model) if isinstance(model, Path) else model
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def open_onnx(
    model: Path | bytes, *, precision: str = "float32", size: tuple[int, int] | None = None
) -> OnnxRuntimeEngine:
    """Open a model. One with dynamic height and width takes images of `size` alone, or of all its sizes without."""
    session = open_session(model, size)
    height, width = session.get_inputs()[0].shape[2:]
    fixed = (height, width) if isinstance(height, int) and isinstance(width, int) else None
    outputs = tuple(output.name for output in session.get_outputs())
    return OnnxRuntimeEngine(session=session, outputs=outputs, size=fixed, precision=precision)


def build_onnxruntime(model: "Network", preprocess: "Preprocess") -> OnnxRuntimeEngine:
    """Translate the network to ONNX in memory and open it."""
    from vitral.inference.engines import graph, onnx_graph

    network = graph.build_outputs(model, preprocess)
    if sum(tensor.nbytes for tensor in network.state_dict().values()) > MAX_CONTENT:
        raise graph.CannotTraceError("its weights exceed the 2 GiB of an ONNX model in memory")
    onnx_graph.unfuse_relative_attention(network)
    program = graph.trace_outputs(network, preprocess)
    outputs = ["features", "logits"] if model.config.num_classes else ["features"]
    with graph.reporting_reasons():
        content = onnx_graph.to_bytes(program, outputs)
    return open_onnx(content)
