"""The training loop: a generator of events. It prints nothing; the caller decides what to show.

Everything random is a function of (seed, step) or (seed, epoch, image), and everything else is in the saved state, so
a run that was killed at any moment resumes to the same weights, bit for bit.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from vitral.collectives import gather
from vitral.data.batches import Batch
from vitral.data.dataset import Item
from vitral.evaluation.metrics import Scores
from vitral.model.network import Network
from vitral.runs import quote
from vitral.training.budget import drawing_seconds
from vitral.training.comparison import (
    PROBE,
    adopt_model,
    averaged_parameters,
    blend,
    candidate_models,
    compare_models,
    final_probe,
    save_calibrated,
)
from vitral.training.events import (
    EpochEnded,
    Event,
    Finished,
    Interrupted,
    Measuring,
    Saved,
    Started,
    Stepped,
    Warned,
)
from vitral.training.pacing import Planner
from vitral.training.parallel import share_batch
from vitral.training.records import list_candidates, write_report
from vitral.training.saving import StateSaver
from vitral.training.schedule import Pace
from vitral.training.selection import BestEpoch
from vitral.training.signals import Signals, catch_signals
from vitral.training.state import TrainState, save_state
from vitral.training.step import TrainingError, swapped_weights
from vitral.training.tasks.classification import Classification
from vitral.training.waiting import until_signal

if TYPE_CHECKING:
    from vitral.training.job import Job

Result = TypeVar("Result")
CURVE_POINTS = 200
"""Rows of losses.csv."""


def train_loop(job: "Job", state: TrainState) -> Iterator[Event]:
    """Train until the run is finished or a signal interrupts it."""
    parameters = list(job.learner.model.parameters())
    yield Started(
        folder=job.run.folder,
        step=state.step,
        steps=state.pace.end,
        steps_per_epoch=job.train.batches_per_epoch,
        parameters=sum(parameter.numel() for parameter in parameters),
        trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    )
    with catch_signals() as signals:
        try:
            yield from _train_stages(job, state, signals)
            if not signals:
                yield from _finish(job, state, signals)
        except (RuntimeError, OSError):  # a signal to all processes also ends those that load images
            if not signals:
                raise
        if signals and not job.run.results.is_file():
            command = f"vitral train --resume {quote(str(job.run.folder))}"  # the last saved state is intact
            yield Interrupted(step=state.step, resume=command, signal=signals.first)


def _train_stages(job: "Job", state: TrainState, signals: Signals) -> Iterator[Event]:
    """Train on the training images; then compare the result with the linear probe, and refit the better one."""
    if state.stage == "train":
        yield from _train(job, state, signals)
        if job.heads is not None and not signals:
            yield from _select(job, state, signals)
    if state.stage == "refit" and not signals:
        yield from _train(job, state, signals)
        if not signals:
            yield from _end_refit(job, state, signals)


def _save(job: "Job", state: TrainState, tensors: dict[str, Tensor] | None = None) -> Saved:
    return Saved(path=job.save_state(state, tensors), step=state.step)


def _train(job: "Job", state: TrainState, signals: Signals) -> Iterator[Event]:
    """Train to the last step of the stage, or until a signal; then the state is saved."""
    saver = StateSaver(partial(save_state, job.state_folder), job.config.save_seconds)
    try:
        yield from _train_epochs(job, state, signals, saver)
        yield from saver.wait()
    finally:
        saver.close()


def _train_epochs(job: "Job", state: TrainState, signals: Signals, saver: StateSaver) -> Iterator[Event]:
    started, seconds_before, first_step = time.perf_counter(), state.seconds, state.step
    pace, loader = state.pace, job.loader(state.stage)
    planner = Planner(job, state)
    if state.is_unscored:
        yield from _score_epoch(job, state, signals, (state.step - 1) // loader.batches_per_epoch)
        yield from saver.start(state, job.learner.tensors())
    while state.step < pace.end and not _should_stop(job, state) and not signals:
        epoch, number = divmod(state.step - pace.first, loader.batches_per_epoch)
        for part in until_signal(loader.epoch(epoch, start=number), signals):
            batch, factor = share_batch(part), job.lr_factor(state)
            loss = _step(job, state, batch, factor)
            state.seconds = seconds_before + time.perf_counter() - started
            speed = (state.step - first_step) / (state.seconds - seconds_before)
            yield from _log_step(job, state, loss, factor, epoch, speed)
            yield from saver.written()
            replanned = planner.replan(state)
            if replanned is not None:
                yield replanned
            signals.agree()
            if state.step >= pace.end or (state.step - pace.first) % loader.batches_per_epoch == 0:
                break  # the end of an epoch is saved after its scores
            if signals or saver.is_due() or replanned is not None:
                yield from saver.start(state, job.learner.tensors())
            if signals:
                return
        else:  # a signal ended the wait for a batch
            yield from saver.start(state, job.learner.tensors())
            return
        is_scored = state.stage == "train" and job.is_scored(epoch, state.step, pace.end)
        if is_scored:
            yield from _score_epoch(job, state, signals, epoch)
        planner.pause()
        state.seconds = seconds_before + time.perf_counter() - started
        is_kept = job.config.keep == "best" and is_scored
        if is_kept or signals or saver.is_due(at_epoch_end=True):
            yield from saver.start(state, job.learner.tensors())


def _log_step(job: "Job", state: TrainState, loss: float, factor: float, epoch: int, speed: float) -> Iterator[Event]:
    lr, end = job.config.optim.lr * factor, state.pace.end
    if state.step % max(1, end // CURVE_POINTS) == 0:
        job.run.add_row(job.run.losses, {"step": state.step, "loss": f"{loss:.6f}", "lr": f"{lr:.6g}"})
    yield Stepped(
        step=state.step,
        steps=end,
        epoch=epoch,
        loss=loss,
        lr=lr,
        images_per_second=speed * job.loader(state.stage).batch_size,
        seconds_left=(end - state.step) / speed,
    )


def _step(job: "Job", state: TrainState, batch: Batch, factor: float) -> float:
    """Train on one batch and return its loss."""
    images = job.loader(state.stage).images.items
    state.unreadable.add_batch(batch, images, job.run, job.config.max_bad_fraction)
    try:
        loss = job.learner.train_step(batch, state, factor)
    except TrainingError as error:
        raise TrainingError(
            f"Step {state.step}: {error.message}, so the weights were not updated. "
            f"{_name_images(batch, images, error.ranks)}.",
            hint=error.hint,
        ) from None
    state.step += 1
    state.loss_sum, state.loss_steps = state.loss_sum + loss, state.loss_steps + 1
    return loss


def _name_images(batch: Batch, images: Sequence[Item], ranks: Sequence[int]) -> str:
    """Return a text with some images of a step: those of the processes that caused an error, if they are known."""
    parts = gather([images[int(index)].key for index in batch.items])
    names, where = [key for part in parts for key in part], ""
    if 0 < len(ranks) < len(parts):
        names = [key for rank in ranks for key in parts[rank]]
        where = f" in process {', '.join(map(str, ranks))}"
    return f"Images of this step{where}: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"


def _should_stop(job: "Job", state: TrainState) -> bool:
    """Return whether to stop early, which only new scores can bring about."""
    epoch, rest = divmod(state.step, job.train.batches_per_epoch)
    is_scored = state.stage == "train" and not rest and job.is_scored(epoch - 1, state.step, state.pace.end)
    return is_scored and state.best.should_stop(epoch - 1, patience=job.config.patience)


# ---- scores ----


def _score_epoch(job: "Job", state: TrainState, signals: Signals, epoch: int) -> Iterator[Event]:
    """Measure an epoch. A signal does not wait for it; a resumed run then starts with it."""
    state.is_unscored = True
    scores = yield from _until_signal(_end_epoch(job, state, epoch), signals)
    state.is_unscored = scores is None


def _until_signal(events: Generator[Event, None, Result], signals: Signals) -> Generator[Event, None, Result | None]:
    """Yield the events and return their result, or None if a signal came while a split was measured."""
    with closing(events):
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                return end.value
            yield event
            if isinstance(event, Measuring) and signals.agree():
                return None


def _end_epoch(job: "Job", state: TrainState, epoch: int) -> Generator[Event, None, Scores]:
    with job.learner.averaged():
        measured = yield from job.learner.task.measure(job.learner.model, job.validation, "validation")
        state.unreadable.add(measured.unreadable, job.run)
        is_best = _update_best(job, state, measured.scores, epoch)
        if is_best:
            job.save_model()
    yield from _warn_unreadable(job, state)
    scores = measured.scores
    train_loss = state.loss_sum / max(1, state.loss_steps)
    state.loss_sum, state.loss_steps = 0.0, 0
    values = {"train_loss": train_loss, "loss": scores.loss, "top1": scores.top1, "top5": scores.top5}
    row = {name: f"{value:.6f}" for name, value in values.items()}
    job.run.add_row(job.run.metrics, {"epoch": epoch, "step": state.step, **row})
    yield EpochEnded(epoch=epoch, step=state.step, is_best=is_best, seconds=state.seconds, **values)
    return scores


def _update_best(job: "Job", state: TrainState, scores: Scores, epoch: int) -> bool:
    """Record the scores and return whether the model should be written."""
    if job.config.keep == "best":
        return state.best.update(scores, step=state.step, epoch=epoch)
    state.best = BestEpoch(top1=scores.top1, loss=scores.loss, step=state.step, epoch=epoch)
    return state.step >= state.pace.end


def _warn_unreadable(job: "Job", state: TrainState) -> Iterator[Event]:
    if message := state.unreadable.report_new(job.run):
        yield Warned(message=message)


# ---- the end ----


def _select(job: "Job", state: TrainState, signals: Signals) -> Iterator[Event]:
    """Make the best of the trained models and the linear probe the model of the run, and plan its refit."""
    models = candidate_models(job, state)
    winner = yield from _until_signal(compare_models(job, state, models), signals)
    if winner is None:
        yield _save(job, state)
        return
    if winner != PROBE and job.refit is not None:  # which trains on the images that calibrate novelty
        chosen = models[winner]
        with swapped_weights(job.learner.model, blend(job.start, chosen.trained, chosen.share)):
            yield from _fit_novelty(job, job.learner.model)
    steps = adopt_model(job, state, winner, models[winner])
    state.stage = "refit" if steps else "done"
    state.pace = Pace.start(state.step, steps)
    yield _save(job, state)


def _fit_novelty(job: "Job", model: Network) -> Iterator[Event]:
    """Write how unusual images look to a classifier, once.

    A probe's features are known from the start, and a refit trains on the images that calibrate it.
    """
    is_known = job.run.novelty.is_file()
    if isinstance(job.learner.task, Classification) and not job.is_custom and not is_known:
        yield from job.learner.task.fit_novelty(model, job.run, *job.plain_samples())


def _end_refit(job: "Job", state: TrainState, signals: Signals) -> Iterator[Event]:
    """Keep the refitted model, unless it is worse on the very images that it was refitted to.

    It stays as far from the probe, now that of all images, as the model that was chosen.
    """
    model = job.learner.model
    with swapped_weights(model, blend(final_probe(job), averaged_parameters(job), state.share)):
        measured = yield from _until_signal(job.learner.task.measure(model, job.validation, "validation"), signals)
        if measured is None:
            yield _save(job, state)
            return
        before = max(candidate["top1"] for candidate in state.tuned if candidate["chosen"])
        if measured.scores.top1 >= before:
            state.best.step = state.step
            save_calibrated(job, state)
        else:
            yield Warned(message="The refit made the model worse, so the model before it is kept.")
    state.stage = "done"
    yield _save(job, state)


def _finish(job: "Job", state: TrainState, signals: Signals) -> Iterator[Event]:
    """Measure the final model on the test split and write everything down."""
    tensors = job.learner.tensors()  # for a signal while the best model, which may replace them, is measured
    model = job.load_model() if state.best.is_set else job.learner.model
    measured = yield from _until_signal(job.learner.task.measure(model, job.timely_test(), "test"), signals)
    if measured is None:
        yield _save(job, state, tensors)
        return
    state.unreadable.add(measured.unreadable, job.run)
    yield from _warn_unreadable(job, state)
    yield from _fit_novelty(job, model)
    job.run.plots.mkdir(exist_ok=True)
    seconds = drawing_seconds(job.config.minutes)
    job.learner.task.draw(model, job.run, measured.report, job.splits.test, seconds=seconds)
    write_report(job, state, measured.report, list_candidates(job, state))
    if job.tokens is not None:
        job.tokens.remove()
    yield Finished(folder=job.run.folder, test=measured.report, best_step=state.best.step, train_seconds=state.seconds)
