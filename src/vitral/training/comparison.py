"""Compare what training made of a network with the linear probe that it started from, and keep the best."""

from collections.abc import Generator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitral.evaluation.metrics import fit_temperature, score
from vitral.inference.pipeline import ModelOutputs
from vitral.training.events import Chosen, Event
from vitral.training.probe import describe_candidate, with_head
from vitral.training.selection import choose_model
from vitral.training.state import TrainState
from vitral.training.step import swapped_weights
from vitral.training.tasks.classification import Classification

if TYPE_CHECKING:
    from vitral.training.job import Job

PROBE = "probe"
Parameters = Mapping[str, Tensor]


def candidate_models(job: "Job", state: TrainState) -> dict[str, Parameters]:
    """Return the trained parameters of every model to compare, by name, the simplest first.

    Half-way between the probe and the trained model lies one that is often better than both (Wortsman et al. 2022).
    """
    models: dict[str, Parameters] = {PROBE: job.start}
    if not state.step:
        return models
    learner, name = job.learner, job.config.tune.what
    with learner.averaged():
        trained = {key: p.detach().clone() for key, p in learner.model.named_parameters() if key in job.start}
    models[f"{name}, half-way"] = {key: torch.lerp(job.start[key], tensor, 0.5) for key, tensor in trained.items()}
    models[name] = trained
    if job.config.keep == "best" and state.best.step not in (0, state.step):
        models[f"{name}, epoch {state.best.epoch + 1}"] = job.load_trained()
    return models


def compare_models(job: "Job", state: TrainState, models: Mapping[str, Parameters]) -> Generator[Event, None, str]:
    """Measure every model on the validation images, record the scores, and return the name of the best."""
    if len(models) == 1 or job.splits.validation is job.splits.train:  # nothing to compare, or nothing to compare on
        return list(models)[-1]
    task, network = job.learner.task, job.learner.model
    assert isinstance(task, Classification)
    outputs: list[ModelOutputs] = []
    for parameters in models.values():
        with swapped_weights(network, parameters):
            outputs.append((yield from task.predict(network, job.validation)))
    best, reason = choose_model(outputs)
    winner = list(models)[best]
    for name, output in zip(models, outputs, strict=True):
        if name == PROBE:  # it is listed already
            continue
        scores = score(output.outputs, output.labels)
        evidence = f"{scores.images:,} validation images"
        candidate = describe_candidate(name, scores, evidence, seconds=state.seconds, chosen=name == winner)
        state.tuned.append(asdict(candidate))
        yield candidate
    yield Chosen(name="model", value=winner, reason=reason)
    if winner != PROBE and outputs[best].labels.ndim == 1:
        logits, labels = outputs[best].outputs, outputs[best].labels
        # As in Platt scaling, a few images that are all correct must not make the model certain.
        state.temperature = fit_temperature(logits, labels, smoothing=1 / (len(labels) + 2))
    return winner


def adopt_model(job: "Job", state: TrainState, name: str, parameters: Parameters) -> int:
    """Write a model as that of the run, and return the steps of its refit, for which the learner is ready.

    A probe is not trained any further: the one fitted to the validation images as well replaces it.
    """
    job.learner.restart(parameters)
    if name == PROBE and job.config.refit:
        assert job.heads is not None
        with_head(job.learner.model, job.heads[1])
    state.best.step = 0 if name == PROBE else state.step
    save_calibrated(job, state)
    return 0 if name == PROBE else job.refit_steps(state.step)


def save_calibrated(job: "Job", state: TrainState) -> None:
    """Write the model with its logits divided by the temperature: label smoothing makes it too modest."""
    model = job.learner.model
    head = {name: p.detach() / state.temperature for name, p in model.named_parameters() if name.startswith("head.")}
    with swapped_weights(model, head):
        job.save_model()
