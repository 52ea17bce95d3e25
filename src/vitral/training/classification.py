"""Training by labels: which class, or which of several, a picture shows."""

import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

from vitral.data.batches import BatchLoader
from vitral.data.dataset import DatasetIndex, counts
from vitral.data.sources import open_dataset
from vitral.errors import DataError
from vitral.evaluation.metrics import Scores, score
from vitral.evaluation.results import summarize
from vitral.inference.loaded_model import LoadedModel
from vitral.inference.pipeline import ModelOutputs, gather
from vitral.model.network import Network
from vitral.training.ending import draw_mistakes, measure_start, measured
from vitral.training.events import Baseline, Event, Warned
from vitral.training.loop import Training
from vitral.training.mixing import balanced_weights
from vitral.training.objectives import Classify


class Classification(Training):
    def open(self, data: str) -> DatasetIndex:
        return open_dataset(data)

    def check_data(self) -> None:
        if len(self.data.classes) < 2:
            raise DataError(f"{self.data.name} has one class, and telling one apart from nothing cannot be learnt.")

    @property
    def classes(self) -> int:
        return len(self.data.classes)

    def make_objective(self, model: Network) -> Classify:
        weights = None
        if self.config.loss.class_weights == "balanced":
            weights = balanced_weights(counts(self.splits.train, self.classes))
        several = self.data.multi_label
        return Classify(model, self.preprocess, self.config, multi_label=several, class_weights=weights)

    def measure_before(self) -> Iterator[Event]:
        """What a checkpoint knows already."""
        if not self.config.from_weights:
            return
        found = yield from measure_start(self.ready(), self.data, self.splits)
        if isinstance(found, Baseline):
            self.baseline = found
            yield found
        elif found is not None:
            yield Warned(message=found)

    def ready(self, precision: str | None = None) -> LoadedModel:
        """The model as it is now, to be asked."""
        return LoadedModel(
            model=self.learner.model.eval(),
            preprocess=self.preprocess,
            labels=self.data.classes,
            has_names=True,
            multi_label=self.data.multi_label,
            device=self.learner.device,
            precision=precision or str(self.config.precision),
            run=None,
        )

    def ask(self, ready: LoadedModel, loader: BatchLoader, what: str) -> Generator[Event, None, ModelOutputs]:
        """What the model says about every picture; told while it goes on."""
        answers = yield from measured(gather(loader, ready.logits), what)
        self.unreadable.take(answers.unreadable, self.folder)
        return answers

    def score(self) -> Generator[Event, None, Scores]:
        answers = yield from self.ask(self.ready(), self.validation, "validation")
        return score(answers.rows, answers.labels)

    def measure_held_out(self) -> Generator[Event, None, dict[str, Any]]:
        start = time.perf_counter()
        exact = self.ready("float32")  # as `vitral evaluate` has it
        answers = yield from self.ask(exact, self.test, "held out")
        self.found = summarize(answers, self.data.classes)
        speed = len(self.splits.test) / (time.perf_counter() - start)
        self.found = replace(self.found, images_per_second=speed, split=self.splits.reasons["test"])
        return self.found.as_dict()

    def draw_end(self) -> None:
        draw_mistakes(self.folder, self.found, self.splits)
