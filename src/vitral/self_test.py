"""Test vitral on this machine: train, kill, resume, predict, export, two processes; compare with float32 on the CPU.

Everything runs offline in a temporary folder, on the built-in digits, and takes about a minute.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from vitral.errors import VitralError

MAX_DIFFERENCE = 1e-3
"""Largest allowed difference of a probability between this device and float32 on the CPU."""
MAX_PARALLEL_DIFFERENCE = 1e-5
"""Largest allowed difference of any weight between one process and two. On a CPU there is none."""
IMAGES, TIMEOUT = 64, 300
SETTINGS = (
    "builtin:digits --model vit-pico7 --network.width 48 --network.depth 2 --network.heads 3 --batch-size 64 "
    "--steps 60 --dropout 0.1 --save-seconds 0 --workers 0 --format quiet"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The result of one test."""

    name: str
    result: Literal["holds", "fails", "skipped"]
    detail: str
    """The measurement, or the reason why the test failed or was skipped."""
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class _SkippedError(Exception):
    """Raised by a test that cannot run here, with the reason."""


def run_checks(device: str) -> Iterator[Check]:
    """Run the tests on a device, one after the other, and yield their results."""
    with TemporaryDirectory(prefix="vitral-check-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        tests: dict[str, Callable[[], str]] = {
            "train": lambda: _train(folder / "whole", device),
            "kill and resume": lambda: _kill_and_resume(folder, device),
            "predict as on the CPU": lambda: _compare_with_cpu(folder / "whole", device),
            "export to ONNX": lambda: _export(folder),
            "two processes": lambda: _two_processes(folder, device),
        }
        for title, test in tests.items():
            yield _run(title, test)


def _run(title: str, test: Callable[[], str]) -> Check:
    """Run one test. Any failure is a result, because people report it."""
    start, result = time.perf_counter(), "holds"
    try:
        detail = test()
    except _SkippedError as reason:
        result, detail = "skipped", str(reason)
    except Exception as error:
        result, detail = "fails", f"{type(error).__name__}: {error}"
    return Check(name=title, result=result, detail=detail, seconds=round(time.perf_counter() - start, 2))


def _start(folder: Path, words: list[str], **environment: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "VITRAL_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", **environment}
    pipes: dict[str, Any] = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, "-m", "vitral", "train", *words], env=environment, **pipes)


def _finish(process: subprocess.Popen[str]) -> None:
    """Wait for a command. VitralError with its last line if it fails."""
    try:
        _, err = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    if process.returncode:
        last_line = (err.strip().splitlines() or ["no message"])[-1]
        raise VitralError(f"vitral train exited with code {process.returncode}: {last_line}")


def _new_run(folder: Path, device: str) -> list[str]:
    return [*SETTINGS.split(), "--device", device, "--out", str(folder)]


def _train(folder: Path, device: str) -> str:
    from vitral.runs import Run

    _finish(_start(folder.parent, _new_run(folder, device)))
    return f"accuracy {Run.open(folder).test.top1:.1%} after 60 steps"


def _kill_and_resume(folder: Path, device: str) -> str:
    """Kill a run after its first save, resume it, and compare every bit with the run that was not killed."""
    from safetensors.torch import load_file

    run = folder / "killed"
    process = _start(folder, _new_run(run, device))
    limit = time.monotonic() + TIMEOUT
    while not list((run / "state").glob("step-????????")) and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.005)
    process.kill()
    process.communicate()
    _finish(_start(folder, ["--resume", str(run), "--format", "quiet"]))
    whole, resumed = (load_file(path / "model.safetensors") for path in (folder / "whole", run))
    difference = max(float((whole[name] - resumed[name]).abs().max()) for name in whole)
    if difference or not all(bool((whole[name] == resumed[name]).all()) for name in whole):
        raise VitralError(f"The weights differ by up to {difference:.1e}.")
    return "the same weights, bit for bit"


def _compare_with_cpu(run: Path, device: str) -> str:
    import numpy as np

    from vitral.data.sources import open_builtin
    from vitral.inference.predictor import Predictor

    images: list[Any] = [item.source.read() for item in open_builtin("digits").splits["test"][:IMAGES]]
    on_cpu = Predictor(run, device="cpu", precision="float32")(images)
    on_device = Predictor(run, device=device)(images)
    pairs = zip(on_cpu, on_device, strict=True)
    difference = max(float(np.abs(one.probabilities - other.probabilities).max()) for one, other in pairs)
    if difference > MAX_DIFFERENCE:
        raise VitralError(f"Probabilities differ by up to {difference:.1e} (expected at most {MAX_DIFFERENCE:.0e}).")
    return f"{len(images)} images, probabilities within {difference:.1e}"


def _export(folder: Path) -> str:
    from vitral.api import export

    missing = [package for package in ("onnxscript", "onnxruntime") if find_spec(package) is None]
    if missing:
        raise _SkippedError(f"{' and '.join(missing)} not installed. Run: pip install 'vitral[fast]'")
    exported = export(folder / "whole", folder / "model.onnx", to="onnx")
    return f"{exported.images} images, outputs within {exported.difference:.1e}"


def _two_processes(folder: Path, device: str) -> str:
    """Train in two processes and in one with two micro-batches, and compare the weights."""
    import torch
    from safetensors.torch import load_file

    kind = device.partition(":")[0]
    count = {"cuda": torch.cuda.device_count(), "cpu": os.cpu_count() or 1}.get(kind, 1)
    if count < 2:
        raise _SkippedError(f"this machine has one {'core' if kind == 'cpu' else 'device'}")
    short = ["--steps", "12", "--device", kind]
    for name, words in {"one": ["--accumulate", "2"], "two": ["--processes", "2"]}.items():
        settings = [*SETTINGS.replace("--steps 60 ", "").split(), *short, "--out", str(folder / name), *words]
        _finish(_start(folder, settings, OMP_NUM_THREADS="1"))
    one, two = (load_file(folder / name / "model.safetensors") for name in ("one", "two"))
    difference = max(float((one[name] - two[name]).abs().max()) for name in one)
    if difference > MAX_PARALLEL_DIFFERENCE:
        raise VitralError(f"The weights of two processes differ by up to {difference:.1e} from those of one.")
    return "the weights of one process" + (", bit for bit" if not difference else f", within {difference:.1e}")
