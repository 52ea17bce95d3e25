"""Training without labels: the same loop with masked patch prediction in place of classes."""

from collections.abc import Generator, Iterator
from math import nan
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitral.data.batches import Batch, BatchLoader, ImageDataset
from vitral.data.dataset import DatasetIndex
from vitral.data.sources import open_dataset
from vitral.errors import DataError, WeightsError
from vitral.evaluation.metrics import Scores
from vitral.files import atomic_path
from vitral.model.network import Network
from vitral.model.vit import ViT
from vitral.training.ending import evenly
from vitral.training.events import Event, Measuring
from vitral.training.filled_in import MOST, Painter
from vitral.training.loop import Training
from vitral.training.masked_patches import LEVELS
from vitral.training.objectives import FillIn, Prepared

_MEASURING = 2**23
"""Steps whose corruption is that of measuring, and always the same; 40 bits higher they must fit into 64."""


class Pretraining(Training):
    objective: FillIn

    def open(self, data: str) -> DatasetIndex:
        return open_dataset(data, labelled=False)

    def check_data(self) -> None:
        """Any pictures will do."""

    def make_objective(self, model: Network) -> FillIn:
        return FillIn(model, self.preprocess, self.config)

    @property
    def classes(self) -> int:
        return 0

    def measure_before(self) -> Iterator[Event]:
        """There are no classes that features could be measured by."""
        return iter(())

    def score(self) -> Generator[Event, None, Scores]:
        found, _ = yield from self.fill_in(self.validation, "validation")
        return found

    def fill_in(self, loader: BatchLoader, what: str) -> Generator[Event, None, tuple[Scores, float | None]]:
        """The loss, and the part of the hidden colours that were found; what is hidden stays the same. With it the part
        that would be found by always saying the commonest of them: less than that is nothing learnt."""
        losses, right, images = 0.0, 0, 0
        hidden = torch.zeros(LEVELS**3, dtype=torch.long)  # of each colour
        for batch, prepared, answers in self.answers(loader):
            everything = slice(0, len(prepared))
            losses += self.objective.loss(answers, prepared, everything).item() * len(prepared)
            right += int(self.objective.extra.right(answers, prepared.targets).sum())
            if not prepared.targets.is_floating_point():
                hidden += prepared.targets.flatten().cpu().bincount(minlength=len(hidden))
            images += len(prepared)
            self.unreadable.take(((loader.pictures.items[i].key, why) for i, why in batch.bad), self.folder)
            yield Measuring(what=what, done=images, total=len(loader.pictures))
        if not images:
            raise DataError(f"None of the {len(loader.pictures)} pictures can be read.")
        total = int(hidden.sum())
        share = right / total if total else nan
        # A colour is found or it is not; top5 is there for the log and the curves, which read one of every run.
        scores = Scores(images=images, loss=losses / images, top1=share, top5=share)
        return scores, int(hidden.max()) / total if total else None

    @torch.inference_mode()
    def answers(self, loader: BatchLoader) -> Iterator[tuple[Batch, Prepared, Tensor]]:
        self.learner.model.eval()
        for number, batch in enumerate(loader.epoch()):
            if len(batch.items):
                prepared = self.objective.prepare(batch, _MEASURING + number)
                size = -(-len(prepared) // self.config.accumulate)  # what fits at a time
                shares = [slice(start, start + size) for start in range(0, len(prepared), size)]
                with self.learner.precision():
                    answers = torch.cat([self.objective.answer(prepared, share) for share in shares])
                yield batch, prepared, answers.float()

    def measure_held_out(self) -> Generator[Event, None, dict[str, Any]]:
        found, commonest = yield from self.fill_in(self.test, "held out")
        return {**found.as_dict(), "target": self.config.masking.target, "commonest": commonest}

    def save_best(self) -> None:
        """With the mask and the head beside it, which the network itself leaves behind."""
        super().save_best()
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.objective.extra.state_dict().items()}
        with atomic_path(self.folder.masking) as aside:
            save_file(tensors, aside)

    def verify_best(self) -> None:
        super().verify_best()
        if not self.folder.masking.is_file():
            raise WeightsError(f"{self.folder.masking} is missing.")

    def take_model(self, model: Network) -> None:
        super().take_model(model)
        assert isinstance(self.learner.model, ViT)
        self.objective.model = self.learner.model
        self.objective.extra.load_state_dict(load_file(self.folder.masking))

    def draw_end(self) -> None:
        """What was hidden, and what was filled in."""
        painter = Painter(self.objective.extra, self.preprocess, self.objective.grid)
        shown = ImageDataset(evenly(self.splits.test, MOST), self.preprocess)
        loader = BatchLoader(pictures=shown, batch_size=MOST, classes=len(self.data.classes))
        for _, prepared, answers in self.answers(loader):
            assert prepared.corruption is not None
            sheet = painter.sheet(prepared.images, prepared.corruption, answers, prepared.targets)
            sheet.save(self.folder.plots / "masked.png")
