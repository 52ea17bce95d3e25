"""Start and resume runs."""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from vitral.collectives import from_first, join_world
from vitral.errors import ConfigError, DataError, VitralError, WeightsError
from vitral.inference.novelty import fit_novelty
from vitral.model.network import Network
from vitral.runs import Run
from vitral.training.comparison import save_calibrated
from vitral.training.config import SECTIONS, ResolvedConfig, TrainConfig
from vitral.training.events import Candidate, Chosen, Event, Finished, Started, Warned, as_log_line
from vitral.training.job import Job
from vitral.training.kernels import repeat_kernels
from vitral.training.loop import train_loop
from vitral.training.parallel import find_restarted, mirror_run, only_first
from vitral.training.prepare import prepare
from vitral.training.records import make_manifest, write_findings
from vitral.training.request import Request, collect_settings, pop_network, read_run_settings, reopen
from vitral.training.schedule import Pace
from vitral.training.selection import BestEpoch
from vitral.training.settings import as_toml, flatten
from vitral.training.sharding import is_sharded
from vitral.training.state import TrainState, check_fits, open_state
from vitral.training.step import initial_loss_scale


def train_events(
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    recipe: str | None = None,
    config: str | Path | None = None,
    **settings: Any,
) -> Iterator[Event]:
    """Train and yield events. Settings are those of TrainConfig, over those of `recipe` and `config` (a TOML file).

    `resume` continues a run; settings may be repeated but must be the same.
    """
    if resume is None and (restarted := find_restarted(None if out is None else Path(out))):
        return resume_run(restarted, read_run_settings(restarted), network=pop_network(settings))
    if resume is None:
        return start_run(collect_settings(data, flatten(settings), recipe=recipe, config=config), out=out)
    network = pop_network(settings)
    run, resolved = reopen(Path(resume), data, settings, recipe=recipe, config=config, out=out)
    return resume_run(run, resolved, network=network)


def start_run(request: Request, *, out: str | Path | None = None) -> Iterator[Event]:
    """Start a new run."""
    check_objective(request.config)
    join_world()
    folder = None if out is None else Path(out)
    with only_first() as is_writer:
        if folder is not None and is_writer:
            Run.check_free(folder)
    return _log_events(_start(request, folder))


def _start(request: Request, folder: Path | None) -> Iterator[Event]:
    job = yield from prepare(request, folder)
    with job.run.claim():
        job.run.write_config(as_toml(job.config))
        job.run.write_manifest(make_manifest(job))
        write_findings(job)
        yield from train_loop(job, start_state(job))


def start_state(job: Job) -> TrainState:
    """Return the state before the first step. A linear probe is the best model so far, and is saved with it."""
    state = TrainState(loss_scale=initial_loss_scale(job.config), pace=Pace.start(0, job.steps))
    job.run.state.mkdir(exist_ok=True)
    if job.probe is not None:
        state.best.update(job.probe.scores, step=0, epoch=-1)
        job.probe.save(job.run.probe)
        state.unreadable.add(job.probe.unreadable, job.run)
        if not job.steps and len(job.probe.features) > 1:  # the features do not change any more
            fit_novelty(job.probe.features, job.probe.labels).save(job.run.novelty)
        job.save_state(state)
        job.save_model()
    return state


def resume_run(run: Run, config: ResolvedConfig, *, network: Network | None = None) -> Iterator[Event]:
    """Continue a run; a finished one yields its result."""
    join_world()
    if report := from_first(run.read_report()):
        yield Warned(message=f"{run.folder} is finished; there is nothing to resume.")
        yield Finished(
            folder=run.folder, test=report["test"], best_step=report["best_step"], train_seconds=report["train_seconds"]
        )
        return
    yield from _log_events(_resume(run, config, network))


def _resume(original: Run, config: ResolvedConfig, network: Network | None) -> Iterator[Event]:
    run = mirror_run(original, is_sharded=is_sharded(config))
    with run.claim():
        job = yield from prepare(Request(config=config, network=network), run)
        manifest = run.read_manifest()
        repeat_kernels(job, manifest)
        if manifest:
            yield from _check_unchanged(job, manifest)
        else:
            manifest = make_manifest(job)
            yield Warned(message=f"{run.manifest} is missing, so changes of the dataset cannot be detected.")
        choices = tuple(Chosen(name=name, value=value, reason=reason) for name, value, reason in manifest["choices"])
        candidates = tuple(Candidate(**candidate) for candidate in manifest.get("candidates", ()))
        job = replace(
            job,
            choices=choices,
            candidates=job.candidates or candidates,
            findings=job.findings or manifest.get("findings", {}),
        )
        state = yield from _restore(job, original)
        if state is None:
            yield Warned(message="The run ended before its first state was saved; it starts over.")
            state = start_state(job)
            manifest["candidates"] = make_manifest(job)["candidates"]
        run.drop_rows_after(state.step)
        manifest["resumes"] = [*manifest["resumes"], state.step]
        run.write_manifest(manifest)
        yield from train_loop(job, state)


def _check_unchanged(job: Job, manifest: Mapping[str, Any]) -> Iterator[Event]:
    """Raise an error if the run started with another dataset or checkpoint, and warn of smaller changes."""
    hint = "Restore it, or start another run."
    for name, dataset in {"data": job.dataset, "val": job.val}.items():
        if dataset is not None and manifest.get(f"{name}_fingerprint", "") not in ("", dataset.fingerprint()):
            shown = "The dataset of --val" if name == "val" else "The dataset"
            raise DataError(f"{shown} is not the one that {job.run.folder} started with.", hint=hint)
    if manifest.get("base_sha256", job.base_sha256) != job.base_sha256:
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


def _restore(job: Job, original: Run) -> Generator[Event, None, TrainState | None]:
    """Load the newest saved state into the job and return it; None if there is none."""
    loaded = open_state(from_first(original.state))
    if loaded is None:
        was_removed = not original.state.is_dir()  # a run that was killed before its first state has an empty folder
        if from_first(was_removed and job.run.model.is_file()):
            raise ConfigError(
                f"{job.run.folder} has a model but no saved state; resuming would overwrite the model.",
                hint="Restore the folder state/, or start another run with another --out.",
            )
        return None
    state, tensors, problems = loaded
    yield from (Warned(message=problem) for problem in problems)
    check_fits(tensors, job.learner.tensors(), job.run.folder)
    job.learner.load_tensors(tensors)
    if not state.pace.end:  # saved by an older version
        state.pace = Pace.start(0, job.steps)
    is_at_end = state.step >= state.pace.end
    is_kept = job.config.keep == "best" or is_at_end
    if state.best.is_set and not state.best.step and not from_first(job.run.model.is_file()):
        job.save_model()  # killed between the first state and the model of the probe, which are the same
    if state.best.is_set and is_kept:
        try:
            with only_first() as is_writer:
                if is_writer or not job.learner.is_sharded:
                    job.check_saved()
        except VitralError as error:
            state.best = BestEpoch()
            state.is_unscored = state.stage == "train" and is_at_end  # measure and keep the last model again
            yield Warned(message=f"The best model so far is lost: {error.message} The best from here on is kept.")
            if state.stage != "train":  # the state has the model that was chosen
                with job.learner.averaged():
                    save_calibrated(job, state)
    return state


def _log_events(events: Iterator[Event]) -> Iterator[Event]:
    """Yield the same events, and write them to log.txt once there is a run folder."""
    lines: list[str] = []
    run: Run | None = None
    for event in events:
        if isinstance(event, Started):
            run = Run(event.folder)
        if line := as_log_line(event):
            lines.append(line)
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
