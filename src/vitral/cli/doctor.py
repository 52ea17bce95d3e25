"""`vitral doctor`: check the installation."""

import os
import platform
import re
import sys
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from shutil import which
from typing import Annotated, Any

from vitral import __version__, cache
from vitral.cli.parameters import Device, Format, Switch, option
from vitral.console.output import show_as
from vitral.console.tables import show_findings


def doctor(
    *,
    check: Annotated[
        Switch, option("Test this machine for about a minute: train, kill, resume, predict, export.")
    ] = False,
    device: Annotated[Device | None, option("Device to test with --check, such as cuda:1.", "DEVICE")] = None,
    clear_cache: Annotated[Switch, option("Delete everything that vitral keeps in its cache.")] = False,
    format: Annotated[Format, option("human, json or quiet (problems only).")] = "human",
) -> None:
    """Check the installation: device, versions, cache, and what is missing.

    Exits with code 1 if a required package is missing, or if a test of --check fails. The tests need no network and
    leave nothing behind.

    Examples
    --------
    vitral doctor
    vitral doctor --check
    vitral doctor --clear-cache
    vitral doctor --format json
    """
    removed = {kind: asdict(size) for kind, size in cache.clear().items()} if clear_cache else None
    findings = examine()
    if removed is not None:
        findings["cache"]["removed"] = removed
    if check:
        findings["checks"] = run_self_test(device or "auto", is_shown=format == "human")
        failed = [row for row in findings["checks"] if row["result"] == "fails"]
        findings["problems"] += [f"{row['name']}: {row['detail']}" for row in failed]
    is_quiet = format == "quiet"
    show = partial(show_findings, findings, problems_only=is_quiet)
    show_as("human" if is_quiet else format, json=findings, human=show)
    if findings["problems"]:
        sys.exit(1)


def run_self_test(device: str, *, is_shown: bool) -> list[dict[str, Any]]:
    """Return the results of the self-test, and name each on standard error as it ends."""
    from vitral.devices import choose_device
    from vitral.self_test import run_checks

    rows = []
    for result in run_checks(choose_device(device).value):
        if is_shown:
            print(f"{result.name}: {result.result} ({result.seconds:.1f} s)", file=sys.stderr)
        rows.append(result.as_dict())
    return rows


EXTRAS = {
    "fast": "fast JPEG decoding, export to ONNX",
    "serve": "the web page and the API",
    "remote": "shards on object stores and web servers",
    "hub": "checkpoints and datasets from the Hugging Face hub",
    "photos": "HEIC photos",
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
        "cache": examine_cache(),
        "problems": problems,
    }
    if packages.get("torch"):
        findings |= _examine_torch()
    return findings


def examine_cache() -> dict[str, Any]:
    """Return the folders of the cache, its size per kind of entry, and its size limit."""
    try:
        folder = str(cache.cache_folder())
    except RuntimeError:  # a user without a home folder
        folder = None
    kinds = cache.usage()
    return {
        "folder": folder,
        "bytes": sum(size.bytes for size in kinds.values()),
        "limit": cache.cache_limit(),
        "kinds": {kind: asdict(size) for kind, size in kinds.items()},
        "downloads": _hub_folder(),
    }


def _hub_folder() -> str | None:
    """Return where huggingface_hub keeps downloads, which other programs share, or None if it is not installed."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return None
    return HF_HUB_CACHE


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
