"""Ctrl-C and SIGTERM: the step that runs is finished, and every process of a run stops at the same one."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vitral.collectives import gather, is_shared


class Signals:
    """The signals that a run has to obey. False while there is none."""

    def __init__(self) -> None:
        self.caught: list[int] = []
        """Signals that reached this process."""
        self.agreed: list[int] = []
        """Signals that all processes have agreed on."""

    def __bool__(self) -> bool:
        return bool(self.agreed if is_shared() else self.caught)

    @property
    def first(self) -> int:
        return (self.agreed if is_shared() else self.caught)[0]

    def agree(self) -> bool:
        """Exchange signals with the other processes, which all call this at the same point. Return whether to stop."""
        if is_shared() and not self.agreed:
            self.agreed += [number for caught in gather(tuple(self.caught)) for number in caught]
        return bool(self)


@contextmanager
def catch_signals() -> Generator[Signals]:
    """Collect Ctrl-C or SIGTERM, so that the step can finish. A second signal ends the process as usual."""
    signals = Signals()
    previous: dict[int, Any] = {}

    def restore() -> None:
        while previous:
            signal.signal(*previous.popitem())

    def catch(number: int, _: FrameType | None) -> None:
        signals.caught.append(number)
        restore()
        if hasattr(signal, "SIGCHLD"):
            # A signal to all processes also ends those that load images, which torch would report wherever we are.
            signal.signal(signal.SIGCHLD, _ignore)

    _install(catch, previous)
    try:
        yield signals
    finally:
        restore()


def _install(catch: Callable[[int, FrameType | None], None], previous: dict[int, Any]) -> None:
    """Handle both signals and remember their former handlers; only the main thread may."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, catch)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing on a signal, unlike SIG_IGN, which children would inherit."""
