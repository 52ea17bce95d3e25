"""HTTP connections with the limits that uvicorn does not have: size and time of the headers, and chunks per body."""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitral.serving.refusals import RequestError
from vitral.serving.settings import Limits

LINGER_SECONDS = 2.0
"""Seconds to read on after a refusal: closing a connection with unread bytes resets it, and the response is lost."""
MAX_LINES = 40_000
"""Line breaks in a chunked body, two per chunk. Each chunk costs as much time as a kilobyte of an ordinary body."""


class LimitedProtocol(H11Protocol):
    """Refuse a request while its headers arrive, before there is an application to refuse it."""

    limits = Limits()

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._head_bytes = 0
        self._lines = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Abort the connection if its client does not read, which would keep the response in memory indefinitely."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.body_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:  # it is read and dropped until the client has seen the response
            return
        if self._is_reading_head():
            if self._head_timer is None:  # the next request of an open connection
                self._start_timer()
            self._head_bytes += len(data)
            is_complete = b"\r\n\r\n" in data or b"\n\n" in data or b"\r\n\r\n" in self.conn.trailing_data[0] + data
            if not is_complete and self._head_bytes > self.limits.head + self.limits.url:
                self._refuse_head(data)
                return
        if self._is_chunked(data):
            self._lines += data.count(b"\r\n")
            if self._lines > MAX_LINES:
                self.send_error(RequestError(413, "too_many_chunks", "The body has too many chunks."))
                return
        super().data_received(data)
        if not self._is_reading_head():
            self._stop_timer()
            self._head_bytes = 0

    def on_response_complete(self) -> None:
        self._head_bytes = self._lines = 0
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self.send_error(RequestError(400, "bad_request", "The request is not valid HTTP."))

    def send_error(self, error: RequestError) -> None:
        """Send an error and close the connection, unless a response has started."""
        if self.transport.is_closing() or self._is_refused:
            return
        self._stop_timer()
        self._is_refused = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.content).encode()
            head = f"HTTP/1.1 {error.status} {error.code}\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.transport.write_eof()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _is_reading_head(self) -> bool:
        return self.conn.their_state is h11.IDLE

    def _is_chunked(self, data: bytes) -> bool:
        """Return whether these bytes belong to a chunked body, or contain the headers of one."""
        if self._is_reading_head():
            return b"chunked" in data[: self.limits.head].lower()
        return any(name == b"transfer-encoding" for name, _ in self.headers or ())

    def _refuse_head(self, data: bytes) -> None:
        start = self.conn.trailing_data[0] + data
        if b"\n" not in start[: self.limits.url]:
            self.send_error(RequestError(414, "url_too_long", f"The URL has more than {self.limits.url} bytes."))
        else:
            self.send_error(RequestError(431, "headers_too_large", f"The headers exceed {self.limits.head} bytes."))

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.head_seconds, self._time_out)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _time_out(self) -> None:
        if self._is_reading_head():
            self.send_error(RequestError(408, "timeout", "The headers took too long to arrive."))


def limited_protocol(limits: Limits) -> type[LimitedProtocol]:
    """Return a protocol class for uvicorn that enforces the limits."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits})
