"""Which epoch is the best by the selection, and the model of that epoch on the disk."""

from dataclasses import dataclass
from math import sqrt

from vitral.data.items import Dataset
from vitral.measure.metrics import Scores
from vitral.model.network import Network, build
from vitral.preprocess import Preprocess
from vitral.runs import Run
from vitral.train.config import TrainConfig
from vitral.train.tune import merged_state, save_adapter
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.save import save


@dataclass(kw_only=True, slots=True)
class Best:
    """By top-1; where the selection is too small to tell (within one standard error of the best so far) by the loss,
    which says more with few pictures."""

    top1: float = -1.0
    """The highest so far, of whichever epoch."""
    top1_epoch: int = -1
    loss: float = float("inf")
    """Of the model that is kept."""
    step: int = 0

    def take(self, found: Scores, step: int, epoch: int) -> bool:
        """Whether this epoch is the best so far."""
        noise = sqrt(found.top1 * (1 - found.top1) / max(1, found.images))
        better = found.top1 > self.top1 + noise or (found.top1 >= self.top1 - noise and found.loss < self.loss)
        if better:
            self.loss, self.step = found.loss, step
        if found.top1 > self.top1:
            self.top1, self.top1_epoch = found.top1, epoch
        return better

    def is_old(self, epoch: int, patience: int) -> bool:
        """Early stopping: nothing better for so many epochs."""
        return bool(patience) and self.top1_epoch >= 0 and epoch - self.top1_epoch >= patience


def save_best(run: Run, model: Network, preprocess: Preprocess, data: Dataset, config: TrainConfig) -> None:
    """Complete, also where only a part was trained; that part beside it as a small file."""
    whole = build(model.config)
    whole.load_state_dict(merged_state(model.state_dict()))
    labels = data.classes if model.config.num_classes else None
    checkpoint = Checkpoint(model=whole, preprocess=preprocess, labels=labels, multi_label=data.multi_label)
    save(checkpoint, run.model)
    if config.from_weights and config.tune.what != "all":
        save_adapter(run.adapter, model, config.from_weights)
