"""The training loop: a generator of events. It prints nothing; whoever iterates decides what to show.

Everything random is a function of (seed, step) or (seed, epoch, picture), and everything else is in the saved state, so
a run that was killed at any moment goes on to the same weights, bit for bit.
"""

import time
from abc import abstractmethod
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

from vitral.data.batches import Batch
from vitral.evaluation.metrics import Scores
from vitral.model.network import Network
from vitral.runs import quoted
from vitral.training.best import Best, save_best
from vitral.training.ending import write_results
from vitral.training.events import (
    Chosen,
    EpochEnded,
    Event,
    Finished,
    Interrupted,
    Measuring,
    Saved,
    Stepped,
    Warned,
    as_line,
)
from vitral.training.learner import TrainingError
from vitral.training.prepare import Preparation
from vitral.training.schedule import factor
from vitral.training.signals import Signals
from vitral.weights.load import load

CURVE_POINTS = 200
MOST_SCORED = 200


class Training(Preparation):
    """One run, from settings to a model on disk."""

    @abstractmethod
    def score(self) -> Generator[Event, None, Scores]:
        """The network as it is now, on the validation."""

    @abstractmethod
    def measure_held_out(self) -> Generator[Event, None, dict[str, Any]]:
        """The best network on the pictures that nothing has seen yet."""

    @abstractmethod
    def draw_end(self) -> None:
        """Pictures of the report."""

    def run(self) -> Iterator[Event]:
        for event in self.events():
            if isinstance(event, Chosen):
                self.decisions.append(event)
            if not isinstance(event, Stepped | Measuring | Saved):
                self.untold.append(as_line(event))
            if self.untold and hasattr(self, "folder") and self.folder.config.is_file():
                self.folder.add_log(*self.untold)
                self.untold.clear()
            yield event

    def events(self) -> Iterator[Event]:
        yield from self.settle()
        yield from self.build()
        self.open_run()
        with self.folder.claim():
            yield from self.plan()
            yield from self.start()
            with Signals() as self.signals:
                try:
                    yield from self.go()
                except (RuntimeError, OSError):  # a signal to all ends also those that load pictures
                    if self.signals.caught is None:
                        raise
                    yield self.interrupted()  # the last saved state is whole

    # ---- the loop ----

    def go(self) -> Iterator[Event]:
        started, saved = time.perf_counter(), time.perf_counter()
        begun_at, begun_with = self.step, self.seconds
        every = max(1, self.steps // CURVE_POINTS)
        took = 0.0
        if self.is_unscored:
            if not (yield from self.score_epoch((self.step - 1) // self.loader.batches)):
                return
            yield self.save_state()
        while self.step < self.steps and not self.is_tired():
            epoch, number = divmod(self.step, self.loader.batches)
            for batch in self.loader.epoch(epoch, start=number):
                rate = factor(self.config.optim, self.step, self.steps, self.warmup)
                loss = self.learn(batch, rate)
                self.seconds = begun_with + time.perf_counter() - started
                speed = (self.step - begun_at) / (self.seconds - begun_with)
                stepped = Stepped(
                    step=self.step,
                    steps=self.steps,
                    epoch=epoch,
                    loss=loss,
                    lr=self.learner.optimizer.peak * rate,
                    images_per_second=speed * self.loader.batch_size,
                    seconds_left=(self.steps - self.step) / speed,
                )
                if self.step % every == 0:
                    row = {"step": self.step, "loss": f"{loss:.6f}", "lr": f"{stepped.lr:.6g}"}
                    self.folder.add_row(self.folder.losses, row)
                yield stepped
                if self.step >= self.steps or self.step % self.loader.batches == 0:
                    break  # the end of an epoch has its own save, behind its scores
                if self.signals.caught is not None:
                    yield self.save_state()
                    yield self.interrupted()
                    return
                now = time.perf_counter()
                if now - saved > max(self.config.save_seconds, 20 * took):  # large states must not take over
                    yield self.save_state()
                    saved = time.perf_counter()
                    took = saved - now
            if self.is_scored(epoch) and not (yield from self.score_epoch(epoch)):
                return
            due = self.config.keep == "best" and self.is_scored(epoch)
            now = time.perf_counter()
            if due or self.signals.caught is not None or now - saved > self.config.save_seconds:
                yield self.save_state()
                saved = time.perf_counter()
                took = saved - now
            self.seconds = begun_with + time.perf_counter() - started
            if self.signals.caught is not None:
                yield self.interrupted()
                return
        tensors = self.learner.state()  # to be measured, the best network takes the place of the last
        for event in self.finish():
            yield event
            if self.signals.caught is not None and not isinstance(event, Finished):
                yield self.save_state(tensors)
                yield self.interrupted()
                return

    def learn(self, batch: Batch, rate: float) -> float:
        self.unreadable.take_batch(batch, self.splits.train, self.folder, self.config.most_bad)
        try:
            loss = self.learner.learn(batch, self.step, rate)
        except TrainingError as error:
            keys = [self.splits.train[int(index)].key for index in batch.items[:8]]
            more = ", ..." if len(batch.items) > 8 else ""
            raise TrainingError(
                f"Step {self.step}: {error.message}, so the weights were not changed. Pictures of this step: "
                f"{', '.join(keys)}{more}.",
                hint=error.hint,
            ) from None
        self.step += 1
        self.loss_sum, self.loss_steps = self.loss_sum + loss, self.loss_steps + 1
        return loss

    def interrupted(self) -> Interrupted:
        line = f"vitral train --resume {quoted(str(self.folder.folder))}"
        return Interrupted(step=self.step, resume=line, signal=self.signals.caught or 0)

    def is_scored(self, epoch: int) -> bool:
        """A run of thousands of short epochs would measure and save more than it learns."""
        every = max(1, self.steps // self.loader.batches // MOST_SCORED)
        return (epoch + 1) % every == 0 or self.step >= self.steps

    def is_tired(self) -> bool:
        """Early stopping, which only new scores can bring about."""
        epoch, rest = divmod(self.step, self.loader.batches)
        return not rest and self.is_scored(epoch - 1) and self.best.is_old(epoch - 1, self.config.patience)

    # ---- scores ----

    def tell_unreadable(self) -> Iterator[Event]:
        if news := self.unreadable.news(self.folder):
            yield Warned(message=news)

    def score_epoch(self, epoch: int) -> Generator[Event, None, bool]:
        """Whether it came to its end; a signal does not wait for it, and a resumed run begins with it."""
        with closing(self.end_epoch(epoch)) as events:
            for event in events:
                yield event
                if self.signals.caught is not None and isinstance(event, Measuring):
                    self.is_unscored = True
                    break
            else:
                self.is_unscored = False
                return True
        yield self.save_state()
        yield self.interrupted()
        return False

    def end_epoch(self, epoch: int) -> Generator[Event, None, None]:
        with self.learner.averaged():
            found: Scores = yield from self.score()
            if self.config.keep == "last":
                self.best = Best(top1=found.top1, loss=found.loss, step=self.step, epoch=epoch)
                is_best = self.step >= self.steps
            else:
                is_best = self.best.take(found, self.step, epoch)
            if is_best:
                self.save_best()
        yield from self.tell_unreadable()
        train_loss = self.loss_sum / max(1, self.loss_steps)
        self.loss_sum, self.loss_steps = 0.0, 0
        numbers = {"train_loss": train_loss, "loss": found.loss, "top1": found.top1, "top5": found.top5}
        row = {name: f"{value:.6f}" for name, value in numbers.items()}
        self.folder.add_row(self.folder.metrics, {"epoch": epoch, "step": self.step, **row})
        yield EpochEnded(epoch=epoch, step=self.step, is_best=is_best, seconds=self.seconds, **numbers)

    def save_best(self) -> None:
        save_best(self.folder, self.learner.model, self.preprocess, self.data, self.config, self.base_sha256)

    def take_model(self, model: Network) -> None:
        """The best one, in place of the last."""
        self.learner.model = model.to(self.learner.device)

    def finish(self) -> Iterator[Event]:
        """Measured, and everything written down."""
        if self.best.step:
            self.take_model(load(self.folder.model).model)
        held = yield from self.measure_held_out()
        yield from self.tell_unreadable()
        facts = {
            "objective": self.config.objective,
            "best_step": self.best.step,
            "keep": self.config.keep,
            "steps": self.step,
            "train_seconds": round(self.seconds, 3),
            "bad_pictures": len(self.unreadable.reasons),
            "changes_pictures": self.config.changes_pictures,
            "parameters": sum(p.numel() for p in self.learner.model.parameters()),
            "baseline": None if self.baseline is None else asdict(self.baseline),
        }
        self.folder.plots.mkdir(exist_ok=True)
        self.draw_end()
        write_results(self.folder, held, self.config, self.data, self.splits, facts, self.decisions)
        yield Finished(folder=self.folder.folder, test=held, best_step=self.best.step, train_seconds=self.seconds)
