"""OpenVINO on the CPU. This module does not import torch, so that exported files start quickly."""

import sys
import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vitral.devices import available_cores
from vitral.errors import missing_package

if TYPE_CHECKING:
    import torch

    from vitral.inference.image_sizes import SizeRange
    from vitral.model.network import Network
    from vitral.preprocess import Preprocess

HINTS = {"float32": "f32", "bfloat16": "bf16", "float16": "f32", "int8": "f32"}
"""The precision of everything that is not int8. CPUs compute float16 files in float32."""


@dataclass(frozen=True, kw_only=True)
class OpenVinoEngine:
    """A model that OpenVINO has compiled for this CPU. Threads that share it take turns."""

    compiled: Any
    outputs: tuple[str, ...]
    size: tuple[int, int] | None
    precision: str = "float32"
    calibration: str = ""
    """A digest of what an int8 model was quantized with."""
    name: str = "openvino"
    _lock: Lock = field(default_factory=Lock, repr=False)

    def logits(self, images: np.ndarray) -> np.ndarray:
        """Return (B, K) logits in float32."""
        return self._run(images, "logits")

    def features(self, images: np.ndarray) -> np.ndarray:
        """Return (B, D), the input of the head, in float32."""
        return self._run(images, "features")

    def _run(self, images: np.ndarray, output: str) -> np.ndarray:
        with self._lock:
            results = self.compiled(np.ascontiguousarray(images))
            return np.array(results[self.outputs.index(output)], dtype=np.float32)


def import_openvino() -> Any:  # noqa: ANN401 (a module without types)
    """Return the package, or raise MissingError. It must not report its use over the network, as it does by default."""
    sys.modules.setdefault("openvino_telemetry", cast(Any, None))  # OpenVINO and NNCF then have nothing to send with
    try:
        import openvino
    except ImportError:
        raise missing_package("openvino", "fast", "OpenVINO") from None
    return openvino


@cache
def open_core() -> Any:  # noqa: ANN401
    """Return the openvino.Core of this process, with its plugin for the CPU, which is never released.

    Each plugin gives the process a stack for signal handlers. Of two plugins, the second restores that of the first,
    even if it was freed before, so that the next Ctrl-C or SIGTERM would crash the process (seen with 2026.4).
    """
    core: Any = import_openvino().Core()
    core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")  # loads the plugin
    return core


def compile_model(
    model: Any,  # noqa: ANN401
    *,
    precision: str = "float32",
    size: tuple[int, int] | None = None,
    calibration: str = "",
) -> OpenVinoEngine:
    """Compile an openvino.Model, or the file of one, for this CPU.

    A model with dynamic height and width is compiled for images of `size`, or for all its sizes without.
    A CPU without instructions for bfloat16 computes float32, because emulating them takes a hundred times as long.
    """
    core = open_core()
    if precision == "bfloat16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        precision = "float32"
    if isinstance(model, Path):
        model = core.read_model(str(model))
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": HINTS[precision],
        "INFERENCE_NUM_THREADS": available_cores(),
    }
    shape = model.input(0).partial_shape
    if size is not None and shape[2].is_dynamic and shape[3].is_dynamic:
        model.reshape([-1, shape[1].get_length(), *size])
        shape = model.input(0).partial_shape
    compiled = core.compile_model(model, "CPU", options)
    fixed = None if shape[2].is_dynamic or shape[3].is_dynamic else (shape[2].get_length(), shape[3].get_length())
    outputs = tuple(output.get_any_name() for output in model.outputs)
    return OpenVinoEngine(compiled=compiled, outputs=outputs, size=fixed, precision=precision, calibration=calibration)


def convert_program(
    program: "torch.export.ExportedProgram",
    preprocess: "Preprocess",
    outputs: list[str],
    sizes: "SizeRange | None" = None,
) -> Any:  # noqa: ANN401
    """Return the openvino.Model of a traced network, for any batch of images of the model's size or of `sizes`."""
    openvino = import_openvino()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about calls of OpenVINO that torch will remove
        model: Any = openvino.convert_model(program)
    sides = preprocess.size if sizes is None else [openvino.Dimension(1, side) for side in sizes.maximum]
    model.reshape(openvino.PartialShape([-1, preprocess.channels, *sides]))
    model.input(0).set_names({"images"})
    for port, name in zip(model.outputs, outputs, strict=True):
        port.set_names({name})
    return model


def build_openvino(model: "Network", preprocess: "Preprocess", *, precision: str) -> OpenVinoEngine:
    """Translate the network to OpenVINO in memory and compile it."""
    from vitral.inference.engines import graph

    network = graph.build_outputs(model, preprocess)
    program = graph.trace_outputs(network, preprocess)
    outputs = ["features", "logits"] if model.config.num_classes else ["features"]
    with graph.reporting_reasons():
        converted = convert_program(program, preprocess, outputs)
    return compile_model(converted, precision=precision)
