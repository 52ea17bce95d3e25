"""Time the eager float32 network against timm, transformers, torchvision and vit-pytorch.

    python -m benchmarks.forward                    # all cases: about half an hour on 2 cores
    python -m benchmarks.forward --models vit-s16 --batches 1 8 --runs 3

In every run all candidates take turns. The ratio of a peer is the time of its fastest turn divided by ours, so above 1
vitral is faster. The table shows the median over the runs; the peer with the smallest ratio is the fastest peer. "A/A"
is the ratio of our model against itself: the noise of the machine.
Outputs must agree before anything is timed, except for vit-pytorch, which has two more norms.
"matmul" is the time of the bare matrix products of the same shapes, as a fraction of ours.
"""

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import vitral
from benchmarks.peers import in_timm, in_torchvision, in_transformers, in_vit_pytorch, randomize
from benchmarks.timing import describe_machine, fastest_turns, save

PEERS = {
    "timm": in_timm,
    "transformers": in_transformers,
    "torchvision": in_torchvision,
    "vit-pytorch": in_vit_pytorch,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit-s16", "vit-b16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--passes", nargs="+", choices=["forward", "both"], default=["forward", "both"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--turn-seconds", type=float, default=4.0, help="seconds for all turns of a candidate in a run")
    parser.add_argument("--save", action="store_true", help="write a dated JSON file to benchmarks/results")
    options = parser.parse_args()
    machine = describe_machine("timm", "transformers", "torchvision", "vit-pytorch")
    print(machine, flush=True)
    titles = ["pass", "model", "batch", "ms", "fastest peer", "ratio", "A/A", *PEERS, "matmul"]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}", flush=True)
    rows = []
    for direction in options.passes:
        for name in options.models:
            for batch in options.batches:
                rows.append(measure(name, batch, direction, options.runs, options.turn_seconds))
                print(as_line(rows[-1]), flush=True)
                if options.save:
                    save("forward", machine, rows, key=("pass", "model", "batch"))


def measure(name: str, batch: int, direction: str, runs: int, turn_seconds: float) -> dict[str, Any]:
    model = randomize(vitral.create(name, activation="gelu"))
    assert isinstance(model, vitral.ViT)
    models: dict[str, nn.Module] = {"vitral": model, "again": model}
    models |= {peer: build(model) for peer, build in PEERS.items()}
    images = torch.randn(batch, 3, *model.config.image_hw)
    compare_outputs(models, images)
    step = forward if direction == "forward" else forward_and_backward
    turns: dict[str, Callable[[], Any]] = {peer: bind(step, module, images) for peer, module in models.items()}
    if direction == "forward":
        turns["matmul"] = matrix_products(model, batch)
    once = fastest_turns(turns, rounds=1)  # also warms up
    rounds = max(1, min(80, round(turn_seconds / once["vitral"])))
    times = [fastest_turns(turns, rounds, seed=run) for run in range(runs)]
    ratios = {peer: median(run[peer] / run["vitral"] for run in times) for peer in turns if peer != "vitral"}
    return {
        "pass": direction,
        "model": name,
        "batch": batch,
        "milliseconds": min(run["vitral"] for run in times) * 1e3,
        "fastest_peer": min(PEERS, key=lambda peer: ratios[peer]),
        "ratio": min(ratios[peer] for peer in PEERS),
        "a_a": ratios["again"],
        "peers": {peer: ratios[peer] for peer in PEERS},
        "runs": {peer: [run[peer] / run["vitral"] for run in times] for peer in turns},
        "matmul_share": ratios.get("matmul"),
        "rounds": rounds,
    }


def as_line(row: dict[str, Any]) -> str:
    cells = [row["pass"], row["model"], row["batch"], f"{row['milliseconds']:.1f}", row["fastest_peer"]]
    cells += [f"**{row['ratio']:.3f}**", f"{row['a_a']:.3f}", *(f"{row['peers'][peer]:.3f}" for peer in PEERS)]
    cells.append("" if row["matmul_share"] is None else f"{row['matmul_share']:.0%}")
    return "| " + " | ".join(map(str, cells)) + " |"


@torch.no_grad()
def compare_outputs(models: dict[str, nn.Module], images: Tensor) -> None:
    expected = models["vitral"].eval()(images)
    for peer, module in models.items():
        if peer != "vit-pytorch":
            torch.testing.assert_close(module.eval()(images), expected, atol=1e-4, rtol=1e-4)


def bind(step: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: step(*arguments)


@torch.no_grad()
def forward(model: nn.Module, images: Tensor) -> None:
    model.eval()(images)


def forward_and_backward(model: nn.Module, images: Tensor) -> None:
    model.train()(images).square().mean().backward()
    model.zero_grad(set_to_none=True)


def matrix_products(model: vitral.ViT, batch: int) -> Callable[[], Any]:
    """Return a function that computes only the matrix products of one forward pass."""
    config = model.config
    patches = config.table_grid[0] * config.table_grid[1]
    tokens, width, hidden = batch * (patches + 1), config.width, config.mlp_width
    shapes = [(tokens, width, 3 * width), (tokens, width, width), (tokens, width, hidden), (tokens, hidden, width)]
    linear = [(torch.randn(rows, inputs), torch.randn(inputs, outputs)) for rows, inputs, outputs in shapes]
    query, key = (torch.randn(batch * config.heads, patches + 1, config.head_dim) for _ in range(2))
    weights = torch.rand(batch * config.heads, patches + 1, patches + 1)
    embed = torch.randn(batch * patches, 768), torch.randn(768, width)

    def multiply() -> None:
        torch.mm(*embed)
        for _ in range(config.depth):
            for x, weight in linear:
                torch.mm(x, weight)
            torch.bmm(query, key.transpose(1, 2))
            torch.bmm(weights, key)

    return multiply


if __name__ == "__main__":
    main()
