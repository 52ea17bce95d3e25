"""Time training steps in float32 and in bfloat16 for networks of several widths: from which width does it pay?

    python -m benchmarks.train_precision          # three minutes on 2 cores

Networks of six blocks, in a process that keeps freed memory as `vitral train` does. Both precisions take turns; the
table has the fastest of ten turns each. The smallest width that gains is `vitral.training.auto.MIN_BFLOAT16_WIDTH`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import vitral
from benchmarks.timing import describe_machine, fastest_turns
from vitral.devices import keep_freed_memory
from vitral.training.config import ResolvedOptim
from vitral.training.mixing import soft_loss, soft_targets
from vitral.training.optimizer import Optimizer

PATCH, HEAD, CLASSES = 4, 32, 10
PRECISIONS = ("float32", "bfloat16")
CASES = [(width, grid, batch) for grid, batch in ((4, 128), (7, 128), (14, 32)) for width in (64, 96, 128, 192, 256)]


def make_step(width: int, images: Tensor, labels: Tensor, precision: str) -> Callable[[], None]:
    """Return a training step of a new network."""
    sizes: dict[str, int] = dict(width=width, depth=6, heads=width // HEAD, mlp_width=4 * width, patch_size=PATCH)
    model = vitral.create("vit-ti16", image_size=images.shape[-1], num_classes=CLASSES, **sizes).train()
    optimizer = Optimizer(model, ResolvedOptim(name="adamw", lr=1e-4, layer_decay=1.0))
    targets, parameters = soft_targets(labels, CLASSES, 0.0), list(model.parameters())

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            logits = model(images)
        soft_loss(logits.float(), targets, "softmax", None).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step(1.0)
        optimizer.zero_grad()

    return step


def main() -> None:
    keep_freed_memory()
    print(describe_machine())
    print("| width | patches | batch | float32, ms | bfloat16, ms | gain |\n|---|---|---|---|---|---|")
    for width, grid, batch in CASES:
        images, labels = torch.randn(batch, 3, grid * PATCH, grid * PATCH), torch.randint(CLASSES, (batch,))
        steps = {precision: make_step(width, images, labels, precision) for precision in PRECISIONS}
        fastest_turns(steps, rounds=2)
        full, lower = fastest_turns(steps, rounds=10).values()
        row = f"| {width} | {grid**2} | {batch} | {full * 1e3:.0f} | {lower * 1e3:.0f} | {full / lower:.2f} x |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
