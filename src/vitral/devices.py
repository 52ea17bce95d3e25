"""Choose the device and the precision, each with the reason for the choice, and find the processes of a command."""

import ctypes
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from vitral.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda", "mps")
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable in which torchrun counts how often it has restarted the processes of this machine."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A value that was chosen, and the reason."""

    value: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The processes that run one command together, and the place of this one among them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """The rank among the processes of this machine."""
    local_size: int = 1
    """Number of processes on this machine."""
    launch: str = ""
    """Identifies the command over all restarts of its processes."""
    restarts: int = 0
    """How often the launcher has restarted the processes."""
    reason: str = "started without a launcher"

    @property
    def is_first(self) -> bool:
        """Return whether this process writes files and prints."""
        return self.rank == 0

    def backend(self, *, has_cuda: bool) -> str:
        """Return the backends of torch.distributed: gloo for tensors on the CPU, NCCL for those on a GPU."""
        return "cpu:gloo,cuda:nccl" if has_cuda else "gloo"


def find_world(environment: Mapping[str, str] | None = None) -> World:
    """Return the world that torchrun describes in the environment; raise ConfigError for a static rendezvous.

    After a static rendezvous, restarted processes would connect to the addresses of the dead ones.
    """
    values = os.environ if environment is None else environment
    if values.get("WORLD_SIZE", "1") == "1" or "RANK" not in values:
        return World()
    rank, size, local_rank = (int(values.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_size = int(values.get("LOCAL_WORLD_SIZE", "1"))
    run_id = values.get("TORCHELASTIC_RUN_ID", "none")
    if run_id == "none":
        raise ConfigError(
            f"WORLD_SIZE={size} comes from a static rendezvous, or from one without an id; "
            "a lost process could not be replaced.",
            hint="Use torchrun --standalone, or --rdzv-backend c10d with --rdzv-endpoint and --rdzv-id.",
        )
    restarts = sum(int(values.get(name, "0")) for name in (RESTART_COUNT, "VITRAL_RESTARTS"))
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        launch=run_id,
        restarts=restarts,
        reason=f"torchrun, rendezvous {run_id}",
    )


def normalize_device(device: str) -> str:
    """Return the device's name without a redundant ":0"; raise ConfigError if torch has no such kind of device."""
    match = re.fullmatch(r"(auto)|(cpu|mps)(?::0)?|(cuda(?::[0-9]{1,3})?)", str(device))
    if not match:
        raise ConfigError(f"device must be one of {', '.join(DEVICES)}, or cuda:1 and so on (got {device!r}).")
    return next(filter(None, match.groups()))


def choose_device(device: str = "auto") -> Choice:
    """Return the device to run on; raise ConfigError if the requested one is not available."""
    import torch

    device = normalize_device(device)
    if device == "cpu":
        return Choice("cpu", "requested")
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device == "auto":
        if available["cuda"]:
            return Choice("cuda", f"found a GPU: {torch.cuda.get_device_name()}")
        if available["mps"]:
            return Choice("mps", "found an Apple GPU")
        return Choice("cpu", f"torch {torch.__version__} found no GPU")
    kind, _, number = device.partition(":")
    if not available[kind]:
        hint = "Use device='cpu', or install a build of torch for this device."
        raise ConfigError(f"device={device!r} is not available: torch {torch.__version__} found none.", hint=hint)
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if int(number or 0) >= count:
        raise ConfigError(f"device={device!r} does not exist (expected a number from 0 to {count - 1}).")
    return Choice(device, "requested")


def find_memory(device: str, world: World) -> int | None:
    """Return the bytes of memory for one process: of its GPU, or its share of the machine's. None if unknown."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    if device == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world.local_size
    return None


def choose_precision(device: str) -> Choice:
    """Return bfloat16 if the hardware multiplies it natively, else float32."""
    import torch

    kind = device.partition(":")[0]
    if kind == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return Choice("bfloat16", "native on this GPU") if native else Choice("float32", "no bfloat16 on this GPU")
    if kind == "mps":
        return Choice("float32", "bfloat16 is hardly faster on Apple GPUs")
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # missing in older releases of torch
    if any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")):
        return Choice("bfloat16", "native on this CPU")
    return Choice("float32", "no native bfloat16 on this CPU")


def available_cores() -> int:
    """Return the number of cores that this process may use, or OMP_NUM_THREADS if it is set."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, int(limit)) if limit.isdigit() and int(limit) else cores


def keep_freed_memory(*, below: int = 2**30) -> bool:
    """Let this process keep up to 1 GiB of freed memory. Return whether the platform supports it.

    Every training step allocates the same large tensors again, and new pages from Linux cost up to a tenth of its time.
    Tensors of `below` bytes or more return to the system at once, and leave no holes.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt  # glibc only
    except (OSError, AttributeError):
        return False
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    options = ((mmap_threshold, below), (trim_threshold, max(below, 2**26)), (top_pad, 2**26))
    results = [set_option(name, value) for name, value in options]
    return all(results)


def release_freed_memory() -> None:
    """Return the memory that `keep_freed_memory` keeps to Linux.

    Tensors of different lifetimes leave holes that no later tensor fits: 7 GB after a thousand steps of 256 tokens.
    """
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):  # glibc only
            ctypes.CDLL(None).malloc_trim(0)
