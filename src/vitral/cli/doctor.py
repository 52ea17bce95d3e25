"""`vitral doctor`: check the installation."""

import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from shutil import which
from typing import Annotated, Any

from cyclopts import Parameter

from vitral import __version__
from vitral.cli.parameters import FORMAT
from vitral.console.output import Format, show_json
from vitral.console.tables import show_findings


def doctor(
    *, format: Annotated[Format, FORMAT, Parameter(help="human, json or quiet (problems only).")] = "human"
) -> None:
    """Check the installation: device, versions, and what is missing.

    Exits with code 1 if a required package is missing.

    Examples
    --------
    vitral doctor
    vitral doctor --format json
    """
    findings = examine()
    if format == "json":
        show_json(findings)
    else:
        show_findings(findings, problems_only=format == "quiet")
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
    packages = {name: _version(name) for name in _core_packages()}
    problems = [f"{name} is not installed. Run: pip install {name}" for name in packages if not packages[name]]
    findings: dict[str, Any] = {
        "vitral": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "cores": os.cpu_count(),
        "packages": packages,
        "extras": {extra: {"what": what, "missing": _missing(extra)} for extra, what in EXTRAS.items()},
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


def _core_packages() -> list[str]:
    """Return the packages that vitral requires without extras."""
    lines = (line for line in requires("vitral") or () if "extra ==" not in line)
    return [line.split(";")[0].split("[")[0].rstrip("0123456789.,<>=!~ ").strip() for line in lines]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _missing(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed."""
    matches = (re.match(rf"([\w-]+).*extra == ['\"]{extra}['\"]", line) for line in requires("vitral") or ())
    return [match[1] for match in matches if match and not _version(match[1])]
