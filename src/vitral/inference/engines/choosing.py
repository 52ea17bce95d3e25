"""Choose the engine that computes a model fastest on this machine and agrees with float32 torch.

Measurements are cached under a fingerprint of weights, size, batch, versions and CPU, so that they are made once.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch

from vitral.cache import keep_entry, read_entry
from vitral.devices import choose_precision
from vitral.errors import ConfigError, VitralError, check_choice, first_line, missing_package
from vitral.inference.engines import (
    ENGINES,
    PRECISIONS,
    Agreement,
    Engine,
    Gate,
    compare_outputs,
    missing_packages,
)
from vitral.inference.engines.compiled import build_compiled, find_compiler
from vitral.inference.engines.fingerprint import machine_facts, weights_digest
from vitral.inference.engines.graph import CannotTraceError
from vitral.inference.engines.onnxruntime import build_onnxruntime
from vitral.inference.engines.openvino import build_openvino
from vitral.inference.engines.torch_eager import TorchEngine
from vitral.model.network import Network
from vitral.preprocess import Preprocess

PREPARATION_SECONDS = {"torch": 2.0, "openvino": 8.0, "onnxruntime": 15.0, "compiled": 60.0}
"""About how long it takes to build and measure an engine. A run that is not several times as long never pays for it."""
PAYBACK = 4
"""An engine is measured if torch would need this many times its preparation for the remaining images."""
MIN_SPEEDUP = 1.05
"""A smaller gain is within the noise of a measurement."""
TURNS = 3
"""The fastest of so many turns counts; engine and torch take turns."""
SUPPORTED = {
    "torch": ("float32", "bfloat16", "float16"),
    "compiled": ("float32", "bfloat16"),
    "onnxruntime": ("float32",),
    "openvino": ("float32", "bfloat16", "int8"),
}
"""The precisions that an engine builds from a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model to build engines for."""

    model: Network
    preprocess: Preprocess
    device: torch.device
    multi_label: bool

    @property
    def kind(self) -> str:
        """Return what is compared: features for a model without a head."""
        if not self.model.config.num_classes:
            return "features"
        return "multi-label" if self.multi_label else "logits"

    @property
    def reference(self) -> TorchEngine:
        """Return float32 torch."""
        return TorchEngine(model=self.model, preprocess=self.preprocess, device=self.device)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """An engine, or None for eager torch, and the reason in one line, which is empty if nothing was measured."""

    engine: Engine | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The speed of a candidate and its agreement with float32 torch, or why it cannot run this model."""

    seconds: float = float("inf")
    """Per image."""
    torch_seconds: float = 0.0
    """Per image of float32 torch, which takes turns with the engine: at another moment, the machine may be slower."""
    difference: float = float("nan")
    top1: float = 0.0
    images: int = 0
    error: str = ""

    @property
    def agreement(self) -> Agreement:
        return Agreement(difference=self.difference, top1=self.top1, images=self.images)

    @property
    def speedup(self) -> float:
        return self.torch_seconds / self.seconds


Candidate = tuple[str, str]
"""Engine and precision."""


def check_request(engine: str, precision: str) -> None:
    """Raise ConfigError for an unknown or impossible combination, and MissingError for a missing package."""
    check_choice("engine", engine, ("auto", *ENGINES))
    check_choice("precision", precision, ("auto", *PRECISIONS))
    if engine == "auto" and precision == "int8":
        engine = "openvino"
    if engine == "auto":
        return
    if precision != "auto" and precision not in SUPPORTED[engine]:
        supported = ", ".join(SUPPORTED[engine])
        raise ConfigError(f"engine {engine!r} does not compute {precision} (expected {supported}).")
    for package in missing_packages(engine):
        raise missing_package(package, "fast", f"engine={engine!r}")


# ---- one engine ----


def build_engine(subject: Subject, name: str, precision: str, *, batch: int) -> Engine:
    """Build an engine. Raise CannotTraceError if the model cannot become a graph."""
    model, preprocess = subject.model, subject.preprocess
    if name == "torch":
        return TorchEngine(model=model, preprocess=preprocess, device=subject.device, precision=precision)
    if name == "compiled":
        return build_compiled(model, preprocess, device=subject.device, precision=precision, batch=batch)
    if subject.device.type != "cpu":
        raise ConfigError(f"engine {name!r} runs on the CPU (got device={subject.device.type!r}).")
    if name == "onnxruntime":
        return build_onnxruntime(model, preprocess)
    return build_openvino(model, preprocess, precision=precision)


def open_engine(subject: Subject, name: str, precision: str, *, batch: int, gate: Gate) -> Chosen:
    """Build the requested engine and compare it with float32 torch. Inputs that it cannot take go to torch."""
    precision = "float32" if precision == "auto" else precision
    if problem := find_obstacle(subject):
        return Chosen(engine=None, reason=f"engine: torch float32 instead of {name}, because {problem}")
    try:
        engine = build_engine(subject, name, precision, batch=batch)
    except CannotTraceError as error:
        return Chosen(engine=None, reason=f"engine: torch float32 instead of {name}, because {error}")
    agreement = measure_agreement(engine, subject, example_images(subject.preprocess))
    if not agreement.passes(gate):
        hint = "Use engine='torch', or loosen the gate."
        raise VitralError(f"{name} {engine.precision} disagrees with torch: {agreement}; expected {gate}.", hint=hint)
    return Chosen(engine=engine, reason=f"engine: {name} {engine.precision} ({agreement})")


def find_obstacle(subject: Subject) -> str | None:
    """Return why no engine but eager torch can run this model on its images, or None."""
    if subject.preprocess.resize == "native":
        return "the model takes images of mixed sizes"
    if subject.model.config.pool == "none":
        return "the model outputs one vector per token"
    return None


def example_images(preprocess: Preprocess, count: int = 4) -> np.ndarray:
    """Return uint8 images with large and small structures, for a comparison without images of the user."""
    generator, (height, width) = np.random.default_rng(0), preprocess.size
    waves = np.sin(np.arange(height)[:, None] / 7 + np.arange(width) / 11) * 60 + 128
    noise = (
        generator.normal(0, 1, (count, preprocess.channels, height, width))
        * np.array([5, 20, 40, 60])[np.arange(count) % 4, None, None, None]
    )
    return (waves + noise + generator.normal(0, 40, (count, preprocess.channels, 1, 1))).clip(0, 255).astype(np.uint8)


def measure_agreement(engine: Engine, subject: Subject, images: np.ndarray) -> Agreement:
    """Compare the outputs of an engine with those of float32 torch."""
    if subject.kind == "features":
        return compare_outputs(engine.features(images), subject.reference.features(images), kind="features")
    return compare_outputs(engine.logits(images), subject.reference.logits(images), kind=subject.kind)


# ---- the fastest engine ----


def choose_engine(
    subject: Subject, images: np.ndarray, *, total: int, gate: Gate, engine: str = "auto", precision: str = "auto"
) -> Chosen:
    """Return the fastest engine that agrees with float32 torch on these images, for a run over `total` images."""
    if problem := find_obstacle(subject):
        return Chosen(engine=None, reason=f"engine: torch float32, because {problem}")
    remaining = time_per_image(_compute(subject, subject.reference), images[:4], turns=1) * total
    allowed = [
        candidate
        for candidate in list_candidates(subject, engine, precision)
        if remaining >= PAYBACK * PREPARATION_SECONDS[candidate[0]]
    ]
    if not allowed:
        return Chosen(engine=None, reason="")  # too few images to pay for a measurement
    key = measurement_key(subject, batch=len(images))
    measured = read_measurements(key)
    built: dict[Candidate, Engine] = {}
    for candidate in allowed:
        if candidate not in measured:
            measured[candidate], runnable = measure_candidate(subject, candidate, images)
            built |= {candidate: runnable} if runnable else {}
    keep_measurements(key, measured)
    best = max(allowed, key=lambda candidate: _score(measured[candidate], gate))
    if _score(measured[best], gate) < MIN_SPEEDUP:
        rejected = "; ".join(_describe(candidate, measured[candidate]) for candidate in allowed)
        return Chosen(engine=None, reason=f"engine: torch float32 ({rejected})")
    chosen = built.get(best) or build_engine(subject, *best, batch=len(images))
    return Chosen(engine=chosen, reason=f"engine: {_describe(best, measured[best])}")


def list_candidates(subject: Subject, engine: str, precision: str) -> Iterator[Candidate]:
    """Yield the installed engines with the precisions that this hardware computes natively."""
    native = choose_precision(subject.device.type).value
    names = ENGINES if engine == "auto" else (engine,)
    for name in names:
        is_compilable = subject.device.type != "cpu" or find_compiler() is not None
        is_usable = is_compilable if name == "compiled" else name == "torch" or subject.device.type == "cpu"
        if not is_usable or missing_packages(name):
            continue
        for candidate in dict.fromkeys(("float32", native) if precision == "auto" else (precision,)):
            if candidate in SUPPORTED[name] and (name, candidate) != ("torch", "float32"):
                yield name, candidate


def measure_candidate(subject: Subject, candidate: Candidate, images: np.ndarray) -> tuple[Measurement, Engine | None]:
    """Build a candidate, compare its outputs and time it. A candidate that fails gets the reason."""
    try:
        engine = build_engine(subject, *candidate, batch=len(images))
        agreement = measure_agreement(engine, subject, images)
        ours, torchs = _compute(subject, engine), _compute(subject, subject.reference)
        turns = [(time_per_image(ours, images, turns=1), time_per_image(torchs, images, turns=1)) for _ in range(TURNS)]
        seconds, torch_seconds = map(min, zip(*turns, strict=True))
    except Exception as error:  # runtimes raise nearly anything; torch remains
        return Measurement(error=first_line(error)[:200]), None
    measurement = Measurement(
        seconds=seconds,
        torch_seconds=torch_seconds,
        difference=agreement.difference,
        top1=agreement.top1,
        images=agreement.images,
    )
    return measurement, engine


def _compute(subject: Subject, engine: Engine) -> Callable[[np.ndarray], np.ndarray]:
    return engine.logits if subject.model.config.num_classes else engine.features


def time_per_image(compute: Callable[[np.ndarray], np.ndarray], images: np.ndarray, turns: int = 3) -> float:
    """Return the seconds per image of the fastest turn."""
    best = float("inf")
    for _ in range(turns):
        start = time.perf_counter()
        compute(images)
        best = min(best, time.perf_counter() - start)
    return best / len(images)


def _score(measurement: Measurement, gate: Gate) -> float:
    return measurement.speedup if measurement.agreement.passes(gate) else 0.0


def _describe(candidate: Candidate, measurement: Measurement) -> str:
    name = " ".join(candidate)
    if measurement.error:
        return f"{name} failed: {measurement.error}"
    return f"{name}, {measurement.speedup:.2f} x torch float32, {measurement.agreement}"


# ---- cached measurements ----


def measurement_key(subject: Subject, *, batch: int) -> str:
    """Return the name of the cache entry: everything that speed and agreement depend on."""
    digest = weights_digest(subject.model.state_dict())
    size_class = 1 << (batch - 1).bit_length()
    facts = [asdict(subject.model.config), subject.preprocess.as_dict(), size_class, subject.device.type]
    digest.update(json.dumps([*facts, machine_facts()], sort_keys=True, default=str).encode())
    return f"{hashlib.sha256(digest.digest()).hexdigest()}.json"


def read_measurements(key: str) -> dict[Candidate, Measurement]:
    """Return the measurements of earlier runs, or none if the entry is missing or damaged."""
    content = read_entry("engines", key)
    try:
        rows: Mapping[str, Any] = json.loads(content) if content else {}
        measured = {cast(Candidate, tuple(name.split())): Measurement(**row) for name, row in rows.items()}
        return {candidate: row for candidate, row in measured.items() if row.error or row.torch_seconds}
    except (ValueError, TypeError, AttributeError):
        return {}


def keep_measurements(key: str, measured: Mapping[Candidate, Measurement]) -> None:
    """Write the measurements for later runs."""
    rows = {" ".join(candidate): asdict(row) for candidate, row in measured.items()}
    keep_entry("engines", key, json.dumps(rows).encode())
