"""Put the preprocessing into an ONNX file, which then takes one decoded image of any size.

    uint8 (height, width, channels) -> resize -> crop or pad -> uint8 (1, channels, H, W) -> the network

The sizes are computed in the graph, as in `vitral.data.geometry`. Pixels differ from those of `vitral.data.transforms`
by at most one of 255 levels, since the kernels of torch have weights of 16 bits.
"""

from collections.abc import Sequence
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitral.data.transforms import preprocess_image
from vitral.errors import ConfigError, VitralError
from vitral.inference.engines.onnxruntime import open_session
from vitral.preprocess import Preprocess

if TYPE_CHECKING:
    import onnx_ir

TOLERANCE = 0.02
"""Largest allowed difference of an output, relative to the largest or 1, since pixels differ by up to one level."""
INPUT = "image"
_MODES = {"nearest": "nearest", "bilinear": "linear", "bicubic": "cubic"}


def check_can_resize(to: str, preprocess: Preprocess) -> None:
    """Raise ConfigError unless a file of this format can resize its images."""
    if to != "onnx":
        raise ConfigError("from_bytes needs to='onnx'.", hint="Drop --from-bytes, or pass --to onnx.")
    if preprocess.resize == "native":
        raise ConfigError("from_bytes needs images of one size, but this model takes mixed sizes.", hint="Drop it.")


class _Builder:
    """Adds operators before the first one of a graph."""

    def __init__(self, graph: "onnx_ir.Graph"):
        self.graph, self.first, self.count = graph, graph[0], 0

    def constant(self, value: Any, dtype: Any = np.int64) -> "onnx_ir.Value":  # noqa: ANN401 (numbers, nested)
        import onnx_ir

        array = np.array(value, dtype)
        name, shape = self._name(), onnx_ir.Shape(array.shape)
        tensor = onnx_ir.tensor(array, name=name)
        constant = onnx_ir.Value(name=name, shape=shape, type=onnx_ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.register_initializer(constant)
        return constant

    def add(self, operator: str, *inputs: "onnx_ir.Value | None", **attributes: Any) -> "onnx_ir.Value":
        import onnx_ir

        node = onnx_ir.node(operator, inputs, attributes=attributes)
        node.outputs[0].name = self._name()
        self.graph.insert_before(self.first, node)
        return node.outputs[0]

    def _name(self) -> str:
        self.count += 1
        return f"preprocess_{self.count}"


def add_preprocessing(graph: "onnx_ir.Graph", preprocess: Preprocess) -> None:
    """Replace the input of a graph, normalized in the graph, by one decoded image of any size."""
    import onnx_ir

    image = onnx_ir.Value(
        name=INPUT,
        shape=onnx_ir.Shape(["height", "width", preprocess.channels]),
        type=onnx_ir.TensorType(onnx_ir.DataType.UINT8),
    )
    old, build = graph.inputs[0], _Builder(graph)
    graph.inputs[0] = image
    sides = build.add("Slice", build.add("Shape", image), build.constant([0]), build.constant([2]))
    size = _resized_size(build, sides, preprocess)
    planes = build.add("Unsqueeze", build.add("Transpose", image, perm=[2, 0, 1]), build.constant([0]))
    levels = _resize(build, build.add("Cast", planes, to=onnx_ir.DataType.FLOAT), size, preprocess)
    framed = _crop_or_pad(build, levels, size, preprocess)
    images = build.add("Cast", framed, to=onnx_ir.DataType.UINT8)
    name, old.name = old.name, "replaced"
    images.name, images.type, images.shape = name, old.type, onnx_ir.Shape([1, preprocess.channels, *preprocess.size])
    old.replace_all_uses_with(images)


def _resized_size(build: _Builder, sides: "onnx_ir.Value", preprocess: Preprocess) -> "onnx_ir.Value":
    """Return the (height, width) that the whole image is resized to, as `resized_size` does."""
    import onnx_ir

    if preprocess.resize == "squash":
        return build.constant(preprocess.size)
    if preprocess.resize == "pad":
        wide = build.add("Cast", sides, to=onnx_ir.DataType.DOUBLE)
        ratios = build.add("Div", build.constant(preprocess.size, np.float64), wide)
        scale = build.add("ReduceMin", ratios, keepdims=1)
        rounded = build.add("Cast", build.add("Round", build.add("Mul", wide, scale)), to=onnx_ir.DataType.INT64)
        return build.add("Max", build.constant([1]), build.add("Min", build.constant(preprocess.size), rounded))
    target = [floor(side / preprocess.crop_fraction) for side in preprocess.size]
    swapped = build.add("Gather", sides, build.constant([1, 0]))  # (width, height)
    scaled = build.add("Div", build.add("Mul", build.constant(target[::-1]), sides), swapped)
    return build.add("Max", build.constant(target), scaled)


def _resize(build: _Builder, planes: "onnx_ir.Value", size: "onnx_ir.Value", preprocess: Preprocess) -> "onnx_ir.Value":
    """Return whole levels. As in Pillow and torch, rows are resized and rounded first, and then columns."""
    height, width = (_axis(build, build.add("Shape", planes), axis) for axis in (2, 3))
    to_height, to_width = (_axis(build, size, axis) for axis in (0, 1))
    if preprocess.interpolation == "bilinear" and preprocess.antialias:
        weights = build.add("Transpose", _triangle_weights(build, width, to_width), perm=[1, 0])
        planes = _to_levels(build, build.add("MatMul", planes, weights))
        return _to_levels(build, build.add("MatMul", _triangle_weights(build, height, to_height), planes))
    if preprocess.interpolation == "bicubic":
        planes = _resize_once(build, planes, build.add("Concat", height, to_width, axis=0), preprocess)
    return _resize_once(build, planes, size, preprocess)


def _axis(build: _Builder, sizes: "onnx_ir.Value", axis: int) -> "onnx_ir.Value":
    return build.add("Slice", sizes, build.constant([axis]), build.constant([axis + 1]))


def _to_levels(build: _Builder, pixels: "onnx_ir.Value") -> "onnx_ir.Value":
    return build.add("Clip", build.add("Round", pixels), *(build.constant(level, np.float32) for level in (0, 255)))


def _triangle_weights(build: _Builder, side: "onnx_ir.Value", target: "onnx_ir.Value") -> "onnx_ir.Value":
    """Return the (target, side) weights of bilinear interpolation with antialiasing, as Pillow has them.

    ONNX's own Resize repeats the border instead of leaving out what is beyond it.
    """
    import onnx_ir

    half, one = build.constant(0.5, np.float64), build.constant(1.0, np.float64)

    def centers(count: "onnx_ir.Value") -> "onnx_ir.Value":
        numbers = build.add("Range", build.constant(0), build.add("Squeeze", count), build.constant(1))
        return build.add("Add", build.add("Cast", numbers, to=onnx_ir.DataType.DOUBLE), half)

    wide = [build.add("Cast", count, to=onnx_ir.DataType.DOUBLE) for count in (side, target)]
    scale = build.add("Div", *wide)
    middle = build.add("Unsqueeze", build.add("Mul", centers(target), scale), build.constant([1]))
    distance = build.add("Abs", build.add("Sub", centers(side), middle))
    share = build.add("Sub", one, build.add("Div", distance, build.add("Max", scale, one)))
    weights = build.add("Max", share, build.constant(0.0, np.float64))
    total = build.add("ReduceSum", weights, build.constant([1]), keepdims=1)
    return build.add("Cast", build.add("Div", weights, total), to=onnx_ir.DataType.FLOAT)


def _resize_once(
    build: _Builder, planes: "onnx_ir.Value", size: "onnx_ir.Value", preprocess: Preprocess
) -> "onnx_ir.Value":
    sizes = build.add("Concat", build.constant([1, preprocess.channels]), size, axis=0)
    antialias = preprocess.antialias and preprocess.interpolation != "nearest"
    pixels = build.add(
        "Resize",
        planes,
        None,
        None,
        sizes,
        mode=_MODES[preprocess.interpolation],
        antialias=int(antialias),
        coordinate_transformation_mode="half_pixel",
        cubic_coeff_a=-0.5 if antialias else -0.75,  # as in Pillow; as in torch without antialiasing
        exclude_outside=int(antialias and preprocess.interpolation == "bicubic"),
        nearest_mode="round_prefer_ceil",
    )
    return _to_levels(build, pixels)


def _crop_or_pad(
    build: _Builder, pixels: "onnx_ir.Value", size: "onnx_ir.Value", preprocess: Preprocess
) -> "onnx_ir.Value":
    """Cut out the center, or add a border, as `corner_of` and `border_of` do."""
    import onnx_ir

    target = build.constant(preprocess.size)
    if preprocess.resize == "crop":
        rest = build.add("Cast", build.add("Sub", size, target), to=onnx_ir.DataType.DOUBLE)
        halves = build.add("Round", build.add("Div", rest, build.constant(2, np.float64)))
        start = build.add("Cast", halves, to=onnx_ir.DataType.INT64)
        return build.add("Slice", pixels, start, build.add("Add", start, target), build.constant([2, 3]))
    if preprocess.resize == "pad":
        border = build.add("Sub", target, size)
        before = build.add("Div", border, build.constant(2))
        none = build.constant([0, 0])
        pads = build.add("Concat", none, before, none, build.add("Sub", border, before), axis=0)
        return build.add("Pad", pixels, pads, build.constant(preprocess.background, np.float32))
    return pixels


def example_photos(preprocess: Preprocess) -> list[np.ndarray]:
    """Return smooth images (H, W, C) of several sizes and shapes: larger, smaller, wide and tall."""
    height, width = preprocess.size
    sizes = (
        (height * 2 + 3, width * 3 + 1),
        (height // 2 + 1, width // 2 + 2),
        (height + 5, width * 4),
        preprocess.size,
    )
    generator = np.random.default_rng(0)
    photos: list[np.ndarray] = []
    for rows, columns in sizes:
        phases = generator.uniform(0, 6, preprocess.channels)
        waves = np.sin(np.arange(rows)[:, None, None] / 9 + phases) + np.cos(np.arange(columns)[:, None] / 11 + phases)
        photos.append((127.5 + 50 * waves + generator.normal(0, 4, waves.shape)).clip(0, 255).astype(np.uint8))
    return photos


def compare_photos(path: Path, network: torch.nn.Module, preprocess: Preprocess) -> float:
    """Return the largest relative difference of an output between the file and the network with its preprocessing.

    Raise VitralError if it exceeds the tolerance.
    """
    photos, session = example_photos(preprocess), open_session(path)
    outputs = np.concatenate([session.run(None, {INPUT: photo})[0] for photo in photos])
    expected = np.concatenate(_run_network(network, photos, preprocess))
    difference = float(np.abs(outputs - expected).max()) / max(1.0, float(np.abs(expected).max()))
    if not difference <= TOLERANCE:
        problem = f"The exported file resizes images differently: its outputs differ by {difference:.1e}"
        raise VitralError(f"{problem} (expected at most {TOLERANCE:.0e}); it was deleted.")
    return difference


def _run_network(network: torch.nn.Module, photos: Sequence[np.ndarray], preprocess: Preprocess) -> list[np.ndarray]:
    with torch.inference_mode():
        return [network(preprocess_image(photo, preprocess)[None]).numpy() for photo in photos]
