"""`vitral doctor`: check the installation."""

import os
import platform
import re
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from shutil import which
from typing import Annotated, Any

from vitral import __version__
from vitral.cli.parameters import Format, option
from vitral.console.output import show_as
from vitral.console.tables import show_findings


def doctor(*, format: Annotated[Format, option("human, json or quiet (problems only).")] = "human") -> None:
    """Check the installation: device, versions, and what is missing.

    Exits with code 1 if a required package is missing.

    Examples
    --------
    vitral doctor
    vitral doctor --format json
    """
    findings = examine()
    is_quiet = format == "quiet"
    show = partial(show_findings, findings, problems_only=is_quiet)
    show_as("human" if is_quiet else format, json=findings, human=show)
    if findings["problems"]:
        sys.exit(1)


EXTRAS = {
    "fast": "fast JPEG decoding, export to ONNX",
    "hub": "checkpoints and datasets from the Hugging Face hub",
    "tables": "Parquet tables",
    "tensorboard": "training curves in TensorBoard",
}


def examine() -> dict[str, Any]:
    """Return the versions, the device, the extras and the problems of this installation."""
    packages = {name: _version(name) for name in _required()}
    problems = [f"{name} is not installed. Run: pip install {name}" for name in packages if not packages[name]]
    findings: dict[str, Any] = {
        "vitral": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "cores": os.cpu_count(),
        "packages": packages,
        "extras": {
            extra: {"what": what, "missing": [name for name in _required(extra) if not _version(name)]}
            for extra, what in EXTRAS.items()
        },
        "problems": problems,
    }
    if packages.get("torch"):
        findings |= _examine_torch()
    return findings


def _examine_torch() -> dict[str, Any]:
    import torch

    from vitral.devices import choose_device, choose_precision

    device = choose_device()
    precision = choose_precision(device.value)
    has_compiler = any(map(which, ("c++", "g++", "clang++", "cl"))) and find_spec("torch._inductor") is not None
    return {
        "device": {"value": device.value, "reason": device.reason},
        "precision": {"value": precision.value, "reason": precision.reason},
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "compiler": "found" if has_compiler else "not found (torch.compile needs a C++ compiler on a CPU)",
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _required(extra: str = "") -> list[str]:
    """Return the packages that vitral requires for an extra, or without extras."""
    matches = (re.match(r"([\w-]+)(?:.*extra == ['\"](\w+))?", line) for line in requires("vitral") or ())
    return [match[1] for match in matches if match and (match[2] or "") == extra]
