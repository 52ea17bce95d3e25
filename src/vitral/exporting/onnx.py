"""ONNX: written by torch's exporter, asked through ONNX Runtime."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitral.errors import missing_package
from vitral.model.attention import Attention

KEY = "vitral"
"""The file's metadata under this name hold the JSON that describes it."""
LARGEST = 1536 * 2**20
"""Bytes of numbers in one file: protobuf ends at 2 GiB, and larger networks get a file .onnx.data beside theirs. torch
does so by itself above this."""


def check() -> None:
    for package in ("onnxscript", "onnxruntime"):
        if find_spec(package) is None:
            raise missing_package(package, "fast", "Exporting to ONNX")


def prepare(network: nn.Module) -> None:
    """torch 2.13 cannot translate fused attention with a bias, as relative positions are: it takes the product for a
    view of other strides."""
    for part in network.modules():
        if isinstance(part, Attention) and part.relative is not None:
            part.fused = _unfused


def _unfused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    assert bias is not None
    return ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1) + bias).softmax(dim=-1) @ v


def write(program: torch.export.ExportedProgram, path: Path, answers: str, description: str) -> None:
    with _in_silence():
        made: Any = torch.onnx.export(
            program, dynamo=True, input_names=["images"], output_names=[answers], verbose=False
        )
    made.model.metadata_props[KEY] = description
    _name_the_batch(made.model.graph)
    _guard_padded_pools(made.model.graph)
    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    made.save(path, external_data=size > LARGEST)


def ask(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    from onnxruntime import InferenceSession

    session: Any = InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"images": images})[0]


def _name_the_batch(graph: Any) -> None:
    """(batch, 3, 224, 224) instead of a symbol of the tracer."""
    import onnx_ir

    symbol = str(graph.inputs[0].shape[0])
    for value in (*graph.inputs, *graph.outputs, *(output for node in graph for output in node.outputs)):
        if value.shape is not None:
            sides = ("batch" if str(side) == symbol else side for side in value.shape)
            value.shape = onnx_ir.Shape(sides)


def _guard_padded_pools(graph: Any) -> None:
    """BiT pads its first pooling with zeros. ONNX Runtime draws such a Pad into the MaxPool behind it, whose own
    padding is minus infinity: where all of a window is negative the answer is another one. A maximum with the lowest
    number between the two changes nothing and keeps them apart."""
    import onnx_ir

    pools = [node for node in graph if node.op_type == "MaxPool"]
    for number, pool in enumerate(pools):
        padded = pool.inputs[0]
        if padded.producer() is None or padded.producer().op_type != "Pad":
            continue
        lowest = onnx_ir.Value(name=f"lowest_{number}", shape=onnx_ir.Shape(()), type=padded.type)
        lowest.const_value = onnx_ir.tensor(np.array(np.finfo(np.float32).min), name=lowest.name)
        graph.register_initializer(lowest)
        guard = onnx_ir.node("Max", [padded, lowest])
        guard.outputs[0].name = f"padded_{number}"
        guard.outputs[0].shape, guard.outputs[0].type = padded.shape, padded.type
        graph.insert_before(pool, guard)
        pool.replace_input_with(0, guard.outputs[0])


@contextmanager
def _in_silence() -> Iterator[None]:
    """The exporter talks of its own future and of packages that we do not use."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
