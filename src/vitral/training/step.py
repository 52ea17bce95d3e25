"""One training step: a batch in, gradients, updated weights; with all tensors that the next step depends on."""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count, islice, pairwise
from math import isfinite, lcm
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vitral.collectives import copy_from_first, current_world, from_first, gather
from vitral.data.batches import Batch
from vitral.devices import keep_freed_memory, release_freed_memory
from vitral.errors import VitralError
from vitral.model.network import Network
from vitral.model.noise import mix, noise_of
from vitral.training.config import ResolvedConfig
from vitral.training.gradients import add_up_gradients, clip_gradients
from vitral.training.optimizer import Optimizer
from vitral.training.products import OneDnnProducts
from vitral.training.sharding import LARGE_TENSOR, copy_values, is_sharded, local, root_of, shard_model
from vitral.training.state import TrainState
from vitral.training.state_files import SavedTensor, read_into
from vitral.training.tuning import choose_parameters

if TYPE_CHECKING:
    from vitral.training.tasks import Task
    from vitral.training.token_loader import Loader

INITIAL_LOSS_SCALE, MAX_LOSS_SCALE = 2.0**14, 2.0**16
SCALE_GROWTH_STEPS = 1000
"""Steps without an overflow of float16 before a larger loss scale is tried."""
TRIM_EVERY = 100
"""Steps between two returns of free memory to the system; one takes a fraction of a step."""


class TrainingError(VitralError):
    """Training cannot continue."""

    def __init__(self, message: str, *, hint: str | None = None, ranks: Sequence[int] = ()):
        """`ranks` are those of the processes that caused it, if only some of them did."""
        super().__init__(message, hint=hint)
        self.ranks = tuple(ranks)


class Learner:
    """A network with its task, its optimizer and its moving average."""

    def __init__(self, model: Network, task: "Task", config: ResolvedConfig):
        self.model, self.task, self.config = model, task, config
        self.device = torch.device(config.device)
        choose_parameters(model, config.tune)
        if root_of(model) is None:
            model.to(self.device)
        self.is_sharded = is_sharded(config)
        if self.device.type == "cpu":
            keep_freed_memory(below=LARGE_TENSOR if self.is_sharded else 2**30)
        model.gradient_checkpointing = config.gradient_checkpointing
        if self.is_sharded:
            shard_model(model, config)
        self.optimizer = Optimizer(model, config.optim, extra=task.extra)
        self.modules = nn.ModuleList([model, task.extra])
        self.average = MovingAverage(self.modules, config.ema) if config.ema else None
        self.world = current_world()
        self.micro_batches = lcm(config.accumulate, self.world.size)
        shared = task.extra if self.is_sharded else self.modules
        copy_from_first([*shared.parameters(), *self.modules.buffers()])
        self.uses_onednn = False
        """Whether oneDNN computes float32 products, which `choose_kernels` measures."""

    def train_step(self, batch: Batch, state: TrainState, lr_factor: float) -> float:
        """Update the weights from one batch and return its loss. TrainingError if a gradient is not finite."""
        losses = gather(self.compute_gradients(batch, state.step, state.loss_scale))
        loss = sum(losses)
        parameters = list(self.optimizer.parameters.values())
        add_up_gradients(parameters)
        if state.loss_scale != 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= state.loss_scale
        norm = clip_gradients(parameters, self.config.optim.clip)
        if state.loss_scale > 1 and not torch.isfinite(norm):
            state.loss_scale /= 2  # an overflow of float16: skip this step
            state.steps_in_range = 0
        elif not torch.isfinite(norm) or not isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} and the gradient norm {norm.item()}",
                hint=f"Lower optim.lr ({self.config.optim.lr:g}), or check these images.",
                ranks=[rank for rank, part in enumerate(losses) if not isfinite(part)],
            )
        else:
            self.optimizer.step(lr_factor)
            state.steps_in_range += 1
            if self.config.precision == "float16" and state.steps_in_range % SCALE_GROWTH_STEPS == 0:
                state.loss_scale = min(2 * state.loss_scale, MAX_LOSS_SCALE)  # keeps small gradients above zero
        self.optimizer.zero_grad()
        copy_from_first(list(self.modules.buffers()))  # running statistics, which each process has of its own images
        if self.average is not None:
            self.average.update(self.modules)
        if self.device.type == "cpu" and (state.step + 1) % TRIM_EVERY == 0:
            release_freed_memory()
        return loss

    def compute_gradients(self, batch: Batch, step: int, loss_scale: float) -> float:
        """Accumulate the gradients of the micro-batches of this process and return its share of the loss."""
        self.model.train()
        prepared = self.task.prepare(batch, step)
        total = 0.0
        for index, part, weight in self._divide(batch):
            torch.manual_seed(  # pyright: ignore[reportUnknownMemberType]
                self.config.seed * 1_000_003 + step + (index << 40)  # dropout of attention weights and packed lists
            )
            with noise_of(self._image_keys(batch, part, step)):
                with self.computing():
                    outputs = self.task.forward(prepared, part)
                loss = self.task.loss(outputs, prepared, part) * weight
                (loss * loss_scale).backward()  # pyright: ignore[reportUnknownMemberType]
            total += loss.item()
        return total

    def _image_keys(self, batch: Batch, part: slice, step: int) -> list[int]:
        """Return the keys of the noise of some images. A compiled network would be compiled again for others."""
        if self.task.is_compiled:
            return []
        return [mix(self.config.seed, step, int(item)) for item in batch.items[part]]

    def _divide(self, batch: Batch) -> Iterator[tuple[int, slice, int]]:
        """Yield the number of each micro-batch of this process, its images, and the weight of its loss.

        Micro-batches divide the whole batch, so that the number of processes changes none of them. Only an unreadable
        image moves the borders inside the part of a process. Processes that share the weights run the same number of
        micro-batches, so that one of them repeats an image with a weight of 0 where it has none.
        """
        parts, local = self.micro_batches, len(batch.items)
        whole, per_process = batch.whole, 1 if batch.share is None else self.world.size
        first, count = self.world.rank * parts // per_process, parts // per_process
        first = 0 if batch.share is None else first
        edges = [(first + index) * whole.size // parts - whole.start for index in range(count + 1)]
        edges = [0, *(min(max(0, edge), local) for edge in edges[1:-1]), local]
        for index, (start, stop) in enumerate(pairwise(edges)):
            if start < stop:
                yield first + index, slice(start, stop), 1
            elif self.is_sharded:
                yield first + index, slice(0, 1), 0

    def restart(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from other values of some parameters, with a new optimizer and a new average."""
        copy_values(self.model, tensors)
        self.optimizer = Optimizer(self.model, self.config.optim, extra=self.task.extra)
        self.average = MovingAverage(self.modules, self.config.ema) if self.config.ema else None

    def time_step(self, loader: "Loader", loss_scale: float) -> float:
        """Return the seconds of a step: the median of a few that change nothing, after a first one to warm up."""
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        times: list[float] = []
        start = time.perf_counter()
        batches = (batch for epoch in count() for batch in loader.epoch(epoch))
        for batch in islice(batches, 4):  # from batch to batch, so that loading counts
            self.compute_gradients(batch, 0, loss_scale)
            self.optimizer.zero_grad()
            times.append(time.perf_counter() - start)
            start = time.perf_counter()
        copy_values(self.model, state)
        return from_first(median(times[1:]) * 1.1)  # plus the optimizer

    @property
    def can_use_onednn(self) -> bool:
        """Return whether oneDNN could compute the products of this run."""
        is_plain = self.config.precision == "float32" and self.device.type == "cpu" and not self.is_sharded
        return is_plain and not self.task.is_compiled and not self.config.gradient_checkpointing

    def computing(self) -> AbstractContextManager[object]:
        """Compute a forward pass in the precision and with the kernels of the run."""
        if self.config.precision == "float32":
            return OneDnnProducts() if self.uses_onednn and self.can_use_onednn else nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, self.config.precision))

    def averaged(self) -> AbstractContextManager[None]:
        """Use the averaged weights, if there are any, inside the context."""
        return nullcontext() if self.average is None else swapped_weights(self.modules, self.average.values)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that a resumed run needs."""
        tensors = {f"model:{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"extra:{name}": tensor for name, tensor in self.task.extra.state_dict().items()}
        tensors |= {f"optimizer:{name}": tensor for name, tensor in self.optimizer.state().items()}
        if self.average is not None:
            tensors |= {f"average:{name}": tensor for name, tensor in self.average.values.items()}
        return tensors

    def load_tensors(self, tensors: Mapping[str, SavedTensor]) -> None:
        """Restore the tensors of a saved state, of which a process with a part of the weights reads that part."""
        parts: dict[str, dict[str, SavedTensor]] = {}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(":")
            parts.setdefault(part, {})[rest] = tensor
        read_into(self.model.state_dict(), parts["model"])
        read_into(self.task.extra.state_dict(), parts.get("extra", {}))
        self.optimizer.load(parts.get("optimizer", {}))
        if self.average is not None:
            read_into(self.average.values, parts["average"])


def initial_loss_scale(config: ResolvedConfig) -> float:
    return INITIAL_LOSS_SCALE if config.precision == "float16" else 1.0


class MovingAverage:
    """An exponential moving average of the weights."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.values: dict[str, Tensor] = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move towards the weights of the model. Frozen ones are equal already."""
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        for name, tensor in model.state_dict().items():
            if name in frozen:
                continue
            if tensor.is_floating_point():
                local(self.values[name]).lerp_(local(tensor), 1 - self.decay)
            else:
                self.values[name].copy_(tensor)


@contextmanager
def swapped_weights(model: nn.Module, values: Mapping[str, Tensor]) -> Generator[None]:
    """Use other values of some or all weights in a model inside the context."""
    original = {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if name in values}
    copy_values(model, values)
    try:
        yield
    finally:
        copy_values(model, original)
