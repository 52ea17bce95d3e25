"""Which epoch is the best by the validation, and the model of that epoch on the disk."""

from dataclasses import dataclass
from math import isnan, sqrt

from vitral.data.dataset import DatasetIndex
from vitral.evaluation.metrics import Scores
from vitral.model.network import Network, build
from vitral.preprocess import Preprocess
from vitral.runs import Run
from vitral.training.config import TrainConfig
from vitral.training.tuning import merged_state, save_adapter
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.save import save

SMALLEST_FALL = 1e-4
"""Of the loss, as a part of it: one that creeps down for ever is not waited for."""


@dataclass(kw_only=True, slots=True)
class Best:
    """By top-1; where the validation is too small to tell (within one standard error of the best so far) by the loss,
    which says more with few pictures."""

    top1: float = -1.0
    """The highest so far, of whichever epoch."""
    loss: float = float("inf")
    """Of the model that is kept; so are the next two."""
    step: int = 0
    epoch: int = -1

    def take(self, found: Scores, step: int, epoch: int) -> bool:
        """Whether this epoch is the best so far."""
        noise = sqrt(found.top1 * (1 - found.top1) / max(1, found.images))
        falls = found.loss < self.loss * (1 - SMALLEST_FALL)
        has_top1 = not isnan(found.top1)  # of pixels that are filled in, none is right or wrong
        better = (
            falls if not has_top1 else found.top1 > self.top1 + noise or (found.top1 >= self.top1 - noise and falls)
        )
        if better:
            self.loss, self.step, self.epoch = found.loss, step, epoch
        if has_top1:
            self.top1 = max(self.top1, found.top1)
        return better

    def is_old(self, epoch: int, patience: int) -> bool:
        """Early stopping: nothing better for so many epochs."""
        return bool(patience) and self.epoch >= 0 and epoch - self.epoch >= patience


def save_best(
    run: Run, model: Network, preprocess: Preprocess, data: DatasetIndex, config: TrainConfig, base_sha256: str | None
) -> None:
    """Complete, also where only a part was trained; that part beside it as a small file."""
    whole = build(model.config)
    whole.load_state_dict(merged_state(model.state_dict()))
    labels = data.classes if model.config.num_classes else None
    checkpoint = Checkpoint(model=whole, preprocess=preprocess, labels=labels, multi_label=data.multi_label)
    save(checkpoint, run.model)
    if config.from_weights and config.tune.what != "all":
        save_adapter(run.adapter, model, config.from_weights, base_sha256)
