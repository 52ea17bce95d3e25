"""A `Job`: a run that is ready for its first step, or for the next one."""

from collections.abc import Mapping
from dataclasses import dataclass

from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from vitral.data.batches import BatchLoader
from vitral.data.dataset import DatasetIndex
from vitral.data.splits import Splits
from vitral.errors import WeightsError
from vitral.evaluation.metrics import Scores
from vitral.model.network import Network, build
from vitral.preprocess import Preprocess
from vitral.runs import Run
from vitral.training.config import ResolvedConfig
from vitral.training.events import Candidate, Chosen
from vitral.training.step import Learner
from vitral.training.tuning import merge_lora, save_adapter
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.formats.safetensors import write_safetensors
from vitral.weights.load import load, verify_checksum
from vitral.weights.save import save

CUSTOM = "vitral.custom"
"""Metadata of a file that only the class it names can load."""
MAX_SCORED_EPOCHS = 200
"""A run of thousands of short epochs would measure and save more than it learns."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a run needs and that does not change while it trains, and the network that does."""

    config: ResolvedConfig
    dataset: DatasetIndex
    val: DatasetIndex | None
    """The dataset of --val."""
    splits: Splits
    preprocess: Preprocess
    learner: Learner
    train: BatchLoader
    validation: BatchLoader
    test: BatchLoader
    run: Run
    steps: int
    warmup_steps: int
    base_sha256: str | None
    """SHA-256 of the checkpoint that a partial training started from."""
    is_custom: bool
    """Whether the network is the caller's own, which a checkpoint of vitral cannot describe."""
    choices: tuple[Chosen, ...]
    probe_scores: Scores | None = None
    """Of the linear probe that training starts from, on images that it was not fitted to."""
    candidates: tuple[Candidate, ...] = ()

    @property
    def steps_per_epoch(self) -> int:
        return self.train.batches_per_epoch

    def is_scored(self, epoch: int, step: int) -> bool:
        """Return whether the model is measured after this epoch."""
        every = max(1, self.steps // self.steps_per_epoch // MAX_SCORED_EPOCHS)
        return (epoch + 1) % every == 0 or step >= self.steps

    def save_model(self) -> None:
        """Write the model as it is now, and the extra parameters of its task beside it."""
        model, extra = self.learner.model, self.learner.task.extra.state_dict()
        if self.is_custom:
            write_safetensors(self.run.model, _on_cpu(model.state_dict()), {CUSTOM: type(model).__name__})
        else:
            self._save_checkpoint(model)
        if extra:
            write_safetensors(self.run.masking, _on_cpu(extra), {})

    def _save_checkpoint(self, model: Network) -> None:
        """Write the complete model, and beside it the trained weights of a partial training."""
        complete, dataset = build(model.config), self.dataset
        complete.load_state_dict(merge_lora(model.state_dict()))
        labels = dataset.classes if model.config.num_classes else None
        checkpoint = Checkpoint(
            model=complete, preprocess=self.preprocess, labels=labels, multi_label=dataset.multi_label
        )
        save(checkpoint, self.run.model)
        if self.config.from_weights and self.config.tune.what != "all":
            save_adapter(self.run.adapter, model, self.config.from_weights, self.base_sha256)

    def check_saved(self) -> None:
        """Raise WeightsError if the model that was written last is damaged or incomplete."""
        verify_checksum(self.run.model)
        if self.learner.task.extra.state_dict() and not self.run.masking.is_file():
            raise WeightsError(f"{self.run.masking} is missing.")

    def load_model(self) -> Network:
        """Read the model that was written last."""
        model, extra = self.learner.model, self.learner.task.extra
        if self.is_custom:
            model.load_state_dict(load_file(self.run.model))
        else:
            model = load(self.run.model).model.to(self.learner.device)
        if extra.state_dict():
            extra.load_state_dict(load_file(self.run.masking))
        return model


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
