"""Quantize a model to int8 with OpenVINO and NNCF: static, per-channel weights, calibrated on real images.

The accuracy is measured on images that were not used for calibration. If it drops too far, the kinds of layers whose
quantization costs most stay in float32, one after the other; if that does not help, the export is refused.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from math import sqrt
from typing import Any

import numpy as np
import torch

from vitral.errors import VitralError, missing_package
from vitral.exporting.real_images import RealImages
from vitral.inference.engines.openvino import OpenVinoEngine, compile_model, convert_program, import_openvino
from vitral.model.network import Config
from vitral.preprocess import Preprocess

MAX_KEPT_KINDS = 3
"""With more kinds of layers in float32, an int8 file is hardly faster."""
BATCH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """How much accuracy a quantized model loses, in points of top-1, with a 95% interval from paired images."""

    points: float
    low: float
    high: float
    images: int
    labeled: bool
    """Whether true labels were compared, or only the predictions of the float32 model."""

    def __str__(self) -> str:
        what = "top-1" if self.labeled else "agreement with float32"
        return f"{self.points:+.2f} points of {what} lost ({self.low:.2f} to {self.high:.2f}, {self.images} images)"


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """An openvino.Model in int8, the accuracy that it loses, and the kinds of layers that stayed in float32."""

    model: Any
    drop: Drop
    kept: tuple[str, ...]


def quantize(
    program: torch.export.ExportedProgram,
    preprocess: Preprocess,
    config: Config,
    images: RealImages,
    expected: np.ndarray,
    *,
    max_drop: float,
    on_stage: Callable[[str], None],
) -> Quantized:
    """Quantize a traced network. Raise VitralError with the numbers if it loses more than `max_drop` points of top-1.

    `expected` are the float32 outputs for `images.compared`.
    """
    nncf = import_nncf()

    def attempt(kept: Sequence[str]) -> tuple[Quantized, float]:
        model = convert_program(program, preprocess, ["logits"])
        ignored = [name for kind in kept for name in layers_by_kind(model, config).get(kind, ())]
        on_stage("quantizing" + (f", with {', '.join(kept)} in float32" if kept else ""))
        quantized = run_nncf(nncf, model, images.calibration, ignored)
        outputs = run_all(compile_model(quantized, precision="int8"), images.compared)
        drop = measure_drop(outputs, expected, images.labels)
        return Quantized(model=quantized, drop=drop, kept=tuple(kept)), float(np.square(outputs - expected).mean())

    attempts = [attempt(())]
    if attempts[0][0].drop.points <= max_drop:
        return attempts[0][0]
    kinds = list(layers_by_kind(convert_program(program, preprocess, ["logits"]), config))
    by_error = sorted((attempt([kind]) for kind in kinds), key=lambda pair: pair[1])
    attempts += by_error
    order = [pair[0].kept[0] for pair in by_error]
    for count in range(1, MAX_KEPT_KINDS + 1):
        best = by_error[0] if count == 1 else attempt(order[:count])
        attempts.append(best)
        if best[0].drop.points <= max_drop:
            return best[0]
    tried = "; ".join(f"{', '.join(tried.kept) or 'nothing'} in float32: {tried.drop}" for tried, _ in attempts)
    problem = f"int8 loses more than {max_drop:g} points of top-1, so nothing was written ({tried})."
    raise VitralError(problem, hint="Raise --max-drop, or use --precision bfloat16.")


def import_nncf() -> Any:  # noqa: ANN401 (a module without types)
    """Return the package, or raise MissingError."""
    import_openvino()
    try:
        with _silence():
            return import_module("nncf")
    except ImportError:
        raise missing_package("nncf", "fast", "int8") from None


def run_nncf(nncf: Any, model: Any, calibration: np.ndarray, ignored: Sequence[str]) -> Any:  # noqa: ANN401
    """Return the model with int8 matrix products, except those of the ignored layers."""
    batches = [calibration[start : start + 1] for start in range(len(calibration))]
    options: dict[str, Any] = {"ignored_scope": nncf.IgnoredScope(names=list(ignored))} if ignored else {}
    with _silence():
        return nncf.quantize(
            model,
            nncf.Dataset(batches),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(batches),
            **options,
        )


def layers_by_kind(model: Any, config: Config) -> dict[str, list[str]]:  # noqa: ANN401
    """Return the names of the matrix products with weights, by the shape of their weights; the first is for patches."""
    width, hidden = config.width, getattr(config, "mlp_width", 0)
    kinds = {
        (3 * width, width): "qkv",
        (width, width): "attention output",
        (hidden, width): "mlp input",
        (width, hidden): "mlp output",
    }
    layers: dict[str, list[str]] = {}
    for operation in model.get_ordered_ops():
        if operation.get_type_name() in ("MatMul", "Convolution"):
            shape = operation.input_value(1).get_partial_shape()
            source = operation.input_value(1).get_node().get_type_name()
            if source in ("Constant", "Convert") and shape.is_static:
                sides = tuple(shape.to_shape())
                kind = kinds.get(sides, kinds.get(sides[::-1], "patches and head")) if layers else "patches and head"
                layers.setdefault(kind, []).append(operation.get_friendly_name())
    return layers


def run_all(engine: OpenVinoEngine, images: np.ndarray) -> np.ndarray:
    """Return the logits of all images."""
    return np.concatenate([engine.logits(images[start : start + BATCH]) for start in range(0, len(images), BATCH)])


def measure_drop(outputs: np.ndarray, expected: np.ndarray, labels: np.ndarray | None) -> Drop:
    """Return the points of top-1 that are lost on the same images, with the interval of a paired difference."""
    truth = expected.argmax(1) if labels is None else labels
    before, after = ((values.argmax(1) == truth).astype(float) for values in (expected, outputs))
    difference = (before - after) * 100
    mean, count = float(difference.mean()), len(difference)
    margin = 1.96 * float(difference.std()) / sqrt(count)
    return Drop(points=mean, low=mean - margin, high=mean + margin, images=count, labeled=labels is not None)


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress the progress bars and messages of NNCF."""
    logger = logging.getLogger("nncf")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
