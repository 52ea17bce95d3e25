"""Quantize a model to int8 with OpenVINO and NNCF: static, per-channel weights, calibrated on real images.

The accuracy is measured on images that were not used for calibration. If it drops too far, the kinds of layers whose
quantization costs most stay in float32, one after the other; if that does not help, the export is refused.
"""

import logging
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from math import sqrt
from typing import Any, Literal

import numpy as np
import torch

from vitral.errors import VitralError, missing_package
from vitral.inference.engines.graph import reporting_reasons
from vitral.inference.engines.openvino import compile_model, convert_program, open_core
from vitral.model.network import Config
from vitral.preprocess import Preprocess

NEAR_NEIGHBOR = 0.9
"""An image is nearly the nearest one from this fraction of its cosine similarity on (docs/decisions/engines.md)."""
MAX_KEPT_KINDS = 3
"""With more kinds of layers in float32, an int8 file is hardly faster."""
BATCH = 16

Measure = Literal["top-1", "agreement with float32", "nearest images"]
"""Accuracy is measured with true labels or with those of the float32 model, and for features with a search."""


class AccuracyLossError(VitralError):
    """The quantized model loses too much accuracy; the message has the numbers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RealImages:
    """Preprocessed images with their labels."""

    calibration: np.ndarray
    """uint8 (N, C, H, W), for the ranges of int8 activations."""
    compared: np.ndarray
    """uint8 (M, C, H, W), on which a quantized or exported model is compared with the original."""
    labels: np.ndarray | None
    """(M,) indices of logits; None if the classes are not those of the model."""
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """How much accuracy a quantized model loses, in points of top-1, with a 95% interval from paired images."""

    points: float
    low: float
    high: float
    images: int
    measure: Measure

    def __str__(self) -> str:
        interval = f"({self.low:.2f} to {self.high:.2f}, {self.images} images)"
        return f"{self.points:+.2f} points of {self.measure} lost {interval}"


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
    outputs: Sequence[str],
    max_drop: float,
    on_stage: Callable[[str], None],
) -> Quantized:
    """Quantize a traced network. Raise VitralError with the numbers if it loses more than `max_drop` points of top-1.

    `outputs` are the names of what the network returns, and `expected` are the last of them in float32, for
    `images.compared`. Raise CannotTraceError if OpenVINO cannot convert the network.
    """
    nncf, (*_, compared) = import_nncf(), outputs

    def convert() -> Any:  # noqa: ANN401
        with reporting_reasons():
            return convert_program(program, preprocess, [*outputs])

    def attempt(kept: Sequence[str]) -> tuple[Quantized, float]:
        model = convert()
        ignored = [name for kind in kept for name in layers_by_kind(model, config).get(kind, ())]
        on_stage("quantizing" + (f", with {', '.join(kept)} in float32" if kept else ""))
        quantized = run_nncf(nncf, model, images.calibration, ignored)
        computed = run_all(getattr(compile_model(quantized, precision="int8"), compared), images.compared)
        is_embedding = compared == "features"
        drop = (
            compare_neighbors(computed, expected) if is_embedding else measure_drop(computed, expected, images.labels)
        )
        return Quantized(model=quantized, drop=drop, kept=tuple(kept)), float(np.square(computed - expected).mean())

    attempts = [attempt(())]
    if attempts[0][0].drop.points <= max_drop:
        return attempts[0][0]
    kinds = list(layers_by_kind(convert(), config))
    by_error = sorted((attempt([kind]) for kind in kinds), key=lambda pair: pair[1])
    attempts += by_error
    order = [pair[0].kept[0] for pair in by_error]
    for count in range(1, MAX_KEPT_KINDS + 1):
        if count > 1:
            attempts.append(attempt(order[:count]))
        best = by_error[0][0] if count == 1 else attempts[-1][0]
        if best.drop.points <= max_drop:
            return best
    tried = "; ".join(f"{', '.join(tried.kept) or 'nothing'} in float32: {tried.drop}" for tried, _ in attempts)
    problem = f"int8 loses more than {max_drop:g} points ({tried})."
    raise AccuracyLossError(problem, hint="Use bfloat16, or export the model with a larger --max-drop.")


def import_nncf() -> Any:  # noqa: ANN401 (a module without types)
    """Return the package, or raise MissingError."""
    open_core()  # before NNCF opens others and releases them
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


def run_all(compute: Callable[[np.ndarray], np.ndarray], images: np.ndarray) -> np.ndarray:
    """Return the outputs of all images."""
    return np.concatenate([compute(images[start : start + BATCH]) for start in range(0, len(images), BATCH)])


def measure_drop(outputs: np.ndarray, expected: np.ndarray, labels: np.ndarray | None) -> Drop:
    """Return the points of top-1 that are lost on the same images."""
    truth = expected.argmax(1) if labels is None else labels
    before, after = ((values.argmax(1) == truth).astype(float) for values in (expected, outputs))
    return _as_drop(before - after, "agreement with float32" if labels is None else "top-1")


def compare_neighbors(features: np.ndarray, expected: np.ndarray) -> Drop:
    """Return for how many points of the images a search finds another image than in float32, and no similar one.

    A search returns the image whose features have the largest cosine similarity, after their mean is subtracted:
    without that, all images are similar. The image that it finds is as good if in float32 it is nearly as similar.
    """
    mean = expected.mean(axis=0)
    ours, theirs = (_similarities(values - mean) for values in (features, expected))
    similarity = np.take_along_axis(theirs, ours.argmax(1)[:, None], axis=1)[:, 0]
    nearest = theirs.max(1)
    is_lost = similarity < nearest - (1 - NEAR_NEIGHBOR) * np.abs(nearest)
    return _as_drop(is_lost.astype(float), "nearest images")


def _similarities(features: np.ndarray) -> np.ndarray:
    """Return the (N, N) cosine similarities of images; an image is never its own neighbor."""
    directions = features / np.linalg.norm(features, axis=1, keepdims=True).clip(min=1e-12)
    values = directions @ directions.T
    np.fill_diagonal(values, -np.inf)
    return values


def _as_drop(lost: np.ndarray, measure: Measure) -> Drop:
    """Return the mean of what each image loses, with the 95% interval of a paired difference."""
    points = lost * 100
    mean, count = float(points.mean()), len(points)
    margin = 1.96 * float(points.std()) / sqrt(count)
    return Drop(points=mean, low=mean - margin, high=mean + margin, images=count, measure=measure)


@contextmanager
def _silence() -> Generator[None]:
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
