"""Measure how fast a model runs on this machine: every installed engine, and other libraries with the same weights.

Outputs are compared before anything is timed, and candidates take turns, one at a time. Cold start and memory are those
of a process of its own, which loads the model and predicts one image.
"""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from vitral.devices import choose_precision
from vitral.errors import ConfigError, VitralError, check_choice, check_int, check_number, first_line, missing_package
from vitral.inference.engines import ENGINES, Agreement, compare_outputs, missing_packages
from vitral.inference.engines.choosing import SUPPORTED, Subject, build_engine, example_images
from vitral.inference.engines.fingerprint import describe_cpu, package_versions
from vitral.inference.loaded_model import open_checkpoint
from vitral.model.network import Network, create
from vitral.model.sizes import NAMES
from vitral.model.vit import ViT
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.dialects import timm as timm_dialect
from vitral.weights.dialects import torchvision as torchvision_dialect
from vitral.weights.dialects.rules import Rule
from vitral.weights.save import save

PEERS = ("timm", "torchvision", "transformers")
Compute = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRow:
    """The speed of one candidate with batches of one size."""

    name: str
    """The engine with its precision, or another library."""
    batch: int
    images_per_second: float
    p50_milliseconds: float
    """Median time of a batch."""
    p99_milliseconds: float
    ratio: float
    """Speed relative to eager torch in float32, in the median over the rounds."""
    difference: float
    """Largest difference of a probability to eager torch in float32."""
    top1: float
    """Fraction of images with the same most probable label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdStart:
    """Time and memory that a new process needs to load the model and to predict one image."""

    name: str
    seconds: float
    memory_bytes: int | None
    """Its peak memory; None where the system does not report it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchStep:
    """Progress of a benchmark."""

    done: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """The result of `vitral bench`."""

    model: str
    image_size: tuple[int, int]
    machine: dict[str, Any]
    rows: tuple[BenchRow, ...]
    cold_starts: tuple[ColdStart, ...]
    skipped: dict[str, str]
    """Candidates that could not run, with the reason."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench_events(
    model: str = "vit-s16",
    *,
    against: Sequence[str] = (),
    batch_sizes: Sequence[int] = (1, 8),
    seconds: float = 2.0,
    compiled: bool = False,
) -> Iterator[BenchStep | BenchResult]:
    """Measure a model; yield progress, then the BenchResult."""
    for peer in against:
        check_choice("against", peer, PEERS)
    for batch in batch_sizes:
        check_int("batch_size", batch, minimum=1, maximum=4096)
    check_number("seconds", seconds, above=0)
    subject = _load(model)
    names = [name for name in ENGINES if name != "compiled" or compiled]
    total = (len(batch_sizes) + 1) * (len(names) + len(against)) + len(batch_sizes)
    done, rows, skipped = 0, list[BenchRow](), dict[str, str]()
    starts = list[ColdStart]()
    for batch in batch_sizes:
        images = example_images(subject.preprocess, batch)
        candidates: dict[str, Compute] = {}
        for build in (*(_engines(name) for name in names), *(_peer(name) for name in against)):
            candidates |= _try(build, subject, batch, skipped)
            done += 1
            yield BenchStep(done=done, total=total)
        agreements = {name: _agreement(subject, compute, images) for name, compute in candidates.items()}
        rows += _measure(candidates, images, agreements, seconds)
        done += 1
        yield BenchStep(done=done, total=total)
    with TemporaryDirectory() as folder:
        for name in (*names, *against):
            if name not in skipped:
                starts += _cold_starts(subject, name, Path(folder), skipped)
            done += 1
            yield BenchStep(done=done, total=total)
    machine = {**describe_cpu(), "threads": torch.get_num_threads(), "versions": package_versions()}
    size = subject.preprocess.size
    yield BenchResult(
        model=model,
        image_size=size,
        machine=machine,
        rows=tuple(rows),
        cold_starts=tuple(starts),
        skipped=skipped,
    )


def _load(model: str) -> Subject:
    """Return a checkpoint, or a named architecture with random weights, whose predictions differ between images."""
    if model in NAMES:
        torch.manual_seed(0)
        network: Network = create(model, activation="gelu") if not model.startswith("bit") else create(model)
        nn.init.normal_(network.head.weight, std=0.02)  # type: ignore[arg-type]
        preprocess, multi_label = Preprocess(size=network.config.image_hw), False
    else:
        checkpoint, _ = open_checkpoint(model)
        network, preprocess, multi_label = checkpoint.model, checkpoint.preprocess, checkpoint.multi_label
    if network.config.pool == "none" or not network.config.num_classes:
        raise ConfigError("`vitral bench` needs a model with one prediction per image.")
    return Subject(
        model=network.float().eval(), preprocess=preprocess, device=torch.device("cpu"), multi_label=multi_label
    )


Build = Callable[[Subject, int], dict[str, Compute]]


def _try(build: Build, subject: Subject, batch: int, skipped: dict[str, str]) -> dict[str, Compute]:
    try:
        return build(subject, batch)
    except Exception as error:  # other libraries raise nearly anything; the reason is part of the result
        skipped[getattr(build, "title", "candidate")] = first_line(error)
        return {}


def _engines(name: str) -> Build:
    """Return a function that builds an engine in float32, and in bfloat16 if this CPU computes it."""

    def build(subject: Subject, batch: int) -> dict[str, Compute]:
        for package in missing_packages(name):
            raise missing_package(package, "fast", name)
        return {
            f"{name} {precision}": build_engine(subject, name, precision, batch=batch).logits
            for precision in _precisions(name)
        }

    vars(build)["title"] = name
    return build


def _precisions(engine: str) -> list[str]:
    """Return float32, and bfloat16 if this CPU and the engine compute it."""
    native = choose_precision("cpu").value
    return [precision for precision in dict.fromkeys(("float32", native)) if precision in SUPPORTED[engine]]


def _agreement(subject: Subject, compute: Compute, images: np.ndarray) -> Agreement:
    return compare_outputs(compute(images), subject.reference.logits(images), kind=subject.kind)


def _measure(
    candidates: dict[str, Compute], images: np.ndarray, agreements: dict[str, Agreement], seconds: float
) -> list[BenchRow]:
    """Time the candidates in turns, in a new order every round."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order, shuffle, start = list(candidates), random.Random(0), time.perf_counter()
    while time.perf_counter() - start < seconds * len(candidates) or len(times[order[0]]) < 3:
        shuffle.shuffle(order)
        for name in order:
            began = time.perf_counter()
            candidates[name](images)
            times[name].append(time.perf_counter() - began)
    reference = times["torch float32"]
    return [
        BenchRow(
            name=name,
            batch=len(images),
            images_per_second=len(images) / min(values),
            p50_milliseconds=float(np.percentile(values, 50)) * 1e3,
            p99_milliseconds=float(np.percentile(values, 99)) * 1e3,
            ratio=median(theirs / ours for theirs, ours in zip(reference, values, strict=True)),
            difference=agreements[name].difference,
            top1=agreements[name].top1,
        )
        for name, values in times.items()
    ]


# ---- cold starts ----

_START_ENGINE = """
import sys, numpy, vitral
from vitral.inference.engines import Gate
path, engine, precision, height, width, channels = sys.argv[1:]
loose = Gate(max_difference=1, min_top1=0)
predictor = vitral.Predictor(path, engine=engine, precision=precision, device="cpu", batch_size=1, gate=loose)
predictor(numpy.zeros((int(height), int(width), int(channels)), numpy.uint8))
"""
_START_PEER = """
import sys, torch
if sys.argv[2] == "repair":
    from types import ModuleType
    sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")
network = torch.load(sys.argv[1], weights_only=False)
with torch.inference_mode():
    network(torch.zeros(1, *map(int, sys.argv[3:])))
"""


_PRINT_PEAK = """
from pathlib import Path
status = Path("/proc/self/status")
if status.exists():
    print(1024 * int(status.read_text().split("VmHWM:")[1].split()[0]))
elif sys.platform == "darwin":
    import resource
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
"""Linux counts the memory of the parent in ru_maxrss, so the process reads its own peak."""


class _Finished(NamedTuple):
    seconds: float
    memory_bytes: int | None


def _cold_starts(subject: Subject, name: str, folder: Path, skipped: dict[str, str]) -> Iterator[ColdStart]:
    """Start a process per precision of an engine, or one for another library."""
    is_peer, channels, (height, width) = name in PEERS, subject.preprocess.channels, subject.preprocess.size
    path = folder / f"{name}.{'pt' if is_peer else 'safetensors'}"
    try:
        if is_peer:
            torch.save(_NETWORKS[name](subject), path)
        else:
            save(Checkpoint(model=subject.model, preprocess=subject.preprocess), path)
        for precision in ("float32",) if is_peer else _precisions(name):
            repair = "repair" if "torchvision._meta_registrations" in sys.modules else "-"
            words = [repair, channels, height, width] if is_peer else [name, precision, height, width, channels]
            done = _run_process(_START_PEER if is_peer else _START_ENGINE, [str(path), *map(str, words)])
            title = name if is_peer else f"{name} {precision}"
            yield ColdStart(name=title, seconds=done.seconds, memory_bytes=done.memory_bytes)
    except Exception as error:  # as in `_try`
        skipped[f"cold start of {name}"] = first_line(error)


def _run_process(script: str, words: list[str]) -> _Finished:
    """Return the time and the peak memory of a process."""
    start = time.perf_counter()
    command = [sys.executable, "-c", script + _PRINT_PEAK, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise VitralError(f"The process ended with exit code {done.returncode}.")
    last = done.stdout.split()[-1:]
    return _Finished(seconds, int(last[0]) if last and last[0].isdigit() else None)


# ---- other libraries ----


def _peer(name: str) -> Build:
    """Return a function that builds the same network in another library, with our weights."""

    def build(subject: Subject, batch: int) -> dict[str, Compute]:
        if not isinstance(subject.model, ViT):
            raise ConfigError(f"{name} is compared for ViTs only.")
        _repair_torchvision()
        network = _NETWORKS[name](subject)
        mean, std = (
            torch.tensor(values)[:, None, None] for values in (subject.preprocess.mean, subject.preprocess.std)
        )

        def compute(images: np.ndarray) -> np.ndarray:
            with torch.inference_mode():
                outputs: Any = network((torch.from_numpy(images).float() / 255 - mean) / std)
                return getattr(outputs, "logits", outputs).numpy()

        return {name: compute}

    vars(build)["title"] = name
    return build


def _repair_torchvision() -> None:
    """Make torchvision importable where its compiled extension does not fit torch; timm and transformers import it."""
    try:
        import_module("torchvision")
    except ImportError:
        return
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")


def _in_timm(subject: Subject) -> nn.Module:
    config: Any = subject.model.config
    network = import_module("timm.models.vision_transformer").VisionTransformer(
        **timm_dialect.model_args(config),
        in_chans=config.channels,
        num_classes=config.num_classes,
        norm_layer=lambda width, **options: nn.LayerNorm(width, eps=config.norm_eps, **options),
    )
    rules = timm_dialect.rules(config, token_rows=0 if config.registers else int(config.has_class_token))
    return _with_weights(network, subject, rules)


def _in_torchvision(subject: Subject) -> nn.Module:
    config: Any = subject.model.config
    network = import_module("torchvision.models.vision_transformer").VisionTransformer(
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_layers=config.depth,
        num_heads=config.heads,
        hidden_dim=config.width,
        mlp_dim=config.mlp_width,
        num_classes=config.num_classes,
        representation_size=config.representation,
    )
    return _with_weights(network, subject, torchvision_dialect.rules(config))


def _in_transformers(subject: Subject) -> nn.Module:
    """Load a temporary folder that our writer of this dialect wrote."""
    with TemporaryDirectory() as folder:
        save(Checkpoint(model=subject.model, preprocess=subject.preprocess), f"{folder}/vit", dialect="huggingface")
        import_module("transformers.utils.logging").disable_progress_bar()
        return import_module("transformers").ViTForImageClassification.from_pretrained(f"{folder}/vit").eval()


_NETWORKS = {"timm": _in_timm, "torchvision": _in_torchvision, "transformers": _in_transformers}


def _with_weights(network: nn.Module, subject: Subject, rules: Iterable[Rule]) -> nn.Module:
    state = subject.model.state_dict()
    theirs: dict[str, Any] = {}
    for rule in rules:
        theirs |= dict(zip(rule.theirs, rule.write(tuple(state[name] for name in rule.ours)), strict=True))
    network.load_state_dict(theirs, strict=True)
    return network.eval()
