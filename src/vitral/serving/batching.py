"""The queue of one model: admit images, hand them to workers, return results, and refuse what would wait too long.

The queue is bounded per model and per client. Waiting images cost their bytes only, and are dropped when the client
leaves or the deadline passes. A worker holds at most two batches, so that it decodes one while it computes the other.
"""

import asyncio
import sys
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vitral.errors import VitralError
from vitral.serving.metrics import Metrics
from vitral.serving.refusals import RequestError, busy, draining
from vitral.serving.settings import ModelSource, ServeSettings
from vitral.serving.workers import MAX_RESTART_SECONDS, WorkerProcess


@dataclass(frozen=True, slots=True)
class Result:
    """The JSON of one image, and the size of the image."""

    content: bytes
    info: dict[str, Any]


@dataclass(eq=False, slots=True)
class QueuedImage:
    """An image that waits for its result."""

    number: int
    task: str
    content: bytes
    options: dict[str, Any]
    client: str
    future: "asyncio.Future[Result]"
    worker: WorkerProcess | None = field(default=None)


class ModelQueue:
    """Images of one model, in order of arrival, and the workers that compute them."""

    def __init__(self, source: ModelSource, settings: ServeSettings, metrics: Metrics):
        self.source = source
        self.settings = settings
        self.metrics = metrics
        self.info: dict[str, Any] = {}
        self.workers: list[WorkerProcess] = []
        """Workers that are alive."""
        self._waiting: deque[QueuedImage] = deque()
        self._images: dict[int, QueuedImage] = {}
        self._per_client: Counter[str] = Counter()
        self._changed = asyncio.Condition()
        self._next_number = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._rate = 0.0
        self._is_stopping = False

    # ---- life ----

    async def start(self) -> None:
        """Start the workers and wait until they are ready. Raise LoadError if the model cannot be loaded."""
        starting = [WorkerProcess.start(self.source, self.settings) for _ in range(self.settings.workers)]
        results = await asyncio.gather(*starting, return_exceptions=True)
        started = [result for result in results if isinstance(result, WorkerProcess)]
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            await asyncio.gather(*(worker.stop() for worker in started))
            raise failures[0]
        self.info = started[0].info
        self._tasks = [asyncio.create_task(self._keep_alive(worker)) for worker in started]

    async def stop(self) -> None:
        """Refuse what still waits and end the workers."""
        self._is_stopping = True
        self.refuse_all()
        workers = list(self.workers)  # a cancelled task forgets its worker
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in workers))

    def refuse_all(self) -> None:
        """Refuse the images that have no result yet."""
        for image in self._images.values():
            self._fail(image, draining())

    @property
    def is_ready(self) -> bool:
        return bool(self.workers)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def pending(self) -> int:
        """The number of images without a result."""
        return len(self._images)

    # ---- requests ----

    async def compute(
        self, task: str, contents: Sequence[bytes], options: dict[str, Any], client: str
    ) -> list[Result | RequestError]:
        """Return a result or an error per image. Raise RequestError if the images are not admitted."""
        self._admit(len(contents), client)
        images = [self._put(task, content, options, client) for content in contents]
        async with self._changed:
            self._changed.notify_all()
        futures = [image.future for image in images]
        try:
            _, late = await asyncio.wait(futures, timeout=self.settings.timeout)
            if late:
                self.metrics.refused.labels("timeout").inc()
        finally:
            for image in images:
                self._drop(image)
        return [_outcome(future) for future in futures]

    def _admit(self, count: int, client: str) -> None:
        if not self.workers:
            self._refuse(busy("not_ready", "The model is being loaded.", 2))
        if self._per_client[client] + count > self.settings.max_per_client:
            limit = self.settings.max_per_client
            message = f"This client has {self._per_client[client]} images in the queue (limit: {limit})."
            self._refuse(RequestError(429, "too_many_requests", message, retry_after=1))
        computing = self.settings.max_batch * len(self.workers)
        if len(self._images) + count > self.settings.max_queue + computing:
            self._refuse(busy("queue_full", "The queue is full.", self._seconds_to_empty()))

    def _refuse(self, error: RequestError) -> None:
        self.metrics.refused.labels(error.code).inc()
        raise error

    def _seconds_to_empty(self) -> float:
        return len(self._images) / self._rate if self._rate else 1.0

    def _put(self, task: str, content: bytes, options: dict[str, Any], client: str) -> QueuedImage:
        self._next_number += 1
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        image = QueuedImage(self._next_number, task, content, options, client, future)
        self._images[image.number] = image
        self._waiting.append(image)
        self._per_client[client] += 1
        return image

    def _drop(self, image: QueuedImage) -> None:
        """Forget an image: its result was returned, its client left, or its deadline passed."""
        if self._images.pop(image.number, None) is None:
            return
        self._per_client[image.client] -= 1
        if not self._per_client[image.client]:
            del self._per_client[image.client]
        if image.future.done():
            image.future.exception()  # asyncio reports exceptions that nobody looked at
        else:
            self.metrics.dropped.inc()
            image.future.cancel()
            if image.worker is None:
                with suppress(ValueError):
                    self._waiting.remove(image)
            else:
                image.worker.cancel(image.number)

    def _fail(self, image: QueuedImage, error: RequestError) -> None:
        if not image.future.done():
            image.future.set_exception(error)

    # ---- workers ----

    async def _keep_alive(self, worker: WorkerProcess) -> None:
        """Feed a worker until it dies, refuse its images at once, and start another one."""
        pause = 0.0
        while True:
            await self._feed_until_death(worker)
            await worker.stop()
            if self._is_stopping:
                return
            print(f"vitral: a worker of {self.source.name} ended and is started again.", file=sys.stderr, flush=True)
            self.metrics.restarts.inc()
            while True:
                await asyncio.sleep(pause)
                pause = min(MAX_RESTART_SECONDS, 2 * pause + 0.1)
                try:
                    worker = await WorkerProcess.start(self.source, self.settings)
                    break
                except VitralError as error:
                    print(f"vitral: {error}", file=sys.stderr, flush=True)
            pause = 0.0

    async def _feed_until_death(self, worker: WorkerProcess) -> None:
        self.workers.append(worker)
        feeding = asyncio.create_task(self._feed(worker))
        try:
            await worker.receive(lambda head, content: self._receive(worker, head, content))
        finally:
            self.workers.remove(worker)
            feeding.cancel()
            error = busy("worker_lost", "The worker that computed this image ended. Send the image again.", 1)
            for number in list(worker.numbers):
                if number in self._images:
                    self._fail(self._images[number], error)
            if not self.workers:  # nobody computes what waits
                for image in list(self._waiting):
                    self._fail(image, error)
                self._waiting.clear()

    async def _feed(self, worker: WorkerProcess) -> None:
        """Send images while the worker has room for another batch."""
        room = 2 * self.settings.max_batch
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting and len(worker.numbers) < room)
                image = self._waiting.popleft()
                image.worker = worker
            await worker.send(image.number, image.task, image.options, image.content)
            image.content = b""

    def _receive(self, worker: WorkerProcess, head: dict[str, Any], content: bytes) -> None:
        if "batch" in head:
            self.metrics.batch_size.observe(head["batch"])
            self.metrics.computing.labels(self.source.name).inc(head["seconds"])
            rate = head["batch"] / max(head["seconds"], 1e-4) * len(self.workers)
            self._rate = rate if not self._rate else 0.8 * self._rate + 0.2 * rate
            return
        image = self._images.get(head["id"])
        if image is not None and not image.future.done():
            if error := head.get("error"):
                self.metrics.bad_images.labels(error["code"]).inc()
                image.future.set_exception(RequestError(**error))
            else:
                image.future.set_result(Result(content, head["info"]))
        asyncio.ensure_future(self._notify())  # noqa: RUF006 (short, and nobody waits for it)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def kill_hung_workers(self) -> None:
        """Kill workers that have images and have sent nothing for a minute; they are started again."""
        for worker in self.workers:
            if worker.is_hung():
                with suppress(ProcessLookupError):
                    worker.process.kill()


def _outcome(future: "asyncio.Future[Result]") -> Result | RequestError:
    if future.cancelled():
        return busy("timeout", "The image waited too long in the queue.", 5)
    error = future.exception()
    if isinstance(error, RequestError):
        return error
    return future.result()
