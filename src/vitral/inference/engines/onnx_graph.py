"""Write a traced network as ONNX, with what ONNX Runtime needs to compute it correctly."""

import logging
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from vitral.errors import missing_package
from vitral.model.attention import Attention

if TYPE_CHECKING:
    import onnx_ir

KEY = "vitral"
"""Name of the metadata entry with the JSON that describes the model."""
MIN_ROUNDED = 1024
"""Smaller tensors stay in float32: they take no space, and constants of the graph are among them."""
MAX_BYTES = 1536 * 2**20
"""Weights above this size go to a file .onnx.data beside the model, because protobuf ends at 2 GiB."""


def check_packages() -> None:
    for package in ("onnxscript", "onnxruntime"):
        if find_spec(package) is None:
            raise missing_package(package, "fast", "Exporting to ONNX")


def unfuse_relative_attention(network: nn.Module) -> None:
    """Replace fused attention with a bias (relative positions), which torch 2.13 fails to translate to ONNX."""
    for module in network.modules():
        if isinstance(module, Attention) and module.relative is not None:
            module.fused = _unfused


def _unfused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    assert bias is not None
    return ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1) + bias).softmax(dim=-1) @ v


def write(
    program: torch.export.ExportedProgram,
    path: Path,
    output: str,
    metadata: str,
    *,
    precision: str = "float32",
    change: "Callable[[onnx_ir.Graph], None]" = lambda graph: None,
) -> None:
    """Write an ONNX file after a last change of its graph; weights above `MAX_BYTES` go to a file beside it."""
    exported = translate(program, [output])
    change(exported.model.graph)
    if precision != "float32":
        _round_weights(exported.model.graph, precision)
    exported.model.metadata_props[KEY] = metadata
    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    exported.save(path, external_data=size > MAX_BYTES)


def to_bytes(program: torch.export.ExportedProgram, outputs: list[str]) -> bytes:
    """Return an ONNX model of at most 2 GiB."""
    return translate(program, outputs).model_proto.SerializeToString()


def translate(program: torch.export.ExportedProgram, outputs: list[str]) -> Any:  # noqa: ANN401 (torch.onnx.ONNXProgram)
    """Translate a traced network to ONNX."""
    with _silence():
        exported = cast(Any, torch.onnx).export(
            program, dynamo=True, input_names=["images"], output_names=outputs, verbose=False
        )
    _name_dimensions(exported.model.graph)
    _guard_padded_pools(exported.model.graph)
    for node in exported.model.graph:
        node.metadata_props.clear()  # stack traces, with the paths of this machine
    return exported


def _name_dimensions(graph: "onnx_ir.Graph") -> None:
    """Name the dynamic dimensions of the images, instead of by symbols of the tracer."""
    import onnx_ir

    shape = graph.inputs[0].shape
    assert shape is not None
    sides = dict(zip(shape, ("batch", "channels", "height", "width"), strict=True))
    names = {str(side): name for side, name in sides.items() if not isinstance(side, int)}
    for value in (*graph.inputs, *graph.outputs, *(output for node in graph for output in node.outputs)):
        if value.shape is not None:
            value.shape = onnx_ir.Shape(names.get(str(side), side) for side in value.shape)


def _guard_padded_pools(graph: "onnx_ir.Graph") -> None:
    """Insert a Max between a Pad and the MaxPool after it, so that ONNX Runtime does not fuse the two.

    BiT pads its first pooling with zeros, but a fused MaxPool pads with minus infinity, which changes the result where
    a window is negative. A maximum with the lowest float changes nothing.
    """
    import onnx_ir

    pools = [node for node in graph if node.op_type == "MaxPool"]
    for number, pool in enumerate(pools):
        padded = pool.inputs[0]
        source = None if padded is None else padded.producer()
        if padded is None or source is None or source.op_type != "Pad":
            continue
        lowest = onnx_ir.Value(name=f"lowest_{number}", shape=onnx_ir.Shape(()), type=padded.type)
        lowest.const_value = onnx_ir.tensor(np.array(np.finfo(np.float32).min), name=lowest.name)
        graph.register_initializer(lowest)
        guard = onnx_ir.node("Max", [padded, lowest])
        guard.outputs[0].name = f"padded_{number}"
        guard.outputs[0].shape, guard.outputs[0].type = padded.shape, padded.type
        graph.insert_before(pool, guard)
        pool.replace_input_with(0, guard.outputs[0])


def _round_weights(graph: "onnx_ir.Graph", precision: str) -> None:
    """Store the weights in 16 bits. The runtime widens them once, when it opens the file, and computes in float32."""
    import onnx_ir

    kind = onnx_ir.DataType.FLOAT16 if precision == "float16" else onnx_ir.DataType.BFLOAT16
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.dtype != onnx_ir.DataType.FLOAT or tensor.size < MIN_ROUNDED:
            continue
        rounded = onnx_ir.Value(name=f"{name}.rounded", shape=value.shape, type=onnx_ir.TensorType(kind))
        numbers = tensor.numpy().astype(kind.numpy())
        rounded.const_value = onnx_ir.tensor(numbers, dtype=kind, name=rounded.name)
        cast = onnx_ir.node("Cast", [rounded], attributes={"to": onnx_ir.DataType.FLOAT})
        cast.outputs[0].name, cast.outputs[0].shape, cast.outputs[0].type = f"{name}.wide", value.shape, value.type
        value.replace_all_uses_with(cast.outputs[0])
        graph.initializers.pop(name)
        graph.register_initializer(rounded)
        graph.insert_before(graph[0], cast)


@contextmanager
def _silence() -> Generator[None]:
    """Suppress the exporter's warnings about its own future and about packages that vitral does not use."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
