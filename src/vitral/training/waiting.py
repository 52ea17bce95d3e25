"""Stop waiting for a batch when a signal comes: storage that hangs must not keep a run from saving its state."""

import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from vitral.collectives import is_shared
from vitral.training.signals import Signals

Item = TypeVar("Item")


class _WaitEndedError(Exception):
    """Raised by a signal during a wait."""


@contextmanager
def _raise_on_signal() -> Generator[None]:
    """Let the handlers of Ctrl-C and SIGTERM end the block with _WaitEndedError after they ran."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}

    def end_wait(number: int, frame: FrameType | None) -> None:
        handlers_now = dict(handlers)
        handlers.clear()  # the handler may install others, which stay
        handler = handlers_now[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        raise _WaitEndedError

    for number, handler in handlers.items():
        if callable(handler):
            signal.signal(number, end_wait)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def until_signal(items: Iterator[Item], signals: Signals) -> Iterator[Item]:
    """Yield the items. End when a signal comes while the next one is awaited; the caller's handler lists it first.

    A signal to all processes also ends those that load images, so their failure after it is not an error. Several
    processes that train together wait to the end, because all of them stop at the same step.
    """
    if is_shared():
        yield from items
        return
    while True:
        try:
            with _raise_on_signal():
                item = next(items)
        except (StopIteration, _WaitEndedError):
            return
        except (RuntimeError, OSError):
            if signals:
                return
            raise
        yield item
