"""Classification: predict the class of an image, or each of its labels."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitral.data.batches import Batch
from vitral.data.contact_sheet import thumbnail
from vitral.data.dataset import DatasetIndex, Item, class_counts
from vitral.data.decode import BadImageError
from vitral.data.randomness import BATCH_SAMPLE, random_generator
from vitral.data.splits import Splits
from vitral.evaluation.metrics import score
from vitral.evaluation.results import summarize
from vitral.inference.loaded_model import LoadedModel, to_device
from vitral.inference.novelty import fit_novelty
from vitral.inference.pipeline import Compute, JointCompute, ModelOutputs, run_model
from vitral.model.config import ViTConfig
from vitral.model.network import Network
from vitral.model.vit import ViT
from vitral.preprocess import Preprocess
from vitral.runs import Run
from vitral.training.config import ResolvedConfig
from vitral.training.events import Event
from vitral.training.mixing import balanced_weights, mix_batch, previous_images, soft_loss, soft_targets
from vitral.training.probe import measuring
from vitral.training.sharding import keeps_float32, root_of, run_with
from vitral.training.tasks import Measurement, PreparedBatch
from vitral.training.tasks.relevance_images import draw_relevance, typical_images

if TYPE_CHECKING:
    from vitral.training.token_loader import Loader


class Classification:
    """The Task of learning from labels."""

    def __init__(
        self, model: Network, preprocess: Preprocess, config: ResolvedConfig, dataset: DatasetIndex, splits: Splits
    ):
        self.preprocess, self.config, self.dataset = preprocess, config, dataset
        self.test_reason = splits.reasons["test"]
        self.extra = nn.Module()
        self.device = torch.device(config.device)
        self.first_block = len(model.blocks) - config.tune.blocks if config.tune.views else 0
        self.eager = partial(self._forward_tokens, model) if config.tune.views else model
        self.compile_network(config.compile)
        self.model = model
        self.class_weights: Tensor | None = None
        if config.loss.class_weights == "balanced":
            counts = class_counts(splits.train, len(dataset.classes))
            self.class_weights = balanced_weights(counts).to(self.device)

    def compile_network(self, is_compiled: bool) -> None:
        """Train with the compiled network, or with the eager one."""
        self.is_compiled = is_compiled
        eager: Callable[..., Tensor] = self.eager
        self.network: Callable[..., Tensor] = torch.compile(eager) if is_compiled else eager  # pyright: ignore[reportUnknownMemberType]

    def _forward_tokens(self, model: Network, tokens: Tensor) -> Tensor:
        """Return the logits of tokens that have passed the frozen blocks."""
        assert isinstance(model, ViT)
        grid = model.config.grid(*model.config.image_hw)
        return model.head(model.representation(model.pool_from(self.first_block, tokens, grid)))

    def prepare(self, batch: Batch, step: int) -> PreparedBatch:
        whole = batch.whole
        targets = soft_targets(whole.labels, len(self.dataset.classes), self.config.loss.smoothing).to(self.device)
        part = slice(whole.start, whole.start + len(batch.items))
        if self.first_block:
            images = torch.as_tensor(batch.images).to(self.device)
            return PreparedBatch(images, targets[part], whole=targets)
        images = to_device(batch.images, self.preprocess, self.device)
        if isinstance(images, Tensor) and whole.size > 1 and (self.config.mix.mixup or self.config.mix.cutmix):
            random = random_generator(self.config.seed, step, BATCH_SAMPLE)
            previous = None if batch.share is None else previous_images(images)
            images, targets = mix_batch(images, targets, self.config.mix, random, previous)
        return PreparedBatch(images, targets[part], whole=targets)

    def forward(self, batch: PreparedBatch, part: slice) -> Tensor:
        return run_with(self.model, self.network, batch.images[part])

    def loss(self, outputs: Tensor, batch: PreparedBatch, part: slice) -> Tensor:
        kind = self.config.loss.kind
        return soft_loss(outputs, batch.targets[part], kind, self.class_weights, batch=batch.whole)

    def measure(self, model: Network, loader: "Loader", split: str) -> Generator[Event, None, Measurement]:
        if split == "validation":
            outputs = yield from self.predict(model, loader)
            return Measurement(scores=score(outputs.outputs, outputs.labels), unreadable=outputs.unreadable)
        start = time.perf_counter()
        precision = "float32" if keeps_float32(model) else self.config.precision  # the first as `vitral evaluate` does
        loaded = self.load_trained(model, precision)
        outputs = yield from measuring(run_model(loader, self._join(model, loaded.logits)), split)
        speed = len(loader.images) / (time.perf_counter() - start)
        evaluation = replace(summarize(outputs, self.dataset.classes), images_per_second=speed, split=self.test_reason)
        report = evaluation.as_dict() | {"typical": typical_images(outputs, self.dataset.classes)}
        return Measurement(scores=evaluation.scores, unreadable=outputs.unreadable, report=report)

    def predict(self, model: Network, loader: "Loader") -> Generator[Event, None, ModelOutputs]:
        """Return the logits of the validation images."""
        if not self.first_block:
            loaded = self.load_trained(model, self.config.precision)
            return (yield from measuring(run_model(loader, self._join(model, loaded.logits)), "validation"))
        features = yield from self.features(model, loader, "validation")
        classify = self.load_trained(model, self.config.precision).classify
        return replace(features, outputs=run_with(model, classify, features.outputs))

    def features(self, model: Network, loader: "Loader", what: str) -> Generator[Event, None, ModelOutputs]:
        """Return the inputs of the head."""
        loaded = self.load_trained(model, self.config.precision)
        compute: Any = partial(loaded.features_from, self.first_block) if self.first_block else loaded.features
        return (yield from measuring(run_model(loader, self._join(model, compute)), what))

    def _join(self, model: Network, compute: Compute) -> Compute:
        """Return the computation as a sharded network runs it, or as it is."""
        if root_of(model) is None:
            return compute
        config = model.config
        shape: tuple[int, ...] = (1, config.channels, *config.image_hw)
        if self.first_block:
            assert isinstance(config, ViTConfig)
            rows, columns = config.grid(*config.image_hw)
            shape = (1, config.extra_tokens + rows * columns, config.width)
        example = torch.zeros(shape, dtype=torch.float32 if self.first_block else torch.uint8)
        return JointCompute(partial(run_with, model, compute), example)

    def fit_novelty(
        self, model: Network, run: Run, train: "Loader", validation: "Loader"
    ) -> Generator[Event, None, None]:
        """Write the statistics that measure how unusual an image is, from training and validation features."""
        fitted = yield from self.features(model, train, "novelty")
        held_out = None
        if validation is not train:
            held_out = (yield from self.features(model, validation, "novelty")).outputs
        if len(fitted.outputs) > 1 and (held_out is None or len(held_out) > 1):
            fit_novelty(fitted.outputs, fitted.labels, held_out=held_out).save(run.novelty)

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

    def draw(self, model: Network, run: Run, report: dict[str, Any], images: Sequence[Item], *, seconds: float) -> None:
        """Draw the most confident mistakes, a typical image per class, and the relevance of their patches."""
        by_key = {item.key: item for item in images}
        for kind, name in (("mistakes", "mistake"), ("typical", "typical")):
            for number, row in enumerate(report[kind], 1):
                with suppress(BadImageError):  # it was readable a moment ago; the report can do without
                    thumbnail(by_key[row["key"]]).save(run.plots / f"{name}-{number:02d}.png")
        draw_relevance(self.load_trained(model, "float32"), run, report, by_key, seconds=seconds)
