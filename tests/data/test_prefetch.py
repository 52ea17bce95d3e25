"""Loading ahead keeps the order, bounds the memory and raises errors where they belong."""

import signal
import threading
import time
from types import FrameType

import pytest

from vitral.data.prefetch import load_ahead


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_results_are_in_order(threads: int) -> None:
    def load(job: int) -> int:
        time.sleep(0.001 * (job % 3))
        return job * job

    assert list(load_ahead(range(50), load, threads=threads, ahead=7)) == [(job, job * job) for job in range(50)]


def test_only_a_few_jobs_are_loaded_ahead() -> None:
    started: list[int] = []
    results = load_ahead(iter(range(100)), started.append, threads=2, ahead=5)
    for consumed in range(1, 20):
        next(results)
        assert len(started) <= consumed + 5
    results.close()
    assert len(started) <= 25
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("vitral-load")]


@pytest.mark.parametrize("threads", [0, 3])
def test_an_error_is_raised_in_its_place(threads: int) -> None:
    results = load_ahead([4, 2, 0, 1], lambda job: 8 // job, threads=threads, ahead=3)
    assert [next(results), next(results)] == [(4, 2), (2, 4)]
    with pytest.raises(ZeroDivisionError):
        next(results)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers of POSIX")
def test_a_signal_ends_the_wait_for_storage_that_hangs() -> None:
    hangs = threading.Event()

    def end_wait(number: int, frame: FrameType | None) -> None:
        raise InterruptedError

    previous = signal.signal(signal.SIGALRM, end_wait)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(InterruptedError):
            next(load_ahead([0, 1], lambda job: hangs.wait(60), threads=1, ahead=1))
    finally:
        signal.signal(signal.SIGALRM, previous)
        hangs.set()
