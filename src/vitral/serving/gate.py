"""The first and the last to see every request: check it, count it, and add the security headers to its response."""

import asyncio
import hmac
import ipaddress
import json
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vitral.serving.refusals import RequestError, busy
from vitral.serving.settings import ServeSettings

if TYPE_CHECKING:
    from vitral.serving.service import Service

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(), geolocation=(), payment=(), usb=()",
    "cache-control": "no-store",
}
LINGER_SECONDS, LINGER_BYTES = 2.0, 32 * 2**20
LOOPBACK = ("localhost", "127.0.0.1", "::1")
PROTECTED = ("/api/", "/metrics")
"""Paths that need the token; the page asks for it, and probes of health have none."""
API_ROUTES = ("/api/model", "/api/models", "/api/predict", "/api/attention", "/api/features")
ROUTES = frozenset(("/", "/docs", "/openapi.json", "/healthz", "/readyz", "/metrics", *API_ROUTES))
"""The paths that the metrics name."""


class Gate:
    """An ASGI application around another one."""

    def __init__(self, app: Application, service: "Service"):
        self.app = app
        self.service = service
        self.settings = settings = service.settings
        self.metrics = service.metrics
        self.hosts = {*LOOPBACK, *(host.lower() for host in settings.allowed_hosts)}
        self.is_loopback = settings.host in LOOPBACK
        if not self.is_loopback:
            self.hosts |= {settings.host.lower(), socket.gethostname().lower()}  # getfqdn would ask a name server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self.service)
        try:
            self.check(scope)
            if _is_preflight(scope):
                await exchange.send({"type": "http.response.start", "status": 204, "headers": []})
                await exchange.send({"type": "http.response.body"})
            else:
                await self.app(scope, exchange.receive, exchange.send)
        except RequestError as error:
            self.metrics.refused.labels(error.code).inc()
            await exchange.send_error(error)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            await exchange.send_error(RequestError(500, "internal_error", "The server failed."))
        path = _route_path(scope)
        route = path if path in ROUTES else "/static" if path.startswith("/static/") else "other"
        self.metrics.requests.labels(route, str(exchange.status or 499)).inc()
        self.metrics.seconds.labels(route).observe(time.monotonic() - exchange.start)

    def check(self, scope: Scope) -> None:
        """Raise RequestError for a request that is one too many, too large, from a foreign site, or lacks the token."""
        headers, limits = scope["headers"], self.settings.limits
        is_probe = _route_path(scope) == "/healthz"  # an orchestrator would end a server that is merely busy
        if scope["state"].get("has_too_many_connections") and not is_probe:
            raise busy("too_many_connections", f"The server has {limits.connections} open connections.", 1)
        if len(scope["raw_path"]) + len(scope["query_string"]) > limits.url:
            raise RequestError(414, "url_too_long", f"The URL has more than {limits.url} bytes.")
        if len(headers) > limits.headers or sum(len(name) + len(value) for name, value in headers) > limits.head:
            message = f"A request may have {limits.headers} headers of {limits.head} bytes together."
            raise RequestError(431, "headers_too_large", message)
        self._check_host(_values(headers, b"host"))
        self._check_origin(scope)
        if _route_path(scope).startswith(PROTECTED) and not _is_preflight(scope):
            self._check_token(_values(headers, b"authorization"))
        _check_length(headers, limits.body)

    def _check_host(self, hosts: list[str]) -> None:
        name = _host_name(hosts[0]) if len(hosts) == 1 else None
        is_address = name is not None and _is_address(name)
        if name is None or not (name in self.hosts or (is_address and not self.is_loopback)):
            message = "The Host header names another server. Start vitral serve with --allow-host to accept it."
            raise RequestError(403, "foreign_host", message)

    def _check_origin(self, scope: Scope) -> None:
        """Refuse requests of other sites, which a browser sends with the cookies and the network of its user."""
        origins = _values(scope["headers"], b"origin")
        if origins:
            host = _values(scope["headers"], b"host")[0].lower()
            is_own = len(origins) == 1 and urlsplit_host(origins[0]) == host
            if is_own or origins[0] in self.settings.allowed_origins:
                return
            raise RequestError(403, "foreign_origin", "Requests from other sites are not allowed.")
        is_navigation = _values(scope["headers"], b"sec-fetch-mode") == ["navigate"] and scope["method"] == "GET"
        if _values(scope["headers"], b"sec-fetch-site") == ["cross-site"] and not is_navigation:
            raise RequestError(403, "foreign_origin", "Requests from other sites are not allowed.")

    def _check_token(self, values: list[str]) -> None:
        if self.settings.token is None:
            return
        scheme, _, token = (values[0] if len(values) == 1 else "").partition(" ")
        is_equal = hmac.compare_digest(token.strip().encode("latin-1"), self.settings.token.encode())
        if scheme.lower() != "bearer" or not is_equal:
            raise RequestError(401, "unauthorized", "This server needs a token: Authorization: Bearer TOKEN.")


def _check_length(headers: list[tuple[bytes, bytes]], limit: int) -> None:
    """Refuse bodies that are too long, and those whose end a proxy in front may see elsewhere."""
    lengths = _values(headers, b"content-length")
    if lengths and _values(headers, b"transfer-encoding"):
        raise RequestError(400, "bad_request", "A request has either a Content-Length or a Transfer-Encoding.")
    for value in lengths:
        if value.isdigit() and int(value[:20]) > limit:
            raise RequestError(413, "too_large", f"The body may have at most {limit} bytes.")


def _values(headers: list[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key == name]


def _host_name(host: str) -> str | None:
    """Return the name in a Host header without the port, or None if it is malformed."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower() or None
    except ValueError:
        return None


def urlsplit_host(origin: str) -> str | None:
    """Return host and port of an http or https origin."""
    try:
        parts = urlsplit(origin.lower())
    except ValueError:
        return None
    return parts.netloc if parts.scheme in ("http", "https") else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _route_path(scope: Scope) -> str:
    return scope["path"].removeprefix(scope.get("root_path", "")) or "/"


def _is_preflight(scope: Scope) -> bool:
    """Return whether a browser asks for permission; only allowed origins pass `check`."""
    asks = _values(scope["headers"], b"access-control-request-method")
    return scope["method"] == "OPTIONS" and bool(asks and _values(scope["headers"], b"origin"))


def _with_security(
    headers: list[tuple[bytes, bytes]], scope: Scope, settings: ServeSettings
) -> list[tuple[bytes, bytes]]:
    names = {name.lower() for name, _ in headers}
    added = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items() if name.encode() not in names]
    origin = _values(scope["headers"], b"origin")
    if origin and origin[0] in settings.allowed_origins:
        added = [(name, value) for name, value in added if name != b"cross-origin-resource-policy"]
        added += [(b"access-control-allow-origin", origin[0].encode("latin-1")), (b"vary", b"Origin")]
        added += [(b"access-control-allow-headers", b"authorization, content-type")]
        added += [(b"access-control-allow-methods", b"GET, POST"), (b"access-control-expose-headers", b"Retry-After")]
        added += [(b"access-control-max-age", b"600"), (b"cross-origin-resource-policy", b"cross-origin")]
    return [*headers, *added]


class _Exchange:
    """A request and its response: add headers, and read on for a while when the response precedes the body's end.

    Closing a connection with unread bytes resets it, and the client would see that instead of the response.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, service: "Service"):
        self.start = time.monotonic()
        self.status = 0
        self._scope, self._receive, self._send, self._service = scope, receive, send, service
        names = {name for name, _ in scope["headers"]}
        self._has_unread_body = b"transfer-encoding" in names or any(
            value != "0" for value in _values(scope["headers"], b"content-length")
        )

    async def receive(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            self._has_unread_body = False
        return message

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = _with_security(message.get("headers", []), self._scope, self._service.settings)
            is_last = self._has_unread_body or self._service.is_draining
            is_named = any(name.lower() == b"connection" for name, _ in headers)
            message["headers"] = [*headers, (b"connection", b"close")] if is_last and not is_named else headers
        elif self._has_unread_body and not message.get("more_body"):
            await self._send({**message, "more_body": True})
            await self._linger()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def send_error(self, error: RequestError) -> None:
        """Send an error response, unless another response has started."""
        if self.status:
            return
        body = json.dumps(error.content).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    async def _linger(self) -> None:
        remaining = LINGER_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while self._has_unread_body and remaining > 0:
                    remaining -= len((await self.receive()).get("body", b""))
