"""Measure the peak memory and the traffic of training steps, and compare both with what `vitral plan` computes.

    python -m benchmarks.memory --save          # about seven minutes on 2 cores
    python -m benchmarks.memory --models vit-l16

Each case runs in processes of its own: one, or two that exchange gradients (ddp) or shards (fsdp) over gloo. The peak
is the resident memory that Linux reports, less that of a process which has trained a tiny network. The traffic is
what the kernel has counted on the TCP sockets of a process.
"""

import argparse
import json
import os
import re
import socket
import struct
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.timing import describe_machine, save
from vitral.collectives import join_world, sum_gradients
from vitral.model.config import ViTConfig
from vitral.model.network import Network, build
from vitral.model.recording import record_attention
from vitral.model.sizes import named_config
from vitral.scaling.communication import bytes_per_step
from vitral.scaling.memory import Setup, estimate_memory

STEPS, TIMEOUT = 2, 300
KEY = ("model", "batch", "image_size", "parallel", "checkpointing", "attention", "precision")
SMALL_TENSORS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Environment in which freed tensors return to the system at once, so that resident memory is what tensors need."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training step to measure."""

    model: str
    batch: int
    """Images per process."""
    image_size: int = 224
    parallel: str = "none"
    checkpointing: bool = False
    attention: str = "fused"
    precision: str = "float32"

    @property
    def processes(self) -> int:
        return 1 if self.parallel == "none" else 2

    @property
    def config(self) -> ViTConfig:
        axial = {"attention": "axial"} if self.attention == "axial" else {}
        config = named_config(self.model, image_size=self.image_size, num_classes=100, **axial)
        assert isinstance(config, ViTConfig)
        return config

    @property
    def setup(self) -> Setup:
        return Setup(
            parallel=self.parallel,  # type: ignore[arg-type]
            devices=self.processes,
            precision=self.precision,  # type: ignore[arg-type]
            checkpointing=self.checkpointing,
            recorded=self.attention == "recorded",
        )


CASES = [
    Case(model="vit-s16", batch=8),
    Case(model="vit-s16", batch=32),
    Case(model="vit-s16", batch=32, checkpointing=True),
    Case(model="vit-s16", batch=16, attention="recorded"),
    Case(model="vit-s16", batch=8, attention="axial"),
    Case(model="vit-s16", batch=16, precision="bfloat16"),
    Case(model="vit-b16", batch=4),
    Case(model="vit-b16", batch=16, checkpointing=True),
    Case(model="vit-l16", batch=2),
    Case(model="vit-s16", batch=8, parallel="ddp"),
    Case(model="vit-b16", batch=4, parallel="ddp"),
    Case(model="vit-s16", batch=8, parallel="fsdp"),
    Case(model="vit-b16", batch=4, parallel="fsdp"),
    Case(model="vit-b16", batch=4, parallel="fsdp", checkpointing=True),
    Case(model="vit-l16", batch=1, parallel="fsdp", checkpointing=True),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", default=sorted({case.model for case in CASES}))
    parser.add_argument("--parallel", nargs="+", default=["none", "ddp", "fsdp"])
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    if options.worker:
        return work(Case(**json.loads(options.worker)))
    print("| model | batch | setting | measured | planned | error | sent | planned |")
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        if case.model in options.models and case.parallel in options.parallel:
            row = measure(case)
            print(format_row(row), flush=True)
            if options.save:
                save("memory", describe_machine(), [row], key=KEY)
    return None


def format_row(row: dict[str, Any]) -> str:
    names = ("measured_bytes", "planned_bytes", "sent_bytes", "planned_sent")
    measured, planned, *sent = (f"{row[name] / 1e6:,.0f} MB" for name in names)
    setting = [row["parallel"], row["attention"], row["precision"], *["checkpointing"] * row["checkpointing"]]
    error = f"{row['planned_bytes'] / row['measured_bytes'] - 1:+.1%}"
    cells = (row["model"], str(row["batch"]), ", ".join(setting), measured, planned, error, *sent)
    return f"| {' | '.join(cells)} |"


def measure(case: Case) -> dict[str, Any]:
    """Run a case and return the largest peak and the mean traffic of its processes, beside those that are planned."""
    words = ["-m", "benchmarks.memory", "--worker", json.dumps(asdict(case))]
    if case.processes > 1:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.processes), *words]
    environment = os.environ | SMALL_TENSORS | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        raise RuntimeError(done.stderr)
    ranks = [json.loads(text) for text in re.findall("{.*?}", done.stdout)]  # both may be on one line
    memory = estimate_memory(case.config, case.setup, case.batch)
    return asdict(case) | {
        "measured_bytes": max(rank["peak"] for rank in ranks),
        "planned_bytes": memory.peak,
        "sent_bytes": sum(rank["sent"] for rank in ranks) // len(ranks),
        "planned_sent": bytes_per_step(case.config, case.setup, backend="gloo").sent,
    }


# ---- inside a process ----


def work(case: Case) -> None:
    """Train for a few steps and print the peak of memory, and the bytes sent per step."""
    join_world()
    warm_up = Case(model="vit-pico7", batch=2, image_size=28, parallel=case.parallel, precision=case.precision)
    step, network = prepare(warm_up)
    step()
    step()
    before = resident_bytes()
    step, network = prepare(case)
    step()
    sent, start = 0, sent_bytes()
    for _ in range(STEPS):
        step()
    sent = sent_bytes() - start
    result = {"peak": peak_bytes() - before, "sent": sent // STEPS}
    del network
    print(json.dumps(result), flush=True)


def prepare(case: Case) -> tuple[Any, Network]:
    """Return a function that takes a training step, and the network."""
    torch.manual_seed(0)
    network = build(case.config).train()
    network.gradient_checkpointing = case.checkpointing
    if case.parallel == "fsdp":
        shard(network)
    # Our optimizer groups the parameters, which changes no memory.
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    images = torch.randn(case.batch, 3, *case.config.image_hw)
    labels = torch.randint(0, 100, (case.batch,))
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bfloat16")
    parameters = list(network.parameters())

    def step() -> None:
        recording = record_attention(network) if case.attention == "recorded" else nullcontext()
        with autocast, recording as maps:
            loss = nn.functional.cross_entropy(network(images), labels)
        loss.backward()
        del maps
        if case.parallel == "ddp":
            sum_gradients(parameters)
        optimizer.step()
        optimizer.zero_grad()

    return step, network


def shard(network: Network) -> None:
    """Shard the network block by block, as `vitral train --parallel fsdp` does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in network.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)


def resident_bytes() -> int:
    """Return the resident memory, and let the peak start from it."""
    Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def sent_bytes() -> int:
    """Return the bytes that this process has sent over TCP, from the counters of the kernel (struct tcp_info)."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
        except OSError:  # a closed file, or a socket of another kind
            continue
        total += struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent
    return total


if __name__ == "__main__":
    main()
