"""Start and resume runs."""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from vitral.data.dataset import DatasetIndex
from vitral.errors import ConfigError, DataError, VitralError, WeightsError
from vitral.model.network import Network
from vitral.runs import Run
from vitral.training.config import SECTIONS, ResolvedConfig, TrainConfig
from vitral.training.events import (
    Baseline,
    Chosen,
    Event,
    Finished,
    Measuring,
    Saved,
    Started,
    Stepped,
    Warned,
    as_log_line,
)
from vitral.training.job import Job
from vitral.training.loop import train_loop
from vitral.training.prepare import prepare
from vitral.training.records import make_manifest
from vitral.training.request import Request, collect_settings, pop_network, reopen
from vitral.training.selection import BestEpoch
from vitral.training.settings import as_toml, flatten
from vitral.training.state import TrainState, check_fits, load_state
from vitral.training.step import initial_loss_scale
from vitral.weights.load import verify_checksum


def train_events(
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    recipe: str | None = None,
    config: str | Path | None = None,
    **settings: Any,
) -> Iterator[Event]:
    """Train and yield events. Settings are those of TrainConfig; a section takes a dict.

    `recipe` and `config` (a TOML file) come before the settings, as on the command line. `resume` continues a run;
    settings may be repeated but must be the same.
    """
    if resume is None:
        return start_run(collect_settings(data, flatten(settings), recipe=recipe, config=config), out=out)
    network = pop_network(settings)
    run, resolved = reopen(Path(resume), data, settings, recipe=recipe, config=config, out=out)
    return resume_run(run, resolved, network=network)


def start_run(request: Request, *, out: str | Path | None = None) -> Iterator[Event]:
    """Start a new run."""
    check_objective(request.config)
    folder = None if out is None else Path(out)
    if folder is not None:
        Run.check_free(folder)
    return _log_events(_start(request, folder))


def _start(request: Request, folder: Path | None) -> Iterator[Event]:
    job = yield from prepare(request, folder)
    with job.run.claim():
        job.run.write_config(as_toml(job.config))
        job.run.write_manifest(make_manifest(job, None))
        baseline = yield from _measure_baseline(job)
        job.run.write_manifest(make_manifest(job, baseline))
        state = TrainState(loss_scale=initial_loss_scale(job.config))
        yield _started(job, state)
        yield from train_loop(job, state, choices=job.choices, baseline=baseline)


def resume_run(run: Run, config: ResolvedConfig, *, network: Network | None = None) -> Iterator[Event]:
    """Continue a run; a finished one yields its result."""
    if report := run.read_report():
        yield Warned(message=f"{run.folder} is finished; there is nothing to resume.")
        yield Finished(
            folder=run.folder,
            test=report["test"],
            best_step=report["best_step"],
            train_seconds=report["train_seconds"],
        )
        return
    yield from _log_events(_resume(run, config, network))


def _resume(run: Run, config: ResolvedConfig, network: Network | None) -> Iterator[Event]:
    with run.claim():
        job = yield from prepare(Request(config=config, network=network), run)
        manifest = run.read_manifest()
        if manifest:
            yield from _check_unchanged(job, manifest)
        else:
            manifest = make_manifest(job, None)
            yield Warned(message=f"{run.manifest} is missing, so changes of the dataset cannot be detected.")
        choices = tuple(Chosen(name=name, value=value, reason=reason) for name, value, reason in manifest["choices"])
        baseline = Baseline(**manifest["baseline"]) if manifest.get("baseline") else None
        state = yield from _restore(job)
        if state is None:
            yield Warned(message="The run ended before its first state was saved; it starts over.")
            state = TrainState(loss_scale=initial_loss_scale(job.config))
            if baseline is None:
                baseline = yield from _measure_baseline(job)
                manifest["baseline"] = None if baseline is None else asdict(baseline)
        run.drop_rows_after(state.step)
        manifest["resumes"] = [*manifest["resumes"], state.step]
        run.write_manifest(manifest)
        yield _started(job, state)
        yield from train_loop(job, state, choices=choices, baseline=baseline)


def _check_unchanged(job: Job, manifest: Mapping[str, Any]) -> Iterator[Event]:
    """Raise an error if the run started with another dataset or checkpoint, and warn of smaller changes."""
    hint = "Restore it, or start another run."
    datasets: tuple[tuple[str, str, DatasetIndex | None], ...] = (
        ("data", "The dataset", job.dataset),
        ("val", "The dataset of --val", job.val),
    )
    for name, shown, dataset in datasets:
        if dataset is not None and manifest.get(f"{name}_fingerprint", "") not in ("", dataset.fingerprint()):
            raise DataError(f"{shown} is not the one that {job.run.folder} started with.", hint=hint)
    if manifest.get("base_sha256", job.writer.base_sha256) != job.writer.base_sha256:
        raise WeightsError(
            f"{job.config.from_weights} is not the checkpoint that {job.run.folder} started with.", hint=hint
        )
    if manifest.get("content_fingerprint") not in (None, job.dataset.content_fingerprint()):
        yield Warned(message="Some image files have changed since the run started; its result may differ.")
    if manifest.get("threads") not in (None, torch.get_num_threads()):
        yield Warned(
            message=f"The run started with {manifest['threads']} threads and continues with "
            f"{torch.get_num_threads()}: results may differ in the last bits."
        )


def _restore(job: Job) -> Generator[Event, None, TrainState | None]:
    """Load the newest saved state into the job and return it; None if there is none."""
    loaded = load_state(job.run.state)
    if loaded is None:
        if job.run.model.is_file():
            raise ConfigError(
                f"{job.run.folder} has a model but no saved state; resuming would overwrite the model.",
                hint="Restore the folder state/, or start another run with another --out.",
            )
        return None
    state, tensors, problems = loaded
    yield from (Warned(message=problem) for problem in problems)
    check_fits(tensors, job.learner.tensors(), job.run.folder)
    job.learner.load_tensors(tensors)
    is_kept = job.config.keep == "best" or state.step >= job.steps
    if state.best.step and is_kept:
        try:
            verify_checksum(job.run.model)
            job.learner.task.check_saved(job.run)
        except VitralError as error:
            state.best = BestEpoch()
            state.is_unscored = state.step >= job.steps  # measure and keep the last model again
            yield Warned(message=f"The best model so far is lost: {error.message} The best from here on is kept.")
    return state


def _measure_baseline(job: Job) -> Generator[Event, None, Baseline | None]:
    """Yield the events of the baseline and return it, if there is one."""
    baseline = None
    for event in job.learner.task.measure_baseline(job.learner.model, job.splits):
        if isinstance(event, Baseline):
            baseline = event
        yield event
    return baseline


def _started(job: Job, state: TrainState) -> Started:
    parameters = list(job.learner.model.parameters())
    return Started(
        folder=job.run.folder,
        step=state.step,
        steps=job.steps,
        steps_per_epoch=job.steps_per_epoch,
        parameters=sum(parameter.numel() for parameter in parameters),
        trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    )


def _log_events(events: Iterator[Event]) -> Iterator[Event]:
    """Yield the same events, and write them to log.txt once there is a run folder."""
    lines: list[str] = []
    run: Run | None = None
    for event in events:
        if isinstance(event, Started):
            run = Run(event.folder)
        if not isinstance(event, Stepped | Measuring | Saved):
            lines.append(as_log_line(event))
        if run is not None and lines:
            run.add_log(*lines)
            lines.clear()
        yield event


def check_objective(config: TrainConfig) -> None:
    """Raise ConfigError for a setting of the other objective, which nothing would read.

    TrainConfig itself does not check this: a recipe may bring such a setting before a later layer sets the objective.
    """
    other, section = ("masked-patches", "masking") if config.objective == "classify" else ("classify", "loss")
    for item in fields(SECTIONS[section]):
        value = getattr(getattr(config, section), item.name)
        if value not in (item.default, "none", "softmax"):  # config.toml of a run without labels has the last two
            name = f"{section}.{item.name}"
            raise ConfigError(
                f"{name}={value} is a setting of objective={other}, but this run has objective={config.objective}.",
                hint=f"Leave it out, or set {name}={item.default} if a recipe brings it.",
            )
    if config.objective == "masked-patches" and config.tune.what == "head":
        raise ConfigError(
            "tune.what=head trains the head alone, but objective=masked-patches has none.", hint="Use tune.what=all."
        )
