"""One step of learning: a batch in, gradients, and the weights moved; with all state that the next step depends on."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import count, islice
from math import isfinite
from statistics import median

import torch
from torch import Tensor, nn

from vitral.data.batches import Batch, BatchLoader
from vitral.devices import give_back_holes, keep_freed_memory
from vitral.errors import VitralError
from vitral.model.network import Network
from vitral.training.config import TrainConfig
from vitral.training.objectives import Objective
from vitral.training.optimizer import Average, Optimizer, Swapped
from vitral.training.tuning import choose_parameters

STEPS_IN_RANGE = 1000
"""Without an overflow of float16, before a larger scale is tried again."""


class TrainingError(VitralError):
    """Training cannot go on."""


class Learner:
    """A network, what of it is trained, and how it moves."""

    def __init__(self, model: Network, config: TrainConfig, objective: Objective):
        self.model, self.config, self.objective = model, config, objective
        self.device = torch.device(config.device)
        choose_parameters(model, config.tune)
        model.to(self.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        model.gradient_checkpointing = config.gradient_checkpointing
        assert not isinstance(config.optim.lr, str)
        self.optimizer = Optimizer(model, config.optim, float(config.optim.lr), extra=objective.extra)
        self.together = nn.ModuleList([model, objective.extra])
        self.average = Average(self.together, config.ema) if config.ema else None
        self.loss_scale = 2.0**14 if config.precision == "float16" else 1.0  # lifts gradients into float16's range
        self.steps_in_range = 0

    def learn(self, batch: Batch, step: int, factor: float) -> float:
        """Moves the weights by one batch, and gives its loss. TrainingError before anything that is not finite."""
        torch.manual_seed(self.config.seed * 1_000_003 + step)  # dropout and stochastic depth of this step
        loss = self.gradients(batch, step)
        parameters = list(self.optimizer.parameters.values())
        if self.loss_scale != 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= self.loss_scale
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.optim.clip or float("inf"))
        if self.loss_scale > 1 and not torch.isfinite(norm):
            self.loss_scale /= 2  # too large for float16: this step is left out, and the next one is smaller
            self.steps_in_range = 0
        elif not torch.isfinite(norm) or not isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} and the norm of the gradients {norm.item()}",
                hint=f"Lower optim.lr ({self.optimizer.peak:g}), or look at these pictures.",
            )
        else:
            self.optimizer.step(factor)
            self.steps_in_range += 1
            if self.config.precision == "float16" and self.steps_in_range % STEPS_IN_RANGE == 0:
                self.loss_scale = min(2 * self.loss_scale, 2.0**16)  # or small gradients would stay lost for good
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.together)
        if self.device.type == "cpu" and (step + 1) % 100 == 0:  # it takes as long as a fraction of a step
            give_back_holes()
        return loss

    def gradients(self, batch: Batch, step: int) -> float:
        """Adds up the gradients of all micro-batches; gives the loss."""
        self.model.train()
        prepared = self.objective.prepare(batch, step)
        total = 0.0
        parts = self.config.accumulate
        for index in range(parts):
            share = slice(index * len(prepared) // parts, (index + 1) * len(prepared) // parts)
            if share.start == share.stop:
                continue
            with self.precision():
                answers = self.objective.answer(prepared, share)
            loss = self.objective.loss(answers, prepared, share)
            (loss * self.loss_scale).backward()
            total += loss.item()
        return total

    def time_a_step(self, loader: BatchLoader) -> float:
        """Seconds: the median of a few steps that change nothing, after a first one that finds everything cold."""
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        times = []
        start = time.perf_counter()
        batches = (batch for epoch in count() for batch in loader.epoch(epoch))
        for batch in islice(batches, 8):  # from batch to batch: loading takes time, too
            self.gradients(batch, step=0)
            self.optimizer.zero_grad()
            times.append(time.perf_counter() - start)
            start = time.perf_counter()
        self.model.load_state_dict(state)
        return median(times[1:]) * 1.1  # the optimizer

    def precision(self) -> AbstractContextManager[object]:
        if self.config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, str(self.config.precision)))

    def averaged(self) -> AbstractContextManager[None]:
        """The model with its averaged weights, where there are any."""
        return nullcontext() if self.average is None else Swapped(self.together, self.average.values)

    # ---- state ----

    def state(self) -> dict[str, Tensor]:
        tensors = {f"model:{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"extra:{name}": tensor for name, tensor in self.objective.extra.state_dict().items()}
        tensors |= {f"optimizer:{name}": tensor for name, tensor in self.optimizer.state().items()}
        if self.average is not None:
            tensors |= {f"average:{name}": tensor for name, tensor in self.average.values.items()}
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(":")
            parts.setdefault(part, {})[rest] = tensor
        self.model.load_state_dict(parts["model"])
        self.objective.extra.load_state_dict(parts.get("extra", {}))
        self.optimizer.load(parts.get("optimizer", {}))
        if self.average is not None:
            self.average.values = {name: tensor.to(self.device) for name, tensor in parts["average"].items()}
