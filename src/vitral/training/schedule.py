"""The learning rate at every step, and the steps of a stage."""

from dataclasses import dataclass
from math import cos, pi, sqrt

from vitral.training.config import ResolvedOptim


@dataclass(kw_only=True, slots=True)
class Pace:
    """The steps of a stage of training. A time budget may move the last one; the learning rate still reaches its
    end."""

    first: int = 0
    """The step that the stage starts with."""
    planned: int = 0
    """Number of steps that the learning-rate schedule was made for."""
    end: int = 0
    """The step after the last one."""
    moved_at: int = 0
    """The step at which the end was moved last."""
    position: float = 0.0
    """The position of that step in the schedule, in planned steps."""

    @classmethod
    def start(cls, first: int, steps: int) -> "Pace":
        return cls(first=first, planned=steps, end=first + steps, moved_at=first)

    def position_at(self, step: int) -> float:
        """Return where a step lies in the schedule, in planned steps."""
        if self.moved_at == self.first:
            return step - self.first
        return self.position + (self.planned - self.position) * (step - self.moved_at) / (self.end - self.moved_at)

    def move_end(self, step: int, end: int) -> None:
        """Let the stage end earlier or later from this step on."""
        self.position, self.moved_at, self.end = self.position_at(step), step, max(end, step + 1)


def lr_factor(optim: ResolvedOptim, step: float, steps: int, warmup_steps: int) -> float:
    """Return the factor of the peak learning rate at a step, the first being 0, as in the paper's code."""
    if step < warmup_steps:
        return step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    end = optim.end_lr / optim.lr
    match optim.schedule:
        case "cosine":
            return end + (1 - end) * 0.5 * (1 + cos(pi * progress))
        case "linear":
            return end + (1 - end) * (1 - progress)
        case "rsqrt":
            return sqrt(max(1, warmup_steps) / max(1, warmup_steps, step))
        case "stair":
            return 0.1 ** sum(step >= fraction * steps for fraction in optim.stairs)
        case "constant":
            return 1.0
