"""Run a checkpoint for a Predictor: eager torch, or the engine that was requested or measured to be faster."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock

import numpy as np
from torch import Tensor

from vitral.data.dataset import Item
from vitral.data.headers import Pixels
from vitral.data.transforms import preprocess_image
from vitral.devices import choose_precision
from vitral.errors import ConfigError
from vitral.inference.engines import Gate, to_probabilities
from vitral.inference.engines.choosing import Chosen, Subject, check_request, choose_engine, open_engine
from vitral.inference.engines.torch_eager import as_tensor
from vitral.inference.int8 import open_int8
from vitral.inference.loaded_model import Images, LoadedModel, load_model
from vitral.inference.novelty import Novelty
from vitral.inference.pipeline import make_loader
from vitral.inference.real_images import calibration_images, fingerprint_images
from vitral.weights.checkpoint import Checkpoint

MIN_IMAGES = 256
"""Shorter runs never measure engines."""


class TorchBackend:
    """A loaded model with its engine and the statistics of its training images."""

    def __init__(
        self,
        source: str | Path | Checkpoint,
        *,
        device: str,
        engine: str,
        precision: str,
        batch_size: int,
        image_size: int | tuple[int, int] | None,
        merge: int | None,
        gate: Gate,
        calibration: str | Path | None,
        on_choice: Callable[[str], None],
    ):
        check_request(engine, precision)
        is_torch = engine in ("auto", "torch") and precision not in ("auto", "int8")
        torch_precision = precision if is_torch else "float32"
        self.loaded = load_model(source, device=device, precision=torch_precision, image_size=image_size, merge=merge)
        self.novelty = _read_novelty(self.loaded)
        self._request = (engine, precision)
        self._batch_size, self._gate, self._on_choice = batch_size, gate, on_choice
        self._measured_for = MIN_IMAGES - 1  # the longest run that engines were considered for
        self._lock = Lock()
        if precision == "int8":
            self._use(_quantized(self.loaded, calibration, gate, on_choice))
        elif engine not in ("auto", "torch"):
            self._use(open_engine(subject_of(self.loaded), engine, precision, batch=batch_size, gate=gate))

    @property
    def may_round(self) -> bool:
        """Return whether some of the runs with these options compute in a lower precision than float32."""
        engine, precision = self._request
        is_native = choose_precision(self.loaded.device.type).value != "float32"
        return precision not in ("auto", "float32") or (engine, precision, is_native) == ("auto", "auto", True)

    def choose(self, images: list[np.ndarray], total: int) -> None:
        """Measure engines for a run over `total` images, of which these are the first."""
        engine, precision = self._request
        if engine != "auto" or self.loaded.engine is not None or total <= self._measured_for:
            return
        with self._lock:
            is_batch = len({image.shape for image in images}) == 1
            if self.loaded.engine is None and total > self._measured_for and is_batch:
                self._measured_for = 2 * total
                subject = subject_of(self.loaded)
                batch = np.stack(images)
                self._use(choose_engine(subject, batch, total=total, gate=self._gate, precision=precision))

    def _use(self, chosen: Chosen) -> None:
        if chosen.engine is not None:
            self.loaded = replace(self.loaded, engine=chosen.engine)
        if chosen.reason:
            self._on_choice(chosen.reason)

    def prepare(self, content: bytes | Pixels) -> np.ndarray:
        """Return uint8 (C, H, W), the model's input before normalization."""
        image = preprocess_image(content, self.loaded.preprocess, patch=self.loaded.step_hw)
        return np.ascontiguousarray(image.numpy())

    def predict(self, images: list[np.ndarray]) -> tuple[np.ndarray, list[float] | None]:
        """Return (B, K) probabilities and how unusual each image is, from one forward pass."""
        loaded, batch = self.loaded, _to_batch(images)
        unusual: list[float] | None = None
        if self.novelty is None:
            logits = loaded.logits(batch)
        else:
            features = loaded.features(batch)
            unusual = [float(value) for value in self.novelty.score(loaded.check_finite(features)).numpy()]
            logits = loaded.classify(features)
        rows = loaded.check_finite(logits).numpy()  # torch's softmax would wake threads, which spin on busy cores
        return to_probabilities(rows, multi_label=loaded.multi_label), unusual

    def embed(self, images: list[np.ndarray]) -> np.ndarray:
        """Return (B, D) features."""
        return self.loaded.check_finite(self.loaded.features(_to_batch(images))).numpy()


def with_engine(
    loaded: LoadedModel,
    engine: str,
    precision: str,
    *,
    batch: int,
    items: Sequence[Item] = (),
    calibration: str | Path | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> tuple[LoadedModel, str]:
    """Return the model with the requested engine, and the reason; auto measures engines on the first of the images."""
    gate = Gate()
    if precision == "int8":
        chosen = _quantized(loaded, calibration, gate, on_stage)
    elif engine != "auto":
        chosen = open_engine(subject_of(loaded), engine, precision, batch=batch, gate=gate)
    else:
        first = next(make_loader(loaded, items[:batch], batch_size=batch).epoch(), None)
        if first is None or not isinstance(first.images, Tensor):
            return loaded, "engine: torch float32, because the images have different sizes"
        images = first.images.numpy()
        chosen = choose_engine(subject_of(loaded), images, total=len(items), gate=gate, precision=precision)
    return (replace(loaded, engine=chosen.engine) if chosen.engine else loaded), chosen.reason


def _quantized(
    loaded: LoadedModel, calibration: str | Path | None, gate: Gate, on_stage: Callable[[str], None]
) -> Chosen:
    """Return the model in int8, calibrated on a folder or dataset, or on the data of its run without."""
    return open_int8(
        loaded,
        lambda checkpoint: calibration_images(checkpoint, loaded.run, calibration),
        fingerprint=fingerprint_images(loaded.run, calibration),
        max_drop=gate.max_drop,
        on_stage=on_stage,
    )


def subject_of(loaded: LoadedModel) -> Subject:
    """Return the model to build engines for."""
    return Subject(
        model=loaded.model, preprocess=loaded.preprocess, device=loaded.device, multi_label=loaded.multi_label
    )


def _to_batch(images: list[np.ndarray]) -> Images:
    """Return one tensor, or a list of them if the sizes differ."""
    if len({image.shape for image in images}) == 1:
        return as_tensor(np.stack(images))
    tensors: list[Tensor] = [as_tensor(image) for image in images]
    return tensors


def _read_novelty(model: LoadedModel) -> Novelty | None:
    """Return the statistics that the model's run stored, or None."""
    if model.run is None or not model.run.novelty.is_file():
        return None
    novelty, config = Novelty.load(model.run.novelty), model.model.config
    width = config.representation or config.pooled_width
    if novelty.width != width:
        problem = f"{model.run.novelty} does not fit the model (got {novelty.width} features; expected {width})."
        raise ConfigError(problem, hint="Delete it to predict without `unusual`.")
    return novelty
