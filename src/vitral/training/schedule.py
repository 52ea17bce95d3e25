"""How the learning rate goes: a factor of its peak for every step."""

from math import cos, pi, sqrt

from vitral.training.config import Optim


def factor(optim: Optim, step: int, steps: int, warmup: int) -> float:
    """Step 0 is the first. After the warm-up, progress is counted from its end, as in the paper's code."""
    if step < warmup:
        return step / warmup
    rest = max(1, steps - warmup)
    progress = min(1.0, (step - warmup) / rest)
    end = optim.end_lr / optim.lr if isinstance(optim.lr, float | int) and optim.lr else 0.0
    match optim.schedule:
        case "cosine":
            return end + (1 - end) * 0.5 * (1 + cos(pi * progress))
        case "linear":
            return end + (1 - end) * (1 - progress)
        case "rsqrt":
            return sqrt(max(1, warmup) / max(1, warmup, step))
        case "stair":
            return 0.1 ** sum(step >= part * steps for part in optim.stairs)
        case _:
            return 1.0
