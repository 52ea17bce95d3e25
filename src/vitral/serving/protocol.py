"""HTTP connections with the limits that uvicorn does not have: headers, chunks per body, and responses left unread."""

import asyncio
import json
import socket
import struct
import sys
from contextlib import suppress
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitral.serving.metrics import Metrics
from vitral.serving.refusals import RequestError, draining
from vitral.serving.settings import Limits

LINGER_SECONDS = 2.0
"""Seconds to read on after a refusal: closing a connection with unread bytes resets it, and the response is lost."""
MAX_LINES = 40_000
"""Line breaks in a chunked body, two per chunk. Each chunk costs as much time as a kilobyte of an ordinary body."""
NOT_SENT = getattr(socket, "TCP_NOTSENT_LOWAT", None)
MAX_NOT_SENT = 16 * 1024
"""Bytes that the kernel takes ahead of the network. Without this bound it takes up to 4 MB per client that does not
read, which the limit on unread bytes cannot see. It does not slow down clients that read."""
NO_LINGER = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)


class LimitedProtocol(H11Protocol):
    """Refuse a request while its headers arrive, before there is an application to refuse it.

    A connection holds one response at most: the next request is read once the client has taken the response.
    """

    limits: ClassVar[Limits]
    metrics: ClassVar[Metrics]
    unread: ClassVar["dict[LimitedProtocol, int]"]
    """Bytes that clients have not read, by connection, in the order in which they stopped reading."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._head_bytes = 0
        self._lines = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._is_unread = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # calls pause_writing for a single unread byte
        if NOT_SENT is not None:
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, NOT_SENT, MAX_NOT_SENT)
        if len(self.connections) > self.limits.connections:
            self.app_state = {**self.app_state, "has_too_many_connections": True}
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Abort the connection unless its client reads in time. The rest of the response is written nonetheless."""
        self._write_timer = self.loop.call_later(self.limits.body_seconds, self._drop_stuck)
        self._count_unread()

    def resume_writing(self) -> None:
        self.unread.pop(self, None)
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if self._is_unread:
            self._is_unread = False
            super().on_response_complete()

    def _count_unread(self) -> None:
        """Abort the connections that have been stuck for longest if clients leave too many bytes unread."""
        self.unread[self] = self.transport.get_write_buffer_size()
        while sum(self.unread.values()) > self.limits.unread:
            stuck = next(iter(self.unread))
            del self.unread[stuck]
            stuck._drop_stuck()

    def _drop_stuck(self) -> None:
        """Reset the connection. After an ordinary close, the kernel keeps unread bytes until the client reads them."""
        self.metrics.stuck.inc()
        with suppress(OSError):  # closed already
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.transport.abort()

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
        if self in self.unread:
            self._is_unread = True
            self._count_unread()
        else:
            super().on_response_complete()

    def shutdown(self) -> None:
        """Close the connection after the response to the request that has been read; refuse an incomplete one."""
        if self._is_reading_head() and self.conn.trailing_data[0]:
            self.send_error(draining())
        elif not self._is_refused:
            super().shutdown()

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
            fields = {**error.headers, "Content-Length": len(body), "Connection": "close"}
            head += "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            self.transport.write(head.encode() + b"\r\n" + body)
            with suppress(OSError):  # the client has reset the connection
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


def limited_protocol(limits: Limits, metrics: Metrics) -> type[LimitedProtocol]:
    """Return a protocol class for uvicorn that enforces the limits."""
    unread: dict[LimitedProtocol, int] = {}
    metrics.unread.set_function(lambda: sum(unread.values()))
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits, "metrics": metrics, "unread": unread})
