"""Compare what training made of a network with the linear probe that it started from, and keep the best."""

from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitral.evaluation.metrics import score
from vitral.inference.pipeline import ModelOutputs
from vitral.training.events import Chosen, Event
from vitral.training.probe import describe_candidate
from vitral.training.selection import choose_model, temperature_of
from vitral.training.sharding import shard_like
from vitral.training.state import TrainState
from vitral.training.step import swapped_weights
from vitral.training.tasks.classification import Classification

if TYPE_CHECKING:
    from vitral.training.job import Job

PROBE = "probe"
HALF_WAY = 0.5
"""The model half-way between probe and trained weights is often better than both (Wortsman et al. 2022)."""
Parameters = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TunedModel:
    """A model on the line from the linear probe to what training made of it."""

    trained: Parameters
    share: float
    """0 is the probe, 1 the trained model."""


def candidate_models(job: "Job", state: TrainState) -> dict[str, TunedModel]:
    """Return every model to compare, by name, the simplest first."""
    models = {PROBE: TunedModel(trained=job.start, share=0.0)}
    if not state.step:
        return models
    name, trained = job.config.tune.what, averaged_parameters(job)
    models[f"{name}, half-way"] = TunedModel(trained=trained, share=HALF_WAY)
    models[name] = TunedModel(trained=trained, share=1.0)
    if job.config.keep == "best" and state.best.step not in (0, state.step):
        models[f"{name}, epoch {state.best.epoch + 1}"] = TunedModel(trained=job.load_trained(), share=1.0)
    return models


def averaged_parameters(job: "Job") -> Parameters:
    """Return a copy of the trained parameters, averaged over the last steps if the run averages."""
    learner = job.learner
    with learner.averaged():
        return {name: p.detach().clone() for name, p in learner.model.named_parameters() if name in job.start}


def blend(probe: Parameters, trained: Parameters, share: float) -> Parameters:
    """Return the parameters at `share` of the way from the probe to the trained model."""
    return {name: torch.lerp(probe[name], tensor, share) for name, tensor in trained.items()}


def final_probe(job: "Job") -> Parameters:
    """Return the parameters of the probe that is fitted to the validation images as well, if there is one."""
    assert job.heads is not None
    if not job.config.refit:
        return job.start
    names = (name for name, _ in job.learner.model.head.named_parameters(prefix="head"))
    tensors = (tensor.to(job.learner.device) for tensor in job.heads[1])
    heads = {name: shard_like(tensor, job.start[name]) for name, tensor in zip(names, tensors, strict=True)}
    return {**job.start, **heads}


def compare_models(job: "Job", state: TrainState, models: Mapping[str, TunedModel]) -> Generator[Event, None, str]:
    """Measure every model on the validation images, record the scores, and return the name of the best."""
    if len(models) == 1 or job.splits.validation is job.splits.train:  # nothing to compare, or nothing to compare on
        return list(models)[-1]
    task, network = job.learner.task, job.learner.model
    assert isinstance(task, Classification)
    outputs: list[ModelOutputs] = []
    for model in models.values():
        with swapped_weights(network, blend(job.start, model.trained, model.share)):
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
        state.temperature = temperature_of(outputs[best])
    return winner


def adopt_model(job: "Job", state: TrainState, name: str, model: TunedModel) -> int:
    """Write a model as that of the run, and return the steps of its refit, for which the learner is ready.

    A probe is not trained any further: the one fitted to the validation images as well replaces it.
    """
    job.learner.restart(model.trained)
    state.best.step, state.share = 0 if name == PROBE else state.step, model.share
    probe = final_probe(job) if name == PROBE else job.start
    with swapped_weights(job.learner.model, blend(probe, model.trained, model.share)):
        save_calibrated(job, state)
    return 0 if name == PROBE else job.refit_steps(state.step)


def save_calibrated(job: "Job", state: TrainState) -> None:
    """Write the model with its logits divided by the temperature: label smoothing makes it too modest."""
    model = job.learner.model
    head = {name: p.detach() / state.temperature for name, p in model.named_parameters() if name.startswith("head.")}
    with swapped_weights(model, head):
        job.save_model()
