"""A signal ends the wait for a batch, and only then."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.images import class_folders
from tests.training.short_runs import TINY, assert_same_run, train
from vitral.data.batches import Batch, BatchLoader
from vitral.training.entry import train_events
from vitral.training.events import Interrupted, Saved, Stepped
from vitral.training.signals import catch_signals
from vitral.training.waiting import until_signal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals between threads")


def send_soon() -> None:
    """Send SIGTERM to the main thread, which waits by then."""
    main = threading.main_thread().ident
    threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGTERM]).start()


def numbers(hang_at: int) -> Iterator[int]:
    for number in range(5):
        if number == hang_at:
            send_soon()
            time.sleep(60)
        yield number


def test_a_signal_ends_the_wait() -> None:
    began = time.monotonic()
    with catch_signals() as signals:
        assert list(until_signal(numbers(hang_at=3), signals)) == [0, 1, 2]
        assert signals.caught == [signal.SIGTERM]
    assert time.monotonic() - began < 10


def test_a_signal_between_two_items_does_not_lose_the_next() -> None:
    seen, before = [], signal.getsignal(signal.SIGTERM)
    with catch_signals() as signals:
        for number in until_signal(numbers(hang_at=9), signals):
            seen.append(number)
            if number == 1:
                signal.raise_signal(signal.SIGTERM)
        assert signals.caught == [signal.SIGTERM]
    assert seen == [0, 1, 2, 3, 4]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_failed_worker_is_an_error_without_a_signal() -> None:
    def fail() -> Iterator[int]:
        raise RuntimeError("worker exited")
        yield

    with pytest.raises(RuntimeError, match="worker exited"):
        list(until_signal(fail(), []))
    assert list(until_signal(fail(), [signal.SIGTERM])) == []


def test_a_run_that_waits_for_data_saves_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = class_folders(tmp_path / "photos", {"red": 20, "green": 20}, size=(16, 16))
    train(data, tmp_path / "whole")
    epoch = BatchLoader.epoch

    def hang(loader: BatchLoader, number: int = 0, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        for count, batch in enumerate(epoch(loader, number, start, stop)):
            if loader.shuffle and count == 2:
                send_soon()
                time.sleep(60)
            yield batch

    with monkeypatch.context() as patched:
        patched.setattr(BatchLoader, "epoch", hang)
        events = list(train_events(data, out=tmp_path / "run", **TINY))
    steps = [event.step for event in events if isinstance(event, Stepped)]
    assert isinstance(events[-1], Interrupted)
    assert events[-1].step == steps[-1] == 2
    assert [event.step for event in events if isinstance(event, Saved)] == [2]
    list(train_events(resume=tmp_path / "run"))
    assert_same_run(tmp_path / "whole", tmp_path / "run")
