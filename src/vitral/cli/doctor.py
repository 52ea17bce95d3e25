"""``vitral doctor``: what is here, what is missing, and how to get it."""

import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import Annotated, Any

from cyclopts import Parameter

from vitral import __version__
from vitral.console.doctor import show_findings
from vitral.console.output import Format, show_json


def doctor(
    *, format: Annotated[Format, Parameter(help="human: a page; json: the same; quiet: problems only.")] = "human"
) -> None:
    """The device, the versions, what is missing and how to get it."""
    findings = examine()
    if format == "json":
        show_json(findings)
    else:
        show_findings(findings, problems_only=format == "quiet")
    if findings["problems"]:
        sys.exit(1)


EXTRAS = {
    "fast": "JPEGs in half the time, export to ONNX",
    "hub": "checkpoints and datasets of the Hugging Face hub",
    "tables": "Parquet",
    "tensorboard": "curves of training runs",
}


def examine() -> dict[str, Any]:
    packages = {name: _version(name) for name in _core_packages()}
    problems = [
        f"{name} is not installed. Get it with: pip install {name}" for name, found in packages.items() if not found
    ]
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
    return {
        "device": {"value": device.value, "reason": device.reason},
        "precision": {"value": precision.value, "reason": precision.reason},
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "compiler": "found" if _has_compiler() else "none: torch.compile needs a C++ compiler on a CPU",
    }


def _has_compiler() -> bool:
    from shutil import which

    return any(which(name) for name in ("c++", "g++", "clang++", "cl")) and find_spec("torch._inductor") is not None


def _core_packages() -> list[str]:
    """The names that the installed package itself requires."""
    names = []
    for line in requires("vitral") or ():
        if "extra ==" not in line:
            names.append(line.split(";")[0].split("[")[0].rstrip("0123456789.,<>=!~ ").strip())
    return names


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _missing(extra: str) -> list[str]:
    """Packages of an extra that are not here."""
    found = (re.match(rf"([\w-]+).*extra == ['\"]{extra}['\"]", line) for line in requires("vitral") or ())
    return [match[1] for match in found if match and not _version(match[1])]
