"""Save states while training continues: the loop waits for a copy of the tensors, and a thread writes it.

At most one state is being written. The next one waits for it, and so do a signal and the end of a stage, so that a
run that has ended has no state in flight. A failed save is raised at the next of these points.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

from torch import Tensor
from torch.distributed.tensor import DTensor

from vitral.collectives import current_world, from_first
from vitral.training.events import Saved
from vitral.training.parallel import only_first
from vitral.training.state import TrainState

Write = Callable[[TrainState, Mapping[str, Tensor]], Path]
SAVE_COST = 20
"""A state is saved at most every so many times its own duration."""


class StateSaver:
    """Decides when a state is due, and writes it in a thread.

    A state is due after `seconds`, but never so often that saving takes over, and not while another is being written.
    """

    def __init__(self, write: Write, seconds: float):
        self.write, self.seconds, self.duration = write, seconds, 0.0
        self.last = time.perf_counter()
        self.pending: Future[Saved] | None = None
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vitral-save")

    def is_due(self, *, at_epoch_end: bool = False) -> bool:
        wait = self.seconds if at_epoch_end else max(self.seconds, SAVE_COST * self.duration)
        is_free = at_epoch_end or self.pending is None or self.pending.done()
        return from_first(is_free and time.perf_counter() - self.last > wait)

    def start(self, state: TrainState, tensors: Mapping[str, Tensor]) -> Iterator[Saved]:
        """Copy a state and start to write it, once the one before it is written. Yield those that are."""
        yield from self.wait()
        if any(isinstance(tensor, DTensor) for tensor in tensors.values()):  # all processes write their parts together
            yield self._write(state, tensors)
        elif current_world().is_first:
            copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
            self.pending = self.thread.submit(self._write, deepcopy(state), copies)
        self.last = time.perf_counter()

    def _write(self, state: TrainState, tensors: Mapping[str, Tensor]) -> Saved:
        start = time.perf_counter()
        path = self.write(state, tensors)
        self.duration = time.perf_counter() - start
        return Saved(path=path, step=state.step)

    def written(self) -> Iterator[Saved]:
        """Yield the state in flight if it is on the disk by now, without waiting for it."""
        if self.pending is not None and self.pending.done() and self.pending.exception() is None:
            saved, self.pending = self.pending.result(), None
            yield saved

    def wait(self) -> Iterator[Saved]:
        """Wait for the state in flight, if there is one, and yield it. Every process raises the error of a failure."""
        with only_first():
            pending, self.pending = self.pending, None
            saved = None if pending is None else pending.result()
        if saved is not None:
            yield saved

    def close(self) -> None:
        """Wait for the thread, whatever becomes of its state."""
        self.thread.shutdown(wait=True)
