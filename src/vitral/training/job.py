"""A `Job`: a run that is ready for its first step, or for the next one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from vitral.collectives import from_first
from vitral.data.batches import BatchLoader, ImageDataset
from vitral.data.dataset import DatasetIndex
from vitral.data.splits import Splits, sample_items
from vitral.errors import WeightsError
from vitral.model.network import Network, build
from vitral.preprocess import Preprocess
from vitral.runs import Run
from vitral.training.budget import COMPARED_MODELS, MAX_PLAIN_IMAGES, MIN_TEST_IMAGES, TEST_FRACTION, Budget
from vitral.training.config import ResolvedConfig
from vitral.training.events import Candidate, Chosen
from vitral.training.parallel import only_first
from vitral.training.probe import Head, Probe
from vitral.training.schedule import lr_factor
from vitral.training.sharded_models import load_shards, read_shards, save_plain_shards, save_shards
from vitral.training.sharding import copy_values
from vitral.training.state import Stage, TrainState, save_state
from vitral.training.step import Learner
from vitral.training.token_loader import Loader, TokenLoader
from vitral.training.tokens import TokenSet
from vitral.training.tuning import merge_lora, save_adapter
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.dialects.plan import Content
from vitral.weights.formats.safetensors import write_safetensors
from vitral.weights.load import load, verify_checksum
from vitral.weights.save import save
from vitral.weights.state_dict import build_on_meta

CUSTOM = "vitral.custom"
"""Metadata of a file that only the class it names can load."""
MAX_SCORED_EPOCHS, MAX_SCORED_IN_BUDGET = 200, 10
"""A run of thousands of short epochs would measure and save more than it learns."""
MAX_TUNED_EPOCHS = 40
"""More passes over the training images than this are not worth the time that is left of a budget."""
REFIT_LR = 0.5
"""Peak learning rate of the refit, as a fraction of that of the training before it."""


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
    train: Loader
    validation: Loader
    test: BatchLoader
    refit: Loader | None
    """The images that the winner is trained on in the end; None if it stays as it is."""
    run: Run
    base_sha256: str | None
    """SHA-256 of the checkpoint that a partial training started from."""
    is_custom: bool
    """Whether the network is the caller's own, which a checkpoint of vitral cannot describe."""
    choices: tuple[Chosen, ...]
    probe: Probe | None = None
    """The linear probe that a new run starts from."""
    heads: tuple[Head, Head] | None = None
    """The heads of the probe: fitted to the training images, and to the validation images as well."""
    start: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The trained parameters before the first step, of a run that starts with a probe."""
    tokens: TokenSet | None = None
    candidates: tuple[Candidate, ...] = ()
    """Candidates that were tried before the first step."""
    groups: Mapping[str, str] = field(default_factory=dict[str, str])
    """The group of each image with near-duplicates."""
    findings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Likely label errors and near-duplicates, as plain values."""
    budget: Budget | None = None
    """The time budget, if this process started the run."""

    @property
    def steps(self) -> int:
        """Return the planned number of steps on the training images."""
        epochs = self.config.epochs
        return max(1, round(epochs * self.train.batches_per_epoch)) if epochs and epochs != "auto" else 0

    @property
    def warmup_steps(self) -> int:
        assert self.config.optim.warmup_steps != "auto"
        return self.config.optim.warmup_steps

    def loader(self, stage: Stage) -> Loader:
        """Return the images of a stage."""
        return self.refit if stage == "refit" and self.refit is not None else self.train

    def is_scored(self, epoch: int, step: int, end: int) -> bool:
        """Return whether the model is measured after this epoch of the stage that ends at `end`.

        A time budget is too short for it if the trained model is compared with a linear probe in the end.
        """
        if self.heads is not None and self.config.minutes is not None:
            return False
        limit = MAX_SCORED_EPOCHS if self.config.minutes is None else MAX_SCORED_IN_BUDGET
        every = max(1, ceil(self.steps / self.train.batches_per_epoch / limit))
        return (epoch + 1) % every == 0 or step >= end

    @property
    def max_steps(self) -> int:
        """Return the largest number of steps that is worth its time on the training images."""
        return MAX_TUNED_EPOCHS * self.train.batches_per_epoch if self.heads is not None else 2**31

    def lr_factor(self, state: TrainState) -> float:
        """Return the factor of the peak learning rate at the next step."""
        position, planned = state.pace.position_at(state.step), state.pace.planned
        if state.stage == "refit":
            return REFIT_LR * lr_factor(self.config.optim, position, planned, max(1, planned // 20))
        return lr_factor(self.config.optim, position, planned, self.warmup_steps)

    def plain_samples(self) -> tuple[Loader, Loader]:
        """Return loaders of the training images as they are, at most 300, and of the validation images."""
        if isinstance(self.train, TokenLoader):
            rows = self.train.rows[:: max(1, len(self.train.rows) // MAX_PLAIN_IMAGES)]
            return replace(self.train, rows=rows, shuffle=False), self.validation
        assert isinstance(self.validation, BatchLoader)
        images = self.validation.images
        items = sample_items(self.splits.train, MAX_PLAIN_IMAGES)
        plain = replace(self.validation, images=ImageDataset(items, images.preprocess, patch=images.patch))
        return plain, plain if self.splits.validation is self.splits.train else self.validation

    def timely_test(self) -> BatchLoader:
        """Return the test split, or a sample of it if too little is left of the time budget."""
        if self.budget is None or not self.budget.test_image:
            return self.test
        left = self.budget.left - self.novelty_seconds
        count = max(min(MIN_TEST_IMAGES, len(self.test.images)), int(left / self.budget.test_image))
        if count >= len(self.test.images):
            return self.test
        images = self.test.images
        items = sample_items(images.items, count)
        return replace(self.test, images=ImageDataset(items, images.preprocess, patch=images.patch))

    @property
    def novelty_seconds(self) -> float:
        """Return the estimated time to measure how unusual training images look, unless that is known already."""
        if self.budget is None or self.config.epochs == 0 or self.run.novelty.is_file():
            return 0.0
        return min(MAX_PLAIN_IMAGES, len(self.splits.train)) * self.budget.validation_image

    @property
    def seconds_after_steps(self) -> float:
        """Return the estimated time of everything after the last step: a validation pass, novelty and the test.

        Novelty is calibrated on the validation images, before a refit or after the last step.
        """
        assert self.budget is not None
        validation = len(self.splits.validation) * self.budget.validation_image
        return validation + self.novelty_seconds + self.test_seconds

    @property
    def test_seconds(self) -> float:
        """Return the time to keep for the test split: that of all its images, or of the sample that is planned for."""
        assert self.budget is not None
        assert self.config.minutes is not None
        least = min(MIN_TEST_IMAGES, len(self.test.images)) * self.budget.test_image
        return min(len(self.test.images) * self.budget.test_image, max(least, TEST_FRACTION * 60 * self.config.minutes))

    def with_choice(self, choice: Chosen) -> "Job":
        return replace(self, choices=(*self.choices, choice))

    def refit_steps(self, steps: int) -> int:
        """Return the steps of the refit after so many steps: as many passes over its images."""
        if self.refit is None:
            return 0
        return max(1, round(steps / self.train.batches_per_epoch * self.refit.batches_per_epoch))

    def affordable_steps(self, step_seconds: float, *, step: int) -> int:
        """Return how many more steps on the training images leave time for everything that comes after them."""
        assert self.budget is not None
        images, comparisons = len(self.validation.images), COMPARED_MODELS if self.heads is not None else 0
        if isinstance(self.validation, TokenLoader):
            images = len(self.validation.rows)
        epoch = self.train.batches_per_epoch
        left = self.budget.left - self.seconds_after_steps
        left -= (comparisons + 1) * images * self.budget.validation_image  # the last one calibrates novelty
        scored = 0.0
        if self.heads is None:
            scored = images * self.budget.validation_image / max(epoch, self.steps / MAX_SCORED_IN_BUDGET)
        refit = 0.0 if self.refit is None else self.refit.batches_per_epoch / epoch
        return int((left - refit * step * step_seconds) / (step_seconds * (1 + refit) + scored))

    def save_state(self, state: TrainState, tensors: Mapping[str, Tensor] | None = None) -> Path:
        """Write everything that a resumed run needs: the first process does, or all do if each holds a part."""
        tensors = tensors or self.learner.tensors()
        if self.learner.is_sharded:
            return save_state(self.state_folder, state, tensors)
        with only_first() as is_writer:
            return save_state(self.state_folder, state, tensors) if is_writer else self.state_folder
        raise AssertionError

    @property
    def state_folder(self) -> Path:
        """Return the folder of the saved states: that of the first process if all write their parts to it."""
        return from_first(self.run.state) if self.learner.is_sharded else self.run.state

    def save_model(self) -> None:
        """Write the model as it is now, and the extra parameters of its task beside it."""
        model, extra = self.learner.model, self.learner.task.extra.state_dict()
        if self.is_custom and self.learner.is_sharded:
            save_plain_shards(model, self.run.model, {CUSTOM: type(model).__name__})
        elif self.is_custom:
            write_safetensors(self.run.model, _on_cpu(model.state_dict()), {CUSTOM: type(model).__name__})
        else:
            self._save_checkpoint(model)
        if extra:
            write_safetensors(self.run.masking, _on_cpu(extra), {})

    def _save_checkpoint(self, model: Network) -> None:
        """Write the complete model, and beside it the trained weights of a partial training."""
        dataset = self.dataset
        labels = dataset.classes if model.config.num_classes else None
        if self.learner.is_sharded:
            content = Content(
                dialect="native",
                network=model.config,
                state=build_on_meta(model.config).state_dict(),
                preprocess=self.preprocess,
                labels=labels,
                multi_label=dataset.multi_label,
            )
            save_shards(content, model, self.run.model)
        else:
            complete = build(model.config)
            complete.load_state_dict(merge_lora(model.state_dict()))
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

    def load_trained(self) -> dict[str, Tensor]:
        """Read the trained parameters of the model that was written last, of a run that starts with a probe."""
        if self.learner.is_sharded:
            is_partial = self.config.tune.what != "all"
            return read_shards(self.run.adapter if is_partial else self.run.model, self.start)
        if self.config.tune.what != "all":
            return load_file(self.run.adapter)
        return {name: tensor for name, tensor in self.load_model().state_dict().items() if name in self.start}

    def load_model(self) -> Network:
        """Read the model that was written last."""
        model, extra = self.learner.model, self.learner.task.extra
        if self.is_custom and self.learner.is_sharded:
            copy_values(model, read_shards(self.run.model, model.state_dict()))
        elif self.is_custom:
            model.load_state_dict(load_file(self.run.model))
        elif self.learner.is_sharded:
            settings = replace(self.config, precision="float32")
            model = load_shards(from_first(self.run.model), settings).model
        else:
            model = load(self.run.model).model.to(self.learner.device)
        if extra.state_dict():
            extra.load_state_dict(load_file(self.run.masking))
        return model


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
