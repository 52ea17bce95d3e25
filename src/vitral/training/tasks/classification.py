"""Classification: predict the class of an image, or each of its labels."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitral.data.augment import random_generator
from vitral.data.batches import Batch, BatchLoader
from vitral.data.contact_sheet import thumbnail
from vitral.data.dataset import DatasetIndex, Item, class_counts
from vitral.data.decode import BadImageError
from vitral.data.splits import Splits
from vitral.evaluation.metrics import score
from vitral.evaluation.results import summarize
from vitral.inference.loaded_model import LoadedModel, to_device
from vitral.inference.pipeline import run_model
from vitral.model.network import Network
from vitral.preprocess import Preprocess
from vitral.runs import Run
from vitral.training.config import ResolvedConfig
from vitral.training.events import Event
from vitral.training.mixing import balanced_weights, mix_batch, soft_loss, soft_targets
from vitral.training.probe import measuring
from vitral.training.tasks import BATCH_SAMPLE, Measurement, PreparedBatch


class Classification:
    """The Task of learning from labels."""

    def __init__(
        self, model: Network, preprocess: Preprocess, config: ResolvedConfig, dataset: DatasetIndex, splits: Splits
    ):
        self.preprocess, self.config, self.dataset = preprocess, config, dataset
        self.test_reason = splits.reasons["test"]
        self.extra = nn.Module()
        self.device = torch.device(config.device)
        self.network: Callable[..., Tensor] = torch.compile(model) if config.compile else model  # pyright: ignore[reportUnknownMemberType]
        self.class_weights: Tensor | None = None
        if config.loss.class_weights == "balanced":
            counts = class_counts(splits.train, len(dataset.classes))
            self.class_weights = balanced_weights(counts).to(self.device)

    def prepare(self, batch: Batch, step: int) -> PreparedBatch:
        targets = soft_targets(batch.labels, len(self.dataset.classes), self.config.loss.smoothing).to(self.device)
        images = to_device(batch.images, self.preprocess, self.device)
        if isinstance(images, Tensor):
            random = random_generator(self.config.seed, step, BATCH_SAMPLE)
            images, targets = mix_batch(images, targets, self.config.mix, random)
        return PreparedBatch(images, targets)

    def forward(self, batch: PreparedBatch, part: slice) -> Tensor:
        return self.network(batch.images[part])

    def loss(self, outputs: Tensor, batch: PreparedBatch, part: slice) -> Tensor:
        kind = self.config.loss.kind
        return soft_loss(outputs, batch.targets[part], kind, self.class_weights, batch=batch.targets)

    def measure(self, model: Network, loader: BatchLoader, split: str) -> Generator[Event, None, Measurement]:
        start = time.perf_counter()
        precision = "float32" if split == "test" else self.config.precision  # the test as `vitral evaluate` runs it
        loaded = self.load_trained(model, precision)
        outputs = yield from measuring(run_model(loader, loaded.logits), split)
        if split == "validation":
            return Measurement(scores=score(outputs.outputs, outputs.labels), unreadable=outputs.unreadable)
        speed = len(loader.images) / (time.perf_counter() - start)
        evaluation = replace(summarize(outputs, self.dataset.classes), images_per_second=speed, split=self.test_reason)
        return Measurement(scores=evaluation.scores, unreadable=outputs.unreadable, report=evaluation.as_dict())

    def load_trained(self, model: Network, precision: str) -> LoadedModel:
        """Return the model as it is now, ready to run."""
        return LoadedModel(
            model=model.eval(),
            preprocess=self.preprocess,
            labels=self.dataset.classes,
            has_names=True,
            multi_label=self.dataset.multi_label,
            device=self.device,
            precision=precision,
            run=None,
        )

    def draw(self, model: Network, run: Run, report: dict[str, Any], images: Sequence[Item]) -> None:
        """Draw the most confident mistakes."""
        by_key = {item.key: item for item in images}
        for number, mistake in enumerate(report["mistakes"], 1):
            with suppress(BadImageError):  # it was readable a moment ago; the report can do without
                thumbnail(by_key[mistake["key"]]).save(run.plots / f"mistake-{number:02d}.png")
