"""A `Job`: a run that is ready for its first step, or for the next one."""

from dataclasses import dataclass

from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from vitral.data.batches import BatchLoader
from vitral.data.dataset import DatasetIndex
from vitral.data.splits import Splits
from vitral.model.network import Network, build
from vitral.preprocess import Preprocess
from vitral.runs import Run
from vitral.training.config import ResolvedConfig
from vitral.training.events import Chosen
from vitral.training.step import Learner
from vitral.training.tuning import merge_lora, save_adapter
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.formats.safetensors import write_safetensors
from vitral.weights.load import load
from vitral.weights.save import save

CUSTOM = "vitral.custom"
"""Metadata of a file that only the class it names can load."""
MAX_SCORED_EPOCHS = 200
"""A run of thousands of short epochs would measure and save more than it learns."""


@dataclass(frozen=True, kw_only=True)
class ModelWriter:
    """Writes the model of a run: complete, and beside it the trained weights of a partial training."""

    config: ResolvedConfig
    preprocess: Preprocess
    classes: tuple[str, ...]
    multi_label: bool
    base_sha256: str | None
    """SHA-256 of the checkpoint that a partial training started from."""
    is_custom: bool
    """Whether the network is the caller's own, which a checkpoint of vitral cannot describe."""

    def write(self, run: Run, model: Network) -> None:
        if self.is_custom:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
            write_safetensors(run.model, tensors, {CUSTOM: type(model).__name__})
            return
        complete = build(model.config)
        complete.load_state_dict(merge_lora(model.state_dict()))
        labels = self.classes if model.config.num_classes else None
        save(
            Checkpoint(model=complete, preprocess=self.preprocess, labels=labels, multi_label=self.multi_label),
            run.model,
        )
        if self.config.from_weights and self.config.tune.what != "all":
            save_adapter(run.adapter, model, self.config.from_weights, self.base_sha256)

    def load_custom(self, run: Run, model: Network) -> None:
        """Read the weights of a network of the caller's own back into it."""
        model.load_state_dict(load_file(run.model))


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a run needs and that does not change while it trains, and the network that does."""

    config: ResolvedConfig
    dataset: DatasetIndex
    val: DatasetIndex | None
    """The dataset of --val."""
    splits: Splits
    learner: Learner
    train: BatchLoader
    validation: BatchLoader
    test: BatchLoader
    writer: ModelWriter
    run: Run
    steps: int
    warmup_steps: int
    choices: tuple[Chosen, ...]

    @property
    def steps_per_epoch(self) -> int:
        return self.train.batches_per_epoch

    def is_scored(self, epoch: int, step: int) -> bool:
        """Return whether the model is measured after this epoch."""
        every = max(1, self.steps // self.steps_per_epoch // MAX_SCORED_EPOCHS)
        return (epoch + 1) % every == 0 or step >= self.steps

    def save_model(self) -> None:
        """Write the model as it is now, and what its task keeps beside it."""
        self.writer.write(self.run, self.learner.model)
        self.learner.task.save(self.run)

    def load_model(self) -> Network:
        """Read the model that was written last."""
        model = self.learner.model
        if self.writer.is_custom:
            self.writer.load_custom(self.run, model)
        else:
            model = load(self.run.model).model.to(self.learner.device)
        self.learner.task.load(self.run)
        return model
