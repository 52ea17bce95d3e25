"""Fingerprints of a model's weights and of this machine, under which measurements are cached."""

import hashlib
import os
import platform
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimddp", "bf16")


def weights_digest(tensors: Mapping[str, Tensor]) -> "hashlib._Hash":  # pyright: ignore[reportPrivateUsage]
    """Return a digest of names and values."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest


@cache
def describe_cpu() -> dict[str, object]:
    """Return the name of the CPU, its cores, and the instructions that decide which precision is fast."""
    text = ""
    if (info := Path("/proc/cpuinfo")).is_file():
        text = info.read_text(errors="replace")
    name = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    flags = set(match[1].split() if match else ())
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # missing in older releases of torch
    flags |= {flag for flag, has in capabilities.items() if has is True}
    return {
        "cpu": name[1].strip() if name else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "instructions": sorted(flags.intersection(_FEATURES)),
    }


def machine_facts() -> dict[str, object]:
    """Return what the speed and the outputs of an engine depend on, besides the model."""
    return {**describe_cpu(), "threads": torch.get_num_threads(), "versions": package_versions()}


def package_versions() -> dict[str, str | None]:
    """Return the versions of torch and of the installed runtimes."""
    versions: dict[str, str | None] = {}
    for package in ("torch", "onnxruntime", "openvino", "nncf"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions
