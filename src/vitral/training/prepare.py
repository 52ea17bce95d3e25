"""What comes before the first step: the data, the settings, the network, the folder, and the state to go on from."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.data.dataset import DatasetIndex, sample_headers
from vitral.data.splits import choose_splits
from vitral.devices import choose_device
from vitral.errors import ConfigError, DataError, VitralError, WeightsError
from vitral.model.network import Network
from vitral.model.sizes import canonical_name
from vitral.runs import Run
from vitral.training.auto import Decisions
from vitral.training.best import Best
from vitral.training.build import build_loaders, build_model
from vitral.training.config import TrainConfig, as_toml
from vitral.training.ending import describe_run
from vitral.training.events import Baseline, Chosen, Event, Saved, Started, Warned
from vitral.training.learner import Learner
from vitral.training.objectives import Objective
from vitral.training.state import State, check_fits, load_state, save_state
from vitral.training.unreadable import Unreadable
from vitral.weights.identity import identify
from vitral.weights.load import load

LOOKED_AT = 50
_FACTS = {"loss_sum", "loss_steps", "seconds", "is_unscored"}
"""Attributes of a run that its state holds by their names."""


def check_alone() -> None:
    """ConfigError under torchrun: its processes would each train a run of their own."""
    if "RANK" in os.environ and (world := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ConfigError(
            f"WORLD_SIZE={world}: this run is one of several processes, and vitral trains in one so far.",
            hint="Start it without torchrun.",
        )


class Preparation(ABC):
    """A run that is ready for its first step, or for the next one; what is learnt is for the classes below to say."""

    @abstractmethod
    def open(self, data: str) -> DatasetIndex: ...

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

    def __init__(
        self,
        config: TrainConfig,
        place: Run | Path | None,
        *,
        resumed: bool,
        data: DatasetIndex | None = None,
        decided: Sequence[Chosen] = (),
    ):
        check_alone()
        self.config, self.place, self.resumed, self.decided = config, place, resumed, decided
        self.data: DatasetIndex = data or self.open(config.data)
        self.step = 0
        self.unreadable = Unreadable()
        self.best = Best()
        self.loss_sum, self.loss_steps = 0.0, 0
        self.is_unscored = False
        """The last epoch was interrupted while it was measured."""
        self.seconds = 0.0
        self.decisions: list[Chosen] = []
        self.untold: list[str] = []
        """Lines of the log from before there is a folder for it."""
        self.baseline: Baseline | None = None

    def settle(self) -> Iterator[Event]:
        """The data, what of them is held out, and every setting that was left open."""
        other = self.other = None if self.config.val is None else self.open(self.config.val)
        yield from (Warned(message=note) for note in self.data.notes)
        yield from self.decided
        self.check_data()
        if other is not None and other.multi_label != self.data.multi_label:
            raise DataError("Of the data and --val, one has several labels a picture and the other has one.")
        self.splits = choose_splits(self.data, other, self.config.val_fraction)
        if not sample_headers(self.splits.test, LOOKED_AT):
            seen = f"None of the {len(self.splits.test)} held-out pictures that were tried can be read."
            raise DataError(seen, hint="`vitral data` says why.")
        sizes = {"test": len(self.splits.test), "validation": len(self.splits.validation)}
        for name, reason in self.splits.reasons.items():
            yield Chosen(name=name, value=f"{sizes[name]:,} pictures", reason=reason)
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
        self.loader, self.validation, self.test = loaders

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
            yield Chosen(name="epochs", value=round(epochs, 2), reason=f"{steps} steps of {seconds:.2f} s fit the time")
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
        per_epoch = self.loader.batches * seconds + len(self.validation.pictures) * each
        left = 0.85 * budget - len(self.test.pictures) * each
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
        yield Started(
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
        self.decisions = [Chosen(name=n, value=v, reason=r) for n, v, r in manifest.get("decisions", [])]
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
