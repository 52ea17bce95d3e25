"""The training loop: a generator of events. It prints nothing; whoever iterates decides what to show.

Everything random is a function of (seed, step) or (seed, epoch, picture), and everything else is in the saved state, so
a run that was killed at any moment goes on to the same weights, bit for bit.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.data.items import Dataset, sample_headers
from vitral.data.loader import Batch
from vitral.data.splits import settle_splits
from vitral.devices import choose_device
from vitral.errors import ConfigError, DataError, VitralError, WeightsError
from vitral.measure.metrics import Scores
from vitral.model.network import Network
from vitral.model.sizes import canonical_name
from vitral.runs import Run, quoted
from vitral.train.best import Best, save_best
from vitral.train.build import build_loaders, build_model
from vitral.train.config import TrainConfig, as_toml
from vitral.train.decide import Decisions
from vitral.train.ending import describe_run, write_results
from vitral.train.events import (
    Baseline,
    Began,
    Decided,
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
from vitral.train.learner import Learner, TrainingError
from vitral.train.objectives import Objective
from vitral.train.schedule import factor
from vitral.train.signals import Signals
from vitral.train.state import State, check_fits, load_state, save_state
from vitral.train.unreadable import Unreadable
from vitral.weights.identity import identify
from vitral.weights.load import load

CURVE_POINTS = 200
MOST_SCORED = 200
LOOKED_AT = 50


def check_alone() -> None:
    """ConfigError under torchrun: its processes would each train a run of their own."""
    if "RANK" in os.environ and (world := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ConfigError(
            f"WORLD_SIZE={world}: this run is one of several processes, and vitral trains in one so far.",
            hint="Start it without torchrun.",
        )


class Training(ABC):
    """One run, from settings to a model on disk; what is learnt is for the classes below to say."""

    @abstractmethod
    def open(self, data: str) -> Dataset: ...

    @abstractmethod
    def check_data(self) -> None:
        """DataError where nothing can be learnt from them."""

    @property
    @abstractmethod
    def classes(self) -> int:
        """Logits of the network."""

    @abstractmethod
    def make_objective(self, model: Network) -> Objective: ...

    @abstractmethod
    def measure_before(self) -> Iterator[Event]:
        """What a checkpoint knows already."""

    @abstractmethod
    def score(self) -> Generator[Event, None, Scores]:
        """The network as it is now, on the selection."""

    @abstractmethod
    def measure_held_out(self) -> Generator[Event, None, dict[str, Any]]:
        """The best network on the pictures that nothing has seen yet."""

    @abstractmethod
    def draw_end(self) -> None:
        """Pictures of the report."""

    def __init__(
        self,
        config: TrainConfig,
        place: Run | Path | None,
        *,
        resumed: bool,
        data: Dataset | None = None,
        decided: Sequence[Decided] = (),
    ):
        check_alone()
        self.config, self.place, self.resumed, self.decided = config, place, resumed, decided
        self.data: Dataset = data or self.open(config.data)
        self.step = 0
        self.unreadable = Unreadable()
        self.best = Best()
        self.loss_sum, self.loss_steps = 0.0, 0
        self.is_unscored = False
        """The last epoch was interrupted while it was measured."""
        self.seconds = 0.0
        self.decisions: list[Decided] = []
        self.untold: list[str] = []
        """Lines of the log from before there is a folder for it."""
        self.baseline: Baseline | None = None

    def run(self) -> Iterator[Event]:
        for event in self.events():
            if isinstance(event, Decided):
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

    # ---- before ----

    def settle(self) -> Iterator[Event]:
        """The data, what of them is held out, and every setting that was left open."""
        other = self.other = None if self.config.val is None else self.open(self.config.val)
        yield from (Warned(message=note) for note in self.data.notes)
        yield from self.decided
        self.check_data()
        if other is not None and other.multi_label != self.data.multi_label:
            raise DataError("Of the data and --val, one has several labels a picture and the other has one.")
        self.splits = settle_splits(self.data, other, self.config.selection)
        if not sample_headers(self.splits.held_out, LOOKED_AT):
            seen = f"None of the {len(self.splits.held_out)} held-out pictures that were tried can be read."
            raise DataError(seen, hint="`vitral data` says why.")
        sizes = {"held_out": len(self.splits.held_out), "selection": len(self.splits.selection)}
        for name, reason in self.splits.reasons.items():
            yield Decided(name=name, value=f"{sizes[name]:,} pictures", reason=reason)
        if not self.resumed:
            if self.config.from_weights and Run.is_run(Path(self.config.from_weights)):
                Run(Path(self.config.from_weights)).trained_model()  # or says that there is none yet
            held = load(self.config.from_weights) if self.config.from_weights else None
            self.config, made = Decisions(self.config, self.data, self.splits.train, held).run()
            yield from made

    def build(self) -> Iterator[Event]:
        config = self.config
        choose_device(config.device)  # a resumed run may find itself on another machine
        torch.manual_seed(config.seed)
        model, self.preprocess, done = build_model(config, self.classes)
        is_part = config.from_weights and config.tune.what != "all"  # whose file names what it belongs to
        self.base_sha256: str | None = identify(str(config.from_weights)).get("sha256") if is_part else None
        if not self.resumed:
            yield from (Warned(message=f"{config.from_weights}: {sentence}") for sentence in done)
        self.objective = self.make_objective(model)
        self.learner = Learner(model, config, self.objective)
        loaders = build_loaders(config, self.data, self.splits, self.preprocess, model.config.step_hw)
        self.loader, self.selection, self.held_out = loaders

    def open_run(self) -> None:
        if isinstance(self.place, Run):
            self.folder = self.place
            told = self.folder.read_json(self.folder.manifest)
            for name, data in (("data", self.data), ("val", self.other)):
                if data is not None and told.get(f"{name}_fingerprint", data.fingerprint()) != data.fingerprint():
                    raise DataError(
                        f"The {'data' if name == 'data' else 'pictures of --val'} are not those that "
                        f"{self.folder.folder} began with.",
                        hint="Bring them back, or start anew.",
                    )
            if told.get("base_sha256", self.base_sha256) != self.base_sha256:
                raise WeightsError(
                    f"{self.config.from_weights} is not the checkpoint that {self.folder.folder} began with.",
                    hint="Bring it back, or start anew.",
                )
            return
        if self.config.from_weights:
            name = Path(self.config.from_weights.removeprefix("hf:")).stem
        else:
            name = canonical_name(self.config.model)
        self.folder = Run.create(self.place, self.data.name, name)

    def plan(self) -> Iterator[Event]:
        """How many steps; with a time budget by the speed of a few, and then never again."""
        if self.config.epochs == "auto":
            seconds = self.learner.time_a_step(self.loader)
            steps = self.steps_within(60 * float(self.config.minutes or 0), seconds)
            epochs = steps / self.loader.batches
            self.config = replace(self.config, epochs=epochs)
            yield Decided(
                name="epochs", value=round(epochs, 2), reason=f"{steps} steps of {seconds:.2f} s fit the time"
            )
            if self.config.optim.warmup_steps == "auto":
                warmup = min(max(1, steps // 20), steps - 1)
                self.config = replace(self.config, optim=replace(self.config.optim, warmup_steps=warmup))
        self.steps = max(1, round(float(self.config.epochs) * self.loader.batches))
        assert not isinstance(self.config.optim.warmup_steps, str)
        self.warmup = self.config.optim.warmup_steps
        if self.warmup >= self.steps:
            yield Warned(
                message=f"The warm-up takes {self.warmup:,} steps and the run has {self.steps:,}: the rate never "
                "comes to its peak. Set optim.warmup_steps."
            )

    def steps_within(self, budget: float, seconds: float) -> int:
        """How many steps fit, with what is measured after each epoch and at the end; a picture that is only looked at
        takes a third of one that is learnt from."""
        each = seconds / 3 / self.loader.batch_size
        per_epoch = self.loader.batches * seconds + len(self.selection.pictures) * each
        left = 0.85 * budget - len(self.held_out.pictures) * each
        return max(1, round(left / per_epoch * self.loader.batches))

    def start(self) -> Iterator[Event]:
        """Writes down what was decided, or takes up the state of the run."""
        if self.resumed:
            yield from self.restore()
        else:
            self.folder.write_config(as_toml(self.config))
            self.folder.write_json(self.folder.manifest, self.described())
            yield from self.measure_before()
            self.folder.write_json(self.folder.manifest, self.described())
        parameters = list(self.learner.model.parameters())
        yield Began(
            folder=self.folder.folder,
            step=self.step,
            steps=self.steps,
            batches=self.loader.batches,
            parameters=sum(p.numel() for p in parameters),
            trained=sum(p.numel() for p in parameters if p.requires_grad),
        )

    def described(self) -> dict[str, Any]:
        told = describe_run(self.config, self.data, self.splits, self.decisions, self.baseline)
        told["base_sha256"] = self.base_sha256
        return told | ({} if self.other is None else {"val_fingerprint": self.other.fingerprint()})

    # ---- state ----

    def restore(self) -> Iterator[Event]:
        state, problems = load_state(self.folder.state)
        yield from (Warned(message=problem) for problem in problems)
        manifest = self.folder.read_json(self.folder.manifest)
        if not manifest:
            manifest = self.described()
            yield Warned(message=f"{self.folder.manifest} is missing: whether the data are the same cannot be told.")
        self.decisions = [Decided(name=n, value=v, reason=r) for n, v, r in manifest.get("decisions", [])]
        self.baseline = Baseline(**manifest["baseline"]) if manifest.get("baseline") else None
        if state is None:
            yield Warned(message="No state was saved before the run ended; it starts over.")
            if self.baseline is None:
                yield from self.measure_before()
                manifest["baseline"] = None if self.baseline is None else asdict(self.baseline)
        else:
            check_fits(state, self.learner.state(), self.folder.folder)
            self.learner.load(state.tensors)
            self.learner.loss_scale = state.facts["loss_scale"]
            self.learner.steps_in_range = state.facts.get("steps_in_range", 0)
            self.best, self.unreadable = Best(**state.facts["best"]), Unreadable(**state.facts["unreadable"])
            for name in _FACTS & state.facts.keys():
                setattr(self, name, state.facts[name])
            self.step = state.step
            yield from self.check_best()
        self.folder.keep_rows(self.step)
        manifest["resumes"] = [*manifest.get("resumes", []), self.step]
        if manifest.get("threads") not in (None, torch.get_num_threads()):
            yield Warned(
                message=f"The run began with {manifest['threads']} threads and goes on with "
                f"{torch.get_num_threads()}: results may differ in the last bits."
            )
        self.folder.write_json(self.folder.manifest, manifest)

    def check_best(self) -> Iterator[Event]:
        """The best network so far must still be there when the run is over."""
        is_kept = self.config.keep == "best" or self.step >= self.steps
        if not self.best.step or not is_kept:
            return
        try:
            self.verify_best()
        except VitralError as error:
            self.best = Best()
            self.is_unscored = self.step >= self.steps  # then the last one is measured and kept again
            yield Warned(message=f"The best network so far is lost: {error.message} The best from here on is kept.")

    def verify_best(self) -> None:
        identify(self.folder.model)

    def save_state(self, tensors: dict[str, Tensor] | None = None) -> Saved:
        facts = {name: getattr(self, name) for name in _FACTS}
        facts |= {
            "loss_scale": self.learner.loss_scale,
            "steps_in_range": self.learner.steps_in_range,
            "best": asdict(self.best),
            "unreadable": asdict(self.unreadable),
        }
        state = State(step=self.step, tensors=tensors or self.learner.state(), facts=facts)
        return Saved(path=save_state(self.folder.state, state), step=self.step)

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
                    lr=self.learner.optimiser.peak * rate,
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
        yield Finished(folder=self.folder.folder, held_out=held, best_step=self.best.step, train_seconds=self.seconds)


_FACTS = {"loss_sum", "loss_steps", "seconds", "is_unscored"}
