"""The state of a running server: its models, its metrics, and the bodies that it is receiving."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request

from vitral.serving.batching import ModelQueue, Result
from vitral.serving.metrics import Metrics
from vitral.serving.refusals import RequestError, busy, draining, invalid
from vitral.serving.settings import ServeSettings
from vitral.serving.uploads import ParsedBody, check_image, parse_body


class ClientLeftError(Exception):
    """The client closed the connection before its response was ready."""


class Service:
    """The models of a server by name, and what its routes share."""

    def __init__(self, settings: ServeSettings):
        self.settings = settings
        self.metrics = Metrics()
        self.queues = {source.name: ModelQueue(source, settings, self.metrics) for source in settings.models}
        self.is_draining = False
        self._has_drained = False
        self._accepted = 0
        self._body_deadlines: set[asyncio.Timeout] = set()
        self.buffered = 0
        """Bytes of all bodies in memory."""
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load all models. Raise LoadError, after ending what has started, if one cannot be loaded."""
        results = await asyncio.gather(*(queue.start() for queue in self.queues.values()), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            await self.stop()
            raise failures[0]
        for name, queue in self.queues.items():
            self.metrics.queue.labels(name).set_function(lambda queue=queue: queue.waiting)
            self.metrics.pending.labels(name).set_function(lambda queue=queue: queue.pending)
            self.metrics.workers.labels(name).set_function(lambda queue=queue: len(queue.workers))
        self._watch = asyncio.create_task(self._kill_hung_workers())

    async def stop(self) -> None:
        """End all workers."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(*(queue.stop() for queue in self.queues.values()))

    async def drain(self) -> None:
        """Refuse new requests, wait until accepted ones have results, and refuse those that take too long."""
        self.is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_seconds):
                while self._accepted:
                    await asyncio.sleep(0.02)
        self._has_drained = True
        for queue in self.queues.values():
            queue.refuse_all()
        for deadline in self._body_deadlines:
            if not deadline.expired():
                deadline.reschedule(0)

    async def _kill_hung_workers(self) -> None:
        while True:
            await asyncio.sleep(1)
            for queue in self.queues.values():
                queue.kill_hung_workers()

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and all(queue.is_ready for queue in self.queues.values())

    def queue_of(self, name: str | None) -> ModelQueue:
        """Return the queue of a model; without a name, that of the first one."""
        if name is None:
            return next(iter(self.queues.values()))
        if name not in self.queues:
            raise RequestError(404, "unknown_model", "There is no model of this name. GET /api/models lists them.")
        return self.queues[name]

    @asynccontextmanager
    async def receive_images(self, request: Request) -> AsyncIterator[ParsedBody]:
        """Read and check the images of a request. It is accepted now, and its bytes count until the block ends."""
        if self.is_draining:
            self.metrics.refused.labels("draining").inc()
            raise draining()
        body = bytearray()
        counted = 0
        self._accepted += 1
        try:
            async with self._deadline():
                async for chunk in request.stream():
                    body += chunk
                    self.buffered += len(chunk)
                    counted += len(chunk)
                    self._check_buffered(len(body))
            parsed = parse_body(bytes(body), request.headers.get("content-type", ""), self.settings.limits)
            if not body:
                raise invalid("empty", "The body is empty.")
            del body
            yield parsed
        except ClientDisconnect as error:
            raise ClientLeftError from error
        finally:
            self.buffered -= counted
            self._accepted -= 1

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        """Limit the time for a body to arrive, also by the end of the drain."""
        try:
            async with asyncio.timeout(self.settings.limits.body_seconds) as deadline:
                self._body_deadlines.add(deadline)
                try:
                    yield
                finally:
                    self._body_deadlines.discard(deadline)
        except TimeoutError as error:
            slow = RequestError(408, "timeout", "The body took too long to arrive.")
            raise (draining() if self._has_drained else slow) from error

    def _check_buffered(self, size: int) -> None:
        limits = self.settings.limits
        if size > limits.body:
            raise RequestError(413, "too_large", f"The body may have at most {limits.body} bytes.")
        if self.buffered > limits.buffered:
            self.metrics.refused.labels("memory").inc()
            raise busy("memory", "The server is receiving too many bodies at once.", 1)

    async def compute(
        self, request: Request, queue: ModelQueue, task: str, parsed: ParsedBody, options: dict[str, Any]
    ) -> list[Result | RequestError]:
        """Return a result or an error per image, in order. Raise ClientLeftError if the client leaves meanwhile."""
        outcomes: list[Result | RequestError | None] = []
        for image in parsed.images:
            try:
                check_image(image.content, self.settings.limits)
                outcomes.append(None)
            except RequestError as error:
                self.metrics.bad_images.labels(error.code).inc()
                outcomes.append(error)
        contents = [image.content for image, outcome in zip(parsed.images, outcomes, strict=True) if outcome is None]
        if contents:
            client = request.client.host if request.client else "unknown"
            computing = asyncio.ensure_future(queue.compute(task, contents, options, client))
            results = iter(await _unless_client_leaves(request, computing))
            outcomes = [next(results) if outcome is None else outcome for outcome in outcomes]
        return [outcome for outcome in outcomes if outcome is not None]


async def _unless_client_leaves(
    request: Request, computing: "asyncio.Future[list[Result | RequestError]]"
) -> list[Result | RequestError]:
    """Return the results, or cancel their computation when the connection closes."""
    leaving = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((computing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not computing.done():
            raise ClientLeftError
        return computing.result()
    finally:
        for task in (leaving, computing):
            task.cancel()
        await asyncio.gather(leaving, computing, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
