"""Measure weak and strong scaling of training: one process, then two that exchange gradients over gloo.

    OMP_NUM_THREADS=1 python -m benchmarks.scaling --save          # about seven minutes on 2 cores

Weak scaling keeps the batch of each process, strong scaling that of a step. Each process uses one thread, so that two
processes have twice the cores of one. Candidates take turns, each in processes of its own, and the fastest turn counts.
The last column is what `vitral.scaling` predicts from the measured speed of one process and the measured bandwidth.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.timing import describe_machine, save
from vitral.collectives import join_world, sum_gradients
from vitral.model.config import ViTConfig
from vitral.model.network import build
from vitral.model.sizes import named_config
from vitral.scaling.hardware import Assumptions, Device
from vitral.scaling.memory import Setup
from vitral.scaling.simulation import predict

CASES = [("vit-ti16", 8), ("vit-s16", 4), ("vit-s16", 16)]
STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "BATCH"), help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    if options.worker:
        return work(options.worker[0], int(options.worker[1]))
    print("| model | batch | kind | 1 process, images/s | 2 processes | efficiency | predicted |")
    print("|---|---|---|---|---|---|---|")
    for model, batch in CASES:
        rows = measure(model, batch, options.turns)
        for row in rows:
            print(
                f"| {model} | {batch} | {row['kind']} | {row['one']:.1f} | {row['two']:.1f} | "
                f"{100 * row['efficiency']:.0f}% | {100 * row['predicted']:.0f}% |",
                flush=True,
            )
        if options.save:
            save("scaling", describe_machine(), rows, key=("model", "batch", "kind"))
    return None


def measure(model: str, batch: int, turns: int) -> list[dict[str, Any]]:
    """Return a row for weak and one for strong scaling."""
    candidates: dict[str, Callable[[], dict[str, float]]] = {
        "one": lambda: run(model, batch, 1),
        "weak": lambda: run(model, batch, 2),
        "strong": lambda: run(model, batch // 2, 2),
    }
    best: dict[str, dict[str, float]] = {}
    order, shuffle = list(candidates), random.Random(0)
    for _ in range(turns):
        shuffle.shuffle(order)
        for name in order:
            result = candidates[name]()
            if name not in best or result["step"] < best[name]["step"]:
                best[name] = result
    one = batch / best["one"]["step"]
    rows = []
    for kind, each in (("weak", batch), ("strong", batch // 2)):
        two = 2 * each / best[kind]["step"]
        predicted = predicted_efficiency(model, each, one, best[kind]["bandwidth"])
        row = {"model": model, "batch": batch, "kind": kind, "one": one, "two": two}
        rows.append(row | {"efficiency": two / (2 * one), "predicted": predicted, **best[kind]})
    return rows


def predicted_efficiency(model: str, batch: int, speed: float, bandwidth: float) -> float:
    """Return the efficiency of two processes, from the speed of one and the bandwidth between them."""
    link = Device(flops=1.0, gibibytes=1, inside=bandwidth, outside=bandwidth)
    assumed = Assumptions(link_efficiency=1.0)
    setup = Setup(parallel="ddp", devices=2)
    return predict(config_of(model), setup, link, batch, assumed, images_per_second=speed).efficiency


def config_of(model: str) -> ViTConfig:
    config = named_config(model, num_classes=100)
    assert isinstance(config, ViTConfig)
    return config


def run(model: str, batch: int, processes: int) -> dict[str, float]:
    """Train for a few steps in new processes and return the seconds of a step, and the bandwidth between them."""
    words = ["-m", "benchmarks.scaling", "--worker", model, str(batch)]
    if processes > 1:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr)
    ranks = [json.loads(text) for text in re.findall("{.*?}", done.stdout)]
    return {"step": max(rank["step"] for rank in ranks), "bandwidth": ranks[0]["bandwidth"]}


# ---- inside a process ----


def work(model: str, batch: int) -> None:
    world = join_world()
    torch.manual_seed(0)
    config = config_of(model)
    network = build(config).train()
    parameters = list(network.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    images, labels = torch.randn(batch, 3, *config.image_hw), torch.randint(0, 100, (batch,))

    def step() -> None:
        nn.functional.cross_entropy(network(images), labels).backward()
        sum_gradients(parameters)
        optimizer.step()
        optimizer.zero_grad()

    step()
    times = [timed(step) for _ in range(STEPS)]
    bandwidth = measure_bandwidth(parameters) if world.size > 1 else 0.0
    print(json.dumps({"step": min(times), "bandwidth": bandwidth}), flush=True)


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure_bandwidth(parameters: list[nn.Parameter]) -> float:
    """Return the bytes per second that a process sends in an all-reduce of the size of the gradients."""
    tensor = torch.zeros(sum(parameter.numel() for parameter in parameters))
    dist.all_reduce(tensor)
    seconds = min(timed(lambda: dist.all_reduce(tensor)) for _ in range(STEPS))
    return tensor.numel() * 4 / seconds  # two processes send half of the sums, and receive and send the other half


if __name__ == "__main__":
    main()
