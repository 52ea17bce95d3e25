"""Time one training step (forward, backward, clip, AdamW): vitral, and timm's model with torch's AdamW.

    python -m benchmarks.train_step --save                        # about ten minutes on 2 cores
    python -m benchmarks.train_step --models vit-pico7 --save

All candidates have the same network, weights, batch and threads. "plain" is our eager float32 step. "default" is the
step of ``vitral train`` on a CPU: it keeps freed memory, and computes in bfloat16 where the CPU has the instructions
and the network is wide enough, else with oneDNN if that is measured to be faster. "compiled" is torch.compile without
oneDNN. Memory is a setting of a whole process, so each candidate has its own. They take turns, and only one computes at
a time. The table shows the median over several runs of the ratio of the fastest turns, and for "compiled" also that of
a whole run of 200 steps, whose first step compiles. "A/A" is timm against itself.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from random import Random
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import vitral
from benchmarks.peers import in_timm, randomize
from benchmarks.timing import describe_machine, fastest_turns, save
from vitral.devices import keep_freed_memory
from vitral.inference.engines.compiled import find_compiler
from vitral.model.sizes import named_config
from vitral.training.auto import training_precision
from vitral.training.config import ResolvedOptim
from vitral.training.kernels import MIN_GAIN
from vitral.training.mixing import soft_loss, soft_targets
from vitral.training.optimizer import Optimizer
from vitral.training.products import OneDnnProducts

Kernels = AbstractContextManager[object]
BATCHES = {"vit-s16": 8, "vit-ti16": 16, "vit-nano4": 128, "vit-pico7": 128}
CANDIDATES = ("timm", "timm (A/A)", "plain", "default", *(("compiled",) if find_compiler() else ()))
RUN = 200
"""Steps of a run that pays for compiling."""


def vitral_step(
    model: vitral.ViT, images: Tensor, labels: Tensor, who: str, kernels: Callable[[], Kernels] = nullcontext
) -> Callable[[], float]:
    optimizer = Optimizer(model, ResolvedOptim(name="adamw", lr=1e-4, layer_decay=1.0))
    targets = soft_targets(labels, model.config.num_classes, 0.0)
    parameters = list(model.parameters())
    precision = "float32" if who == "plain" else training_precision("cpu", model.config)[0]
    network: Callable[[Tensor], Tensor] = torch.compile(model) if who == "compiled" else model

    def step() -> float:
        with kernels(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            logits = network(images)
        loss = soft_loss(logits.float(), targets, "softmax", None)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step(1.0)
        optimizer.zero_grad()
        return loss.item()

    return step


def timm_step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], float]:
    from timm.optim._optim_factory import create_optimizer_v2

    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-4, weight_decay=0.05)

    def step() -> float:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def work(who: str, name: str, batch: int) -> None:
    """Run a candidate: print its first loss and seconds, then take a turn and print its seconds per line of input."""
    if who in ("default", "compiled"):
        keep_freed_memory()
    torch.manual_seed(0)
    model = randomize(vitral.create(name, activation="gelu", num_classes=100)).train()
    assert isinstance(model, vitral.ViT)
    images, labels = torch.randn(batch, 3, *model.config.image_hw), torch.randint(0, 100, (batch,))
    is_timm = who.startswith("timm")
    step = timm_step(in_timm(model).train(), images, labels) if is_timm else vitral_step(model, images, labels, who)
    start = time.perf_counter()
    print(step(), flush=True)
    seconds = time.perf_counter() - start
    step()
    if who == "default" and training_precision("cpu", model.config)[0] == "float32":
        step = choose_products(step, vitral_step(model, images, labels, who, OneDnnProducts))
    print(seconds, flush=True)  # only now does the next candidate start
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        print(time.perf_counter() - start, flush=True)


def choose_products(step: Callable[[], float], other: Callable[[], float]) -> Callable[[], float]:
    """Return the other step if it is faster, as `vitral train` measures before the first step of a long run."""
    times = fastest_turns({"torch": step, "onednn": other}, rounds=5)
    return other if times["onednn"] * MIN_GAIN <= times["torch"] else step


class Candidate:
    """A candidate in a process of its own."""

    def __init__(self, who: str, name: str, batch: int):
        command = [sys.executable, "-m", "benchmarks.train_step", "--worker", who, name, str(batch)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.first_loss, self.first_seconds = self.read(), self.read()

    def read(self) -> float:
        assert self.process.stdout is not None
        return float(self.process.stdout.readline())

    def turn(self) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(name: str, batch: int, runs: int, seconds: float) -> dict[str, Any]:
    candidates = {who: Candidate(who, name, batch) for who in CANDIDATES}
    losses = [candidate.first_loss for candidate in candidates.values()]
    precision, _ = training_precision("cpu", named_config(name))
    assert max(losses) - min(losses) < (1e-3 if precision == "float32" else 0.1), losses
    rounds = max(2, min(60, round(seconds / candidates["timm"].turn())))
    times, order, shuffle = [], list(CANDIDATES), Random(0)
    for _ in range(runs):
        best = dict.fromkeys(CANDIDATES, float("inf"))
        for _ in range(rounds):
            shuffle.shuffle(order)
            for who in order:
                best[who] = min(best[who], candidates[who].turn())
        times.append(best)
    for candidate in candidates.values():
        candidate.end()
    ratios = {who: median(run["timm"] / run[who] for run in times) for who in CANDIDATES if who != "timm"}
    totals = {who: candidates[who].first_seconds + (RUN - 1) * median(run[who] for run in times) for who in CANDIDATES}
    whole = {who: totals["timm"] / totals[who] for who in ratios}
    milliseconds = {who: min(run[who] for run in times) * 1e3 for who in CANDIDATES}
    first = {who: candidate.first_seconds for who, candidate in candidates.items()}
    row = {"model": name, "batch": batch, "milliseconds": milliseconds, "ratio": ratios}
    return row | {"first_seconds": first, f"ratio_of_{RUN}_steps": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--turn-seconds", type=float, default=3.0)
    parser.add_argument("--worker", nargs=3, metavar=("CANDIDATES", "MODEL", "BATCH"), help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    if options.worker:
        who, name, batch = options.worker
        return work(who, name, int(batch))
    shown = CANDIDATES[1:]
    print(f"| model | batch | timm, ms | {' | '.join(shown)} | {RUN} steps, compiled |\n{'|---' * (len(shown) + 4)}|")
    rows = []
    for name, batch in ((name, BATCHES[name]) for name in options.models):
        row = measure(name, batch, options.runs, options.turn_seconds)
        rows.append(row)
        ratios = " | ".join(f"{row['ratio'][who]:.2f} x" for who in shown)
        whole = row[f"ratio_of_{RUN}_steps"].get("compiled", float("nan"))
        print(f"| {name} | {batch} | {row['milliseconds']['timm']:.0f} | {ratios} | {whole:.2f} x |", flush=True)
    if options.save:
        save("train_step", describe_machine("timm"), rows, key=("model",))
    return None


if __name__ == "__main__":
    main()
