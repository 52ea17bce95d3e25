"""The formats of exported files: how to write a traced network, and how to run the file."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vitral.errors import ConfigError
from vitral.exporting.decoded_images import add_preprocessing
from vitral.inference.engines import onnx_graph
from vitral.inference.engines.onnxruntime import open_onnx
from vitral.inference.engines.openvino import compile_model, convert_program, import_openvino
from vitral.inference.image_sizes import SizeRange
from vitral.preprocess import Preprocess

PT2_MEMBER = "vitral.json"
"""Member of a .pt2 archive with the JSON that describes the model."""
Run = Callable[[np.ndarray], np.ndarray]
"""Runs a file: images -> outputs."""


class Content(NamedTuple):
    """The content of an exported file."""

    program: torch.export.ExportedProgram
    preprocess: Preprocess
    output: str
    """Name of the output: logits or features."""
    metadata: str
    """JSON that describes the model."""
    precision: str
    quantized: Any = None
    """The openvino.Model in int8."""
    sizes: SizeRange | None = None
    """The sizes of images that the file takes; None for that of the preprocessing."""
    resizes: bool = False
    """Whether the file takes decoded images of any size."""


class Target(NamedTuple):
    """A format: how to write a file, how to run it, its suffix, the suffix of its weights, and its precisions."""

    write: Callable[[Content, Path], None]
    load: Callable[[Path, str], Run]
    suffix: str
    weights: Callable[[Path], Path | None]
    precisions: tuple[str, ...]
    check: Callable[[], None] = lambda: None


def write_pt2(content: Content, path: Path) -> None:
    stream = BytesIO()  # torch's own file writer kills the process on a full disk
    torch.export.save(content.program, stream, extra_files={PT2_MEMBER: content.metadata})
    path.write_bytes(stream.getbuffer())


def load_pt2(path: Path, precision: str) -> Run:
    """Load a file that vitral wrote a moment ago: loading a foreign one can run code."""
    module = torch.export.load(BytesIO(path.read_bytes())).module()

    def run(images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return module(torch.from_numpy(images)).numpy()

    return run


def write_onnx(content: Content, path: Path) -> None:
    def change(graph: Any) -> None:  # noqa: ANN401 (onnx_ir.Graph)
        if content.resizes:
            add_preprocessing(graph, content.preprocess)

    options: dict[str, Any] = dict(precision=content.precision, change=change)
    onnx_graph.write(content.program, path, content.output, content.metadata, **options)


def load_onnx(path: Path, precision: str) -> Run:
    session = open_onnx(path, precision=precision).session
    return lambda images: session.run(None, {"images": images})[0]


def write_openvino(content: Content, path: Path) -> None:
    openvino = import_openvino()
    model = content.quantized or convert_program(content.program, content.preprocess, [content.output], content.sizes)
    model.set_rt_info(content.metadata, ["vitral"])
    openvino.save_model(model, str(path), compress_to_fp16=content.precision == "float16")


def load_openvino(path: Path, precision: str) -> Run:
    engine = compile_model(path, precision=precision)
    return engine.logits if "logits" in engine.outputs else engine.features


def onnx_weights(path: Path) -> Path:
    """Return where ONNX stores the weights of a model that is too large for one file."""
    return path.with_name(f"{path.name}.data")


TARGETS = {
    "onnx": Target(
        write_onnx, load_onnx, ".onnx", onnx_weights, ("float32", "bfloat16", "float16"), onnx_graph.check_packages
    ),
    "openvino": Target(
        write_openvino,
        load_openvino,
        ".xml",
        lambda path: path.with_suffix(".bin"),
        ("float32", "bfloat16", "float16", "int8"),
        lambda: import_openvino() and None,
    ),
    "pt2": Target(write_pt2, load_pt2, ".pt2", lambda path: None, ("float32",)),
}


def check_precision(to: str, precision: str) -> None:
    """Raise ConfigError unless the format has the precision."""
    if precision not in TARGETS[to].precisions:
        choices = ", ".join(TARGETS[to].precisions)
        hint = "Use --to openvino." if precision == "int8" else None
        raise ConfigError(f"{to} files have the precisions {choices} (got {precision!r}).", hint=hint)
