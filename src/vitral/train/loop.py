"""The training loop: a generator of events. It prints nothing; whoever iterates decides what to show.

Everything random is a function of (seed, step) or (seed, epoch, picture), and everything else is in the saved state, so
a run that was killed at any moment goes on to the same weights, bit for bit.
"""

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.data.augment import random_generator
from vitral.data.items import Dataset, counts
from vitral.data.loader import Batch, Loader, Pictures
from vitral.data.sources import open_data
from vitral.errors import ConfigError, DataError, VitralError
from vitral.measure.metrics import Scores, score, stack
from vitral.measure.predictions import run_model, to_device
from vitral.model.sizes import canonical_name, named_config
from vitral.model.vit import ViT
from vitral.preprocess import Preprocess
from vitral.runs import Run
from vitral.train.config import TrainConfig, as_settings, as_toml, read_toml, with_settings
from vitral.train.decide import Decisions
from vitral.train.events import Began, Decided, EpochEnded, Event, Finished, Interrupted, Saved, Stepped, Warned
from vitral.train.mixing import as_targets, balanced_weights, mix_batch, soft_loss
from vitral.train.optim import Average, Optimiser, Swapped
from vitral.train.schedule import factor
from vitral.train.signals import Signals
from vitral.train.splits import settle_splits
from vitral.train.state import State, load_state, save_state
from vitral.train.tune import choose_parameters, merged_state, save_adapter
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.config_json import config_from
from vitral.weights.load import load
from vitral.weights.save import save

_MIXING = 2**40 - 2


class TrainingError(VitralError):
    """Training cannot go on."""


def train(
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    config: TrainConfig | None = None,
    **settings: Any,
) -> Iterator[Event]:
    """Trains, and yields what happens. ``settings`` are those of TrainConfig; a section takes a dict.

    ``resume`` goes on with a run; settings may be repeated, and must then be the same."""
    if resume is not None:
        run, settled = reopen(Path(resume), data, settings)
        if run.read_json(run.report):
            yield Warned(message=f"{run.folder} is finished; there is nothing to go on with.")
            told = run.read_json(run.report)
            yield Finished(
                folder=run.folder,
                held_out=told["held_out"],
                best_step=told["best_step"],
                train_seconds=told["train_seconds"],
            )
            return
        yield from Training(settled, run, resumed=True).run()
        return
    if config is None:
        if data is None:
            raise ConfigError("There is no data to train on.", hint="Give a folder, or resume=...")
        config = with_settings(None, {"data": str(data), **flat(settings)}, "train")
    yield from train_settled(config, out)


def train_settled(config: TrainConfig, out: str | Path | None = None) -> Iterator[Event]:
    """A new run by settings that are complete."""
    yield from Training(config, None if out is None else Path(out), resumed=False).run()


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """optim=dict(lr=1) -> optim.lr: 1."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= (
            {f"{name}.{part}": inner for part, inner in value.items()} if isinstance(value, dict) else {name: value}
        )
    return found


def reopen(folder: Path, data: str | Path | None, settings: dict[str, Any]) -> tuple[Run, TrainConfig]:
    run = Run.open(folder)
    config = with_settings(None, read_toml(run.config), str(run.config))
    known = as_settings(config)
    asked = as_settings(with_settings(config, {**flat(settings), **({"data": str(data)} if data else {})}, "--resume"))
    for name, value in asked.items():
        if known.get(name) != value:
            raise ConfigError(
                f"{name} is {known.get(name)!r} in {run.folder}, and {value!r} now.",
                hint="A resumed run keeps its settings; leave it out, or start another run.",
            )
    return run, config


class Training:
    """One run, from settings to a model on disk."""

    def __init__(self, config: TrainConfig, place: Run | Path | None, *, resumed: bool):
        self.config, self.place, self.resumed = config, place, resumed
        self.step = self.seen = self.bad_pictures = 0
        self.best, self.best_step, self.best_epoch = -1.0, 0, -1
        self.loss_sum, self.loss_steps = 0.0, 0
        self.seconds = 0.0
        self.loss_scale = (
            2.0**14 if config.precision == "float16" else 1.0
        )  # lifts small gradients into float16's range

    # ---- before ----

    def run(self) -> Iterator[Event]:
        data = open_data(self.config.data)
        other = None if self.config.val is None else open_data(self.config.val)
        yield from (Warned(message=note) for note in data.notes)
        if len(data.classes) < 2:
            raise DataError(f"{data.name} has one class, and telling one apart from nothing cannot be learnt.")
        splits, made = settle_splits(data, other)
        if not self.resumed:
            held = load(self.config.from_weights) if self.config.from_weights else None
            self.config, decided = Decisions(self.config, data, splits.train, held).run()
            made = [*made, *decided]
        yield from made
        self.data, self.splits = data, splits
        torch.manual_seed(self.config.seed)
        self.device = torch.device(self.config.device)
        self.build()
        self.open_run(data)
        yield from self.plan()
        yield from self.restore()
        with Signals() as self.signals:
            yield from self.go()

    def build(self) -> None:
        """The network, what of it is trained, and everything that feeds and moves it."""
        config = self.config
        self.preprocess, self.model = self.make_model()
        choose_parameters(self.model, config.tune)
        self.model.to(self.device)
        self.model.gradient_checkpointing = config.gradient_checkpointing
        self.forward: Callable[..., Any] = torch.compile(self.model) if config.compile else self.model
        peak = config.optim.lr
        assert not isinstance(peak, str)
        self.optimiser = Optimiser(self.model, config.optim, float(peak))
        self.average = Average(self.model, config.ema) if config.ema else None
        patch = self.model.config.patch_hw
        make = partial(Pictures, preprocess=self.preprocess, seed=config.seed, patch=patch)
        self.loader = self.make_loader(make(self.splits.train, how=config.augment), shuffle=True)
        self.selection = self.make_loader(make(self.splits.selection), shuffle=False)
        self.held_out = self.make_loader(make(self.splits.held_out), shuffle=False)
        weights = config.loss.class_weights == "balanced"
        found = counts(self.splits.train, len(self.data.classes))
        self.class_weights = balanced_weights(found).to(self.device) if weights else None
        if self.preprocess.resize == "native" and (config.mix.mixup or config.mix.cutmix):
            raise ConfigError(
                "mix needs pictures of one size, and resize='native' keeps theirs.", hint="Use resize=crop."
            )

    def make_model(self) -> tuple[Preprocess, ViT]:
        config, classes = self.config, len(self.data.classes)
        fields: dict[str, Any] = {"num_classes": classes, "dropout": config.dropout, "drop_path": config.drop_path}
        fields |= dict(config.network)
        size = config.image_size
        channels = config.channels
        assert not isinstance(size, str)
        assert not isinstance(channels, str)
        if "stem" in fields and isinstance(fields["stem"], dict):
            fields["stem"] = config_from({**_ANY_SIZE, "stem": fields["stem"]}, tensors=10**6).stem
        if config.from_weights:
            drops = {"representation": None}
            loaded = load(config.from_weights, image_size=size, channels=channels, **{**drops, **fields})
            return replace(loaded.preprocess, resize=config.resize), loaded.model
        fields = {"image_size": size, "channels": channels, **fields}
        pair = size if isinstance(size, tuple) else (size, size)
        crop = 0.875 if config.resize == "crop" else 1.0
        preprocess = Preprocess(size=pair, resize=config.resize, crop_fraction=crop)  # type: ignore[arg-type]
        return preprocess.with_channels(int(fields["channels"])), ViT(named_config(config.model, **fields))

    def make_loader(self, pictures: Pictures, *, shuffle: bool) -> Loader:
        size = int(self.config.batch_size)
        if shuffle and len(pictures) < size:
            size = len(pictures)
        return Loader(
            pictures=pictures,
            batch_size=size,
            classes=len(self.data.classes),
            multi_label=self.data.multi_label,
            shuffle=shuffle,
            workers=int(self.config.workers),
        )

    def open_run(self, data: Dataset) -> None:
        if isinstance(self.place, Run):
            self.folder = self.place
            told = self.folder.read_json(self.folder.manifest)
            if told and told["data_fingerprint"] != data.fingerprint():
                raise DataError(
                    f"The data are not those that {self.folder.folder} began with.",
                    hint="Bring them back, or start anew.",
                )
            return
        name = "weights" if self.config.from_weights else canonical_name(self.config.model)
        if self.config.from_weights:
            name = Path(self.config.from_weights.removeprefix("hf:")).stem
        self.folder = Run.create(self.place, data.name, name)

    def plan(self) -> Iterator[Event]:
        """How many steps; with a time budget by the speed of a few, and then never again."""
        if self.config.epochs == "auto":
            seconds = self.time_a_step()
            steps = max(1, round(0.85 * 60 * float(self.config.minutes or 1) / seconds))
            epochs = steps / self.loader.batches
            self.config = replace(self.config, epochs=epochs)
            yield Decided(
                name="epochs", value=round(epochs, 2), reason=f"{steps} steps of {seconds:.2f} s fit the time"
            )
            if self.config.optim.warmup_steps == "auto":
                self.config = replace(self.config, optim=replace(self.config.optim, warmup_steps=max(1, steps // 20)))
        self.steps = max(1, round(float(self.config.epochs) * self.loader.batches))
        warmup = self.config.optim.warmup_steps
        self.warmup = max(1, self.steps // 20) if warmup == "auto" else int(warmup)
        if not self.resumed:
            self.folder.config.write_text(as_toml(self.config), encoding="utf-8")
            self.folder.write_json(self.folder.manifest, self.manifest())

    def time_a_step(self) -> float:
        """The median of a few steps that change nothing."""
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        times = []
        for number, batch in enumerate(self.loader.epoch(0)):
            start = time.perf_counter()
            self.gradients(batch, step=0)
            self.optimiser.zero_grad()
            times.append(time.perf_counter() - start)
            if number == 6:
                break
        self.model.load_state_dict(state)
        return sorted(times)[len(times) // 2] * 1.15  # the optimiser, loading and evaluation

    def manifest(self) -> dict[str, Any]:
        import platform

        from vitral import __version__

        return {
            "versions": {"vitral": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "data": self.config.data,
            "data_fingerprint": self.data.fingerprint(),
            "classes": list(self.data.classes),
            "seed": self.config.seed,
            "device": str(self.device),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "pictures": {
                "train": len(self.splits.train),
                "selection": len(self.splits.selection),
                "held_out": len(self.splits.held_out),
            },
            "resumes": [],
        }

    # ---- state ----

    def restore(self) -> Iterator[Event]:
        if self.resumed:
            state, problems = load_state(self.folder.state)
            yield from (Warned(message=problem) for problem in problems)
            if state is None:
                yield Warned(message="No state was saved before the run ended; it starts over.")
                self.folder.metrics.unlink(missing_ok=True)
            else:
                self.take(state)
                self.folder.keep_metrics(self.step)
            manifest = self.folder.read_json(self.folder.manifest)
            manifest["resumes"] = [*manifest.get("resumes", []), self.step]
            if manifest.get("threads") not in (None, torch.get_num_threads()):
                yield Warned(
                    message=f"The run began with {manifest['threads']} threads and goes on with "
                    f"{torch.get_num_threads()}: results may differ in the last bits."
                )
            self.folder.write_json(self.folder.manifest, manifest)
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        yield Began(
            folder=self.folder.folder,
            step=self.step,
            steps=self.steps,
            batches=self.loader.batches,
            parameters=sum(p.numel() for p in self.model.parameters()),
            trained=trained,
        )

    def take(self, state: State) -> None:
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state.tensors.items():
            part, _, rest = name.partition(":")
            parts.setdefault(part, {})[rest] = tensor
        self.model.load_state_dict(parts["model"])
        self.optimiser.load(parts.get("optimiser", {}))
        if self.average is not None:
            self.average.values = {name: tensor.to(self.device) for name, tensor in parts["average"].items()}
        facts = state.facts
        self.step, self.seen, self.bad_pictures = facts["step"], facts["seen"], facts["bad_pictures"]
        self.best, self.best_step, self.best_epoch = facts["best"], facts["best_step"], facts["best_epoch"]
        self.loss_sum, self.loss_steps = facts["loss_sum"], facts["loss_steps"]
        self.seconds = facts["seconds"]
        self.loss_scale = facts["loss_scale"]

    def save_state(self) -> Saved:
        tensors = {f"model:{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"optimiser:{name}": tensor for name, tensor in self.optimiser.state().items()}
        if self.average is not None:
            tensors |= {f"average:{name}": tensor for name, tensor in self.average.values.items()}
        facts = {
            "seen": self.seen,
            "bad_pictures": self.bad_pictures,
            "best": self.best,
            "best_step": self.best_step,
            "best_epoch": self.best_epoch,
            "loss_sum": self.loss_sum,
            "loss_steps": self.loss_steps,
            "seconds": self.seconds,
            "loss_scale": self.loss_scale,
        }
        path = save_state(self.folder.state, State(step=self.step, tensors=tensors, facts=facts))
        return Saved(path=path, step=self.step)

    # ---- the loop ----

    def go(self) -> Iterator[Event]:
        started, saved = time.perf_counter(), time.perf_counter()
        begun_at, begun_with = self.step, self.seconds
        while self.step < self.steps and not self.is_tired():
            epoch, number = divmod(self.step, self.loader.batches)
            for batch in self.loader.epoch(epoch, start=number):
                loss = self.learn(batch)
                self.seconds = begun_with + time.perf_counter() - started
                speed = (self.step - begun_at) / (self.seconds - begun_with)
                yield Stepped(
                    step=self.step,
                    steps=self.steps,
                    epoch=epoch,
                    loss=loss,
                    lr=self.optimiser.peak * factor(self.config.optim, self.step - 1, self.steps, self.warmup),
                    images_per_second=speed * self.loader.batch_size,
                    seconds_left=(self.steps - self.step) / speed,
                )
                if self.signals.caught is not None:
                    yield self.save_state()
                    yield self.interrupted()
                    return
                if self.step >= self.steps:
                    break
                if time.perf_counter() - saved > self.config.save_seconds and self.step % self.loader.batches:
                    yield self.save_state()
                    saved = time.perf_counter()
            yield self.end_epoch(epoch)
            yield self.save_state()
            saved = time.perf_counter()
            self.seconds = begun_with + time.perf_counter() - started
            if self.signals.caught is not None:
                yield self.interrupted()
                return
        yield self.finish()

    def interrupted(self) -> Interrupted:
        line = f"vitral train --resume {shlex.quote(str(self.folder.folder))}"
        return Interrupted(step=self.step, resume=line, signal=self.signals.caught or 0)

    def is_tired(self) -> bool:
        """Early stopping."""
        epoch = self.step // self.loader.batches
        return (
            bool(self.config.patience) and self.best_epoch >= 0 and epoch - 1 - self.best_epoch >= self.config.patience
        )

    def learn(self, batch: Batch) -> float:
        self.count_bad(batch)
        torch.manual_seed(self.config.seed * 1_000_003 + self.step)  # dropout and stochastic depth of this step
        loss = self.gradients(batch, self.step)
        parameters = list(self.optimiser.parameters.values())
        if self.loss_scale != 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= self.loss_scale
        limit = self.config.optim.clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        if self.loss_scale > 1 and not torch.isfinite(norm):
            self.loss_scale /= 2  # too large for float16: this step is left out, and the next one is smaller
        elif not torch.isfinite(norm) or not isfinite(loss):
            self.stop_at(batch, loss, norm.item())
        else:
            self.optimiser.step(factor(self.config.optim, self.step, self.steps, self.warmup))
        self.optimiser.zero_grad()
        self.step += 1
        if self.average is not None:
            self.average.update(self.model)
        self.loss_sum, self.loss_steps = self.loss_sum + loss, self.loss_steps + 1
        return loss

    def stop_at(self, batch: Batch, loss: float, norm: float) -> None:
        keys = [self.splits.train[int(index)].key for index in batch.items[:8]]
        raise TrainingError(
            f"Step {self.step}: the loss is {loss} and the norm of the gradients {norm}, so the weights were not "
            f"changed. Pictures of this step: {', '.join(keys)}{', ...' if len(batch.items) > 8 else ''}.",
            hint=f"Lower optim.lr ({self.optimiser.peak:g}), or look at these pictures.",
        )

    def gradients(self, batch: Batch, step: int) -> float:
        """Adds up the gradients of all micro-batches; gives the loss."""
        self.model.train()
        classes = self.model.config.num_classes
        targets = as_targets(batch.labels, classes, self.config.loss.smoothing).to(self.device)
        images = to_device(batch.images, self.preprocess, self.device)
        if isinstance(images, Tensor):
            random = random_generator(self.config.seed, step, _MIXING)
            images, targets = mix_batch(images, targets, self.config.mix, random)
        total = 0.0
        parts = self.config.accumulate
        for index in range(parts):
            share = slice(index * len(targets) // parts, (index + 1) * len(targets) // parts)
            if share.start == share.stop:
                continue
            with self.precision():
                logits = self.forward(images[share])
            kind = "sigmoid" if self.data.multi_label else self.config.loss.kind
            loss = soft_loss(logits, targets[share], kind, self.class_weights)
            loss = loss * ((share.stop - share.start) / len(targets))
            (loss * self.loss_scale).backward()
            total += loss.item()
        return total

    def precision(self) -> AbstractContextManager[object]:
        if self.config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, str(self.config.precision)))

    def count_bad(self, batch: Batch) -> None:
        self.seen += len(batch.items) + len(batch.bad)
        for index, reason in batch.bad:
            self.bad_pictures += 1
            if self.step < self.loader.batches:  # each once
                self.folder.add_skipped(self.splits.train[index].key, reason)
        if not len(batch.items) or (self.bad_pictures > self.config.most_bad * max(self.seen, 100)):
            index, reason = batch.bad[0] if batch.bad else (0, "")
            raise DataError(
                f"{self.bad_pictures} of {self.seen} pictures cannot be read, such as {self.splits.train[index].key} "
                f"({reason}); at most {self.config.most_bad:.0%} may.",
                hint="`vitral data` lists them; most_bad sets another limit.",
            )

    # ---- scores ----

    def scores(self, loader: Loader) -> Scores:
        logits, labels = [], []
        for batch, found in run_model(self.model, loader, self.preprocess, self.device, self.precision):
            logits.append(found)
            labels.append(batch.labels)
        return score(stack(logits), torch.cat(labels) if labels else torch.empty(0, dtype=torch.long))

    def with_average(self) -> AbstractContextManager[None]:
        """The model with its averaged weights, where there are any."""
        return nullcontext() if self.average is None else Swapped(self.model, self.average.values)

    def end_epoch(self, epoch: int) -> EpochEnded:
        with self.with_average():
            found = self.scores(self.selection)
            is_best = found.top1 > self.best
            if is_best:
                self.best, self.best_step, self.best_epoch = found.top1, self.step, epoch
                self.save_model()
        train_loss = self.loss_sum / max(1, self.loss_steps)
        self.loss_sum, self.loss_steps = 0.0, 0
        row = {
            "epoch": epoch,
            "step": self.step,
            "train_loss": f"{train_loss:.6f}",
            "loss": f"{found.loss:.6f}",
            "top1": f"{found.top1:.6f}",
            "top5": f"{found.top5:.6f}",
        }
        self.folder.add_metrics(row)
        return EpochEnded(
            epoch=epoch,
            step=self.step,
            train_loss=train_loss,
            top1=found.top1,
            top5=found.top5,
            loss=found.loss,
            is_best=is_best,
            seconds=self.seconds,
        )

    def save_model(self) -> None:
        """Complete, also where only a part was trained; that part beside it as a small file."""
        whole = ViT(self.model.config)
        whole.load_state_dict(merged_state(self.model.state_dict()))
        checkpoint = Checkpoint(model=whole, preprocess=self.preprocess, labels=self.data.classes)
        save(checkpoint, self.folder.model)
        if self.config.from_weights and self.config.tune.what != "all":
            save_adapter(self.folder.adapter, self.model, self.config.from_weights)

    def finish(self) -> Finished:
        if self.best_step:
            best = load(self.folder.model)
            whole = ViT(self.model.config)
            whole.load_state_dict(best.model.state_dict())
            self.model = whole.to(self.device)
        found = self.scores(self.held_out)
        report = {
            "held_out": found.as_dict(),
            "best_step": self.best_step,
            "steps": self.step,
            "train_seconds": round(self.seconds, 3),
            "bad_pictures": self.bad_pictures,
        }
        self.folder.write_json(self.folder.report, report)
        return Finished(
            folder=self.folder.folder,
            held_out=found.as_dict(),
            best_step=self.best_step,
            train_seconds=self.seconds,
        )


_ANY_SIZE = dict(width=64, depth=1, heads=1, mlp_width=64, patch_size=1, image_size=32)
