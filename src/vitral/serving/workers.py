"""Run worker processes from the server: start them, send images, receive results, and replace those that die."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from vitral.errors import VitralError
from vitral.serving import frames
from vitral.serving.settings import ModelSource, ServeSettings

MAX_RESTART_SECONDS = 30.0
"""The longest pause before a worker that dies again and again is started again."""
HUNG_SECONDS = 60.0
"""A worker with images that sends nothing for so long is killed."""


class LoadError(VitralError):
    """A worker cannot load its model."""


class WorkerProcess:
    """One process and its pipes. Death is noticed at once, because the pipe closes."""

    def __init__(self, process: asyncio.subprocess.Process, info: dict[str, Any]):
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self.info = info
        self.numbers: set[int] = set()
        """Images that this worker has received and not answered."""
        self.last_message = time.monotonic()
        self._writer, self._reader = process.stdin, process.stdout

    @classmethod
    async def start(cls, source: ModelSource, settings: ServeSettings) -> "WorkerProcess":
        """Start a process and return it when its model is loaded and warm. Raise LoadError if that fails."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vitral.serving.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**20,
            start_new_session=True,  # Ctrl-C in a terminal reaches the server only
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(frames.pack(_worker_settings(source, settings)))
            head, content = await frames.receive(process.stdout)
        except (EOFError, ValueError, OSError) as error:
            await _end(process)
            raise LoadError(f"The worker of {source.name} ended while it loaded the model.") from error
        except asyncio.CancelledError:
            process.kill()
            raise
        if failure := head.get("failed"):
            await _end(process)
            problem = LoadError(failure["message"], hint=failure["hint"])
            problem.exit_code = failure["exit_code"]
            raise problem
        return cls(process, json.loads(content))

    async def send(self, number: int, task: str, options: dict[str, Any], content: bytes) -> None:
        """Send an image. A dead worker raises nothing here; `receive` ends."""
        self.last_message = time.monotonic() if not self.numbers else self.last_message
        self.numbers.add(number)
        with suppress(OSError):
            self._writer.write(frames.pack({"id": number, "task": task, "options": options}, content))
            await self._writer.drain()

    def cancel(self, number: int) -> None:
        """Let the worker drop an image."""
        self.numbers.discard(number)
        with suppress(OSError, RuntimeError):
            self._writer.write(frames.pack({"cancel": number}))

    async def receive(self, on_message: Callable[[dict[str, Any], bytes], None]) -> None:
        """Call `on_message` for every message until the worker ends."""
        with suppress(EOFError, ValueError, OSError):
            while True:
                head, content = await frames.receive(self._reader)
                self.last_message = time.monotonic()
                self.numbers.discard(head.get("id", -1))
                on_message(head, content)

    def is_hung(self) -> bool:
        return bool(self.numbers) and time.monotonic() - self.last_message > HUNG_SECONDS

    async def stop(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._writer.close()
        await _end(self.process, seconds=2.0)


def _worker_settings(source: ModelSource, settings: ServeSettings) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "model": asdict(source),
        "limits": asdict(settings.limits),
        "reject": settings.reject,
        "max_batch": settings.max_batch,
        "max_wait": settings.max_wait,
        "decoders": max(1, min(4, cores)),
    }


async def _end(process: asyncio.subprocess.Process, seconds: float = 0.5) -> None:
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), seconds)
    finally:
        if process.returncode is None:  # it hangs, or nobody waits any longer
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
