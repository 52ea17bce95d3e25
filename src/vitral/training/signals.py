"""Ctrl-C and SIGTERM are remembered, and the step in hand is finished first."""

import signal
import threading
from contextlib import AbstractContextManager
from typing import Any


class Signals(AbstractContextManager["Signals"]):
    """``caught`` is the number of the signal that came; a second one ends the process as usual."""

    def __init__(self) -> None:
        self.caught: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self.remember)
        return self

    def remember(self, number: int, _: object) -> None:
        self.caught = number
        self.restore()
        if hasattr(signal, "SIGCHLD"):
            # A signal to all also ends the processes that load pictures, and torch would say so wherever we are.
            signal.signal(signal.SIGCHLD, lambda *_: None)

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}

    def __exit__(self, *_: object) -> None:
        self.restore()
