"""Choose what only changes the speed of a run: its products, its threads, and whether its network is compiled.

They are measured before the first step of a long run on a CPU, recorded as choices, and repeated when it resumes.
"""

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from vitral.collectives import current_world
from vitral.errors import first_line
from vitral.inference.engines.compiled import find_compiler
from vitral.training.events import Chosen
from vitral.training.products import has_onednn
from vitral.training.step import initial_loss_scale

if TYPE_CHECKING:
    from vitral.training.job import Job

MIN_STEPS = 200
"""Shorter runs measure nothing."""
MIN_THREADS_SECONDS, MIN_COMPILE_SECONDS = 120.0, 300.0
"""Shorter runs do not pay for trying other numbers of threads, or for compiling, which takes about a minute."""
MIN_GAIN = 1.1
"""Smaller gains are within the noise of a few steps."""


def choose_kernels(job: "Job", *, may_compile: bool) -> "Job":
    """Return the job with the products, threads and network that are measured to be fastest, and their choices."""
    world = current_world()
    if job.steps < MIN_STEPS or job.budget is not None or job.config.device != "cpu" or world.size > 1:
        return job
    seconds = _time_step(job)
    if job.learner.can_use_onednn and has_onednn():
        seconds, choice = choose_products(job, seconds)
        job = job.with_choice(choice) if choice else job
    if seconds * job.steps >= MIN_THREADS_SECONDS:
        seconds, choice = choose_threads(job, seconds)
        job = job.with_choice(choice) if choice else job
    if may_compile and seconds * job.steps >= MIN_COMPILE_SECONDS and find_compiler() is not None:
        choice = choose_compiling(job, seconds)
        job = replace(job, config=replace(job.config, compile=bool(choice.value))).with_choice(choice)
    return job


def choose_products(job: "Job", seconds: float) -> tuple[float, Chosen | None]:
    """Compute with oneDNN if that is faster. Return the seconds of a step, and the choice unless it is torch's own."""
    job.learner.uses_onednn = True
    if (other := _time_step(job)) * MIN_GAIN <= seconds:
        reason = f"a step takes {other:.3f} s, and {seconds:.3f} s with torch's own products"
        return other, Chosen(name="products", value="onednn", reason=reason)
    job.learner.uses_onednn = False
    return seconds, None


def choose_threads(job: "Job", seconds: float) -> tuple[float, Chosen | None]:
    """Set the fastest number of threads. Return the seconds of a step, and the choice unless it is torch's own."""
    default = torch.get_num_threads()
    best, least = default, seconds
    for threads in _fewer_threads(default):
        torch.set_num_threads(threads)
        if (other := _time_step(job)) * MIN_GAIN <= least:
            best, least = threads, other
    torch.set_num_threads(best)
    if best == default:
        return seconds, None
    reason = f"a step takes {least:.2f} s, and {seconds:.2f} s with {default} threads"
    return least, Chosen(name="threads", value=best, reason=reason)


def _fewer_threads(default: int) -> Iterator[int]:
    if "OMP_NUM_THREADS" not in os.environ:
        yield from sorted({default // 2, 1} - {0, default}, reverse=True)


def choose_compiling(job: "Job", seconds: float) -> Chosen:
    """Compile the network and keep the program if it is faster than eager torch, which takes these seconds per step."""
    task, start = job.learner.task, time.perf_counter()
    task.compile_network(True)
    try:
        compiled = _time_step(job)
    except Exception as error:  # compilers raise nearly anything; eager torch remains
        task.compile_network(False)
        return Chosen(name="compile", value=False, reason=f"compiling failed: {first_line(error)}")
    spent = time.perf_counter() - start
    is_faster = compiled * MIN_GAIN <= seconds
    task.compile_network(is_faster)
    reason = f"a compiled step takes {compiled:.2f} s, and {seconds:.2f} s without ({spent:.0f} s to compile)"
    return Chosen(name="compile", value=is_faster, reason=reason)


def repeat_kernels(job: "Job", manifest: Mapping[str, Any]) -> None:
    """Use the threads and the products that were chosen when the run started."""
    for name, value, _ in manifest.get("choices", ()):
        if name == "threads":
            torch.set_num_threads(int(value))
        if name == "products":
            job.learner.uses_onednn = value == "onednn"


def _time_step(job: "Job") -> float:
    return job.learner.time_step(job.train, initial_loss_scale(job.config))
