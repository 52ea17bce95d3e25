"""One step of training (forward, backward, clip, AdamW): ours beside timm's model with torch's AdamW.

    python -m benchmarks.train_step --save          # about five minutes on 2 cores

The same network, weights, batch and threads. "plain" is our float32 eager step; "default" is what ``vitral train``
does on this machine. Candidates take turns; the ratio of the fastest turns counts, the median of several runs
is reported.
"""

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import vitral
from benchmarks.peers import in_timm, randomise
from benchmarks.timing import describe_machine, fastest_turns, save
from vitral.devices import choose_precision
from vitral.train.config import Optim
from vitral.train.mixing import as_targets, soft_loss
from vitral.train.optim import Optimiser

CASES = [("vit-s16", 8), ("vit-ti16", 16), ("vit-nano4", 128), ("vit-pico7", 128)]


def our_step(model: vitral.ViT, images: Tensor, labels: Tensor, precision: str) -> Callable[[], None]:
    optimiser = Optimiser(model, Optim(name="adamw", lr=1e-4), peak=1e-4)
    targets = as_targets(labels, model.config.num_classes, 0.0)
    parameters = list(model.parameters())

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            logits = model(images)
        soft_loss(logits, targets, "softmax", None).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step(1.0)
        optimiser.zero_grad()

    return step


def timm_step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    from timm.optim._optim_factory import create_optimizer_v2

    optimiser = create_optimizer_v2(model, opt="adamw", lr=1e-4, weight_decay=0.05)

    def step() -> None:
        nn.functional.cross_entropy(model(images), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()

    return step


def measure(name: str, batch: int, runs: int, seconds: float) -> dict[str, Any]:
    model = randomise(vitral.create(name, activation="gelu", num_classes=100)).train()
    assert isinstance(model, vitral.ViT)
    peer = in_timm(model).train()
    images, labels = torch.randn(batch, 3, *model.config.image_hw), torch.randint(0, 100, (batch,))
    with torch.no_grad():
        torch.testing.assert_close(model(images), peer(images), atol=1e-3, rtol=1e-3)
    precision = choose_precision("cpu").value
    turns = {"timm": timm_step(peer, images, labels), "plain": our_step(model, images, labels, "float32")}
    if precision != "float32":
        turns["default"] = our_step(model, images, labels, precision)
    once = fastest_turns(turns, rounds=1)
    rounds = max(2, min(60, round(seconds / once["timm"])))
    times = [fastest_turns(turns, rounds, seed=run) for run in range(runs)]
    ratios = {kind: median(run["timm"] / run[kind] for run in times) for kind in turns if kind != "timm"}
    milliseconds = min(run["plain"] for run in times) * 1e3
    return {"model": name, "batch": batch, "milliseconds": milliseconds, "ratio": ratios, "default": precision}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--turn-seconds", type=float, default=5.0)
    parser.add_argument("--save", action="store_true", help="write a dated JSON into benchmarks/results")
    options = parser.parse_args()
    rows = [measure(name, batch, options.runs, options.turn_seconds) for name, batch in CASES]
    print("| model | batch | ours, ms | float32, by timm's time | default |\n|---|---|---|---|---|")
    for row in rows:
        default = row["ratio"].get("default", row["ratio"]["plain"])
        print(
            f"| {row['model']} | {row['batch']} | {row['milliseconds']:.0f} | {row['ratio']['plain']:.2f} x | "
            f"{default:.2f} x ({row['default']}) |"
        )
    if options.save:
        save("train_step", describe_machine("timm"), rows)


if __name__ == "__main__":
    main()
