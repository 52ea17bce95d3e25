"""Load ahead in worker threads, in order and within bounded memory. Needs no torch."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

MAX_THREADS = 8
Job = TypeVar("Job")
Loaded = TypeVar("Loaded")


def loading_threads() -> int:
    """Return how many threads decode images: one per core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_THREADS, cores)


def load_ahead(
    jobs: Iterable[Job], load: Callable[[Job], Loaded], *, threads: int, ahead: int
) -> Generator[tuple[Job, Loaded]]:
    """Yield each job with its result, in order, while threads load up to `ahead` jobs after it.

    An exception of `load` is raised where its result would be. Without threads, everything happens in this one.
    A signal handler that raises ends the wait for a result at once, even if the storage hangs.
    """
    if threads < 1:
        yield from ((job, load(job)) for job in jobs)
        return
    waiting: deque[tuple[Job, Future[Loaded]]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="vitral-load")
    is_awaited = True
    try:
        for job in jobs:
            waiting.append((job, pool.submit(load, job)))
            if len(waiting) > ahead:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except Exception:
        is_awaited = False
        raise
    finally:
        pool.shutdown(wait=is_awaited, cancel_futures=True)
