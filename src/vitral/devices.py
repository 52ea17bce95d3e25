"""Where to compute and in which precision: each choice with the reason for it."""

import re
from contextlib import suppress
from dataclasses import dataclass

from vitral.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass(frozen=True, slots=True)
class Choice:
    """Something that was decided, and why."""

    value: str
    reason: str


def device_name(wanted: str) -> str:
    """Checked as a word, whether it is here or not; there is one cpu and one mps, so their :0 goes."""
    found = re.fullmatch(r"(auto)|(cpu|mps)(?::0)?|(cuda(?::[0-9]{1,3})?)", str(wanted))
    if not found:
        raise ConfigError(f"device={wanted!r} must be one of {', '.join(DEVICES)}, or such as 'cuda:1'.")
    return next(filter(None, found.groups()))


def choose_device(wanted: str = "auto") -> Choice:
    """The device to compute on; ConfigError when the wanted one is not here."""
    import torch

    wanted = device_name(wanted)
    kind, _, number = wanted.partition(":")
    if kind == "cpu":
        return Choice("cpu", "asked for")
    usable = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if kind != "auto":
        if not usable[kind]:
            raise ConfigError(
                f"device={wanted!r} is not usable: this torch ({torch.__version__}) finds no such device.",
                hint="Use device='cpu', or install a build of torch for it.",
            )
        if int(number or 0) >= (count := torch.cuda.device_count() if kind == "cuda" else 1):
            raise ConfigError(f"device={wanted!r} is not here: there are {count}, counted from 0.")
        return Choice(wanted, "asked for")
    if usable["cuda"]:
        return Choice("cuda", f"a GPU is there: {torch.cuda.get_device_name()}")
    if usable["mps"]:
        return Choice("mps", "an Apple GPU is there")
    return Choice("cpu", f"no GPU that this torch ({torch.__version__}) can use")


def choose_precision(device: str) -> Choice:
    """bfloat16 where the hardware multiplies it natively, else float32."""
    import torch

    device = device.partition(":")[0]
    if device == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return Choice("bfloat16", "native on this GPU") if native else Choice("float32", "no native bfloat16 here")
    if device == "mps":
        return Choice("float32", "bfloat16 brings little on Apple GPUs")
    if _cpu_has_bfloat16():
        return Choice("bfloat16", "native on this CPU")
    return Choice("float32", "this CPU has no native bfloat16")


def _cpu_has_bfloat16() -> bool:
    import torch

    describe = getattr(torch.cpu, "get_capabilities", dict)  # newer releases of torch tell
    return any(present for name, present in describe().items() if name in ("avx512_bf16", "amx_bf16", "bf16"))


def keep_freed_memory() -> bool:
    """Lets this process keep what it frees, up to 1 GiB, instead of giving it back to Linux: every step of a network
    asks for the same large tensors again, and fresh pages cost up to a tenth of its time. Whether it could be done."""
    import ctypes
    import sys

    if not sys.platform.startswith("linux"):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt  # glibc's; others have none
    except (OSError, AttributeError):
        return False
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    options = ((mmap_threshold, 2**30), (trim_threshold, 2**30), (top_pad, 2**26))
    done = [set_option(name, value) for name, value in options]
    return all(done)


def give_back_holes() -> None:
    """What is free between tensors goes back to Linux, where ``keep_freed_memory`` kept it. Tensors of many lifetimes
    leave more and more holes that the next one does not fit into: in a thousand steps of 256 tokens they were 7 GB."""
    import ctypes
    import sys

    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):  # glibc's; others have none
            ctypes.CDLL(None).malloc_trim(0)
