"""Start a server and stop it gracefully: `vitral serve` and `vitral.serve`."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitral.errors import ConfigError, missing_package
from vitral.serving.settings import MEBIBYTE, Limits, ModelSource, ServeSettings, name_sources

if TYPE_CHECKING:
    import uvicorn

    from vitral.serving.service import Service

LAST_REQUESTS_SECONDS = 0.25
"""After the listener has closed, seconds to refuse what is on its way on open connections."""
GRACE_SECONDS = 2
"""After the drain, seconds for responses to reach slow clients."""


def serve(
    model: str | Path | Sequence[str | Path] | Mapping[str, str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    workers: int = 1,
    max_batch: int = 16,
    max_wait: float = 2.0,
    max_queue: int = 64,
    max_per_client: int = 32,
    timeout: float = 30.0,
    max_body: float = 10.0,
    reject: float = 0.95,
    token: str | None = None,
    root_path: str = "",
    allow_host: Sequence[str] = (),
    allow_origin: Sequence[str] = (),
    trusted_proxy: Sequence[str] = (),
    device: str = "auto",
    precision: str = "auto",
    engine: str = "auto",
    image_size: int | tuple[int, int] | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve a web page and an API until the process is interrupted.

        vitral.serve("runs/photos-1", port=8000)
        vitral.serve({"flowers": "runs/flowers-1", "pets": "runs/pets-1"}, token="a-long-secret")

    Parameters
    ----------
    model: a run folder, a weights file or a name; a list of them; or a dict from names to models
    host, port: the address to listen on; port 0 chooses a free one
    workers: processes per model
    max_batch, max_wait: images per batch, and milliseconds to wait for them
    max_queue, max_per_client, timeout: waiting images, images per client, seconds per request
    max_body: MiB per request
    reject: from which value of `unusual` on the page shows "none of these"
    token: a secret that API requests must send as Authorization: Bearer TOKEN
    root_path, trusted_proxy: the path that a proxy publishes, and the addresses of proxies whose headers are trusted
    allow_host, allow_origin: further names in the Host header, and sites whose scripts may call the API
    device, precision, engine, image_size: as in Predictor
    on_ready: called with the URL when the models are loaded
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    sources = tuple(
        ModelSource(name=name, source=source, device=device, precision=precision, engine=engine, image_size=size)
        for name, source in name_sources(model).items()
    )
    limits = Limits(body=round(max_body * MEBIBYTE), buffered=max(Limits().buffered, round(4 * max_body * MEBIBYTE)))
    settings = ServeSettings(
        models=sources, host=host, port=port, workers=workers, max_batch=max_batch, max_wait=max_wait,
        max_queue=max_queue, max_per_client=max_per_client, timeout=timeout, reject=reject, token=token,
        root_path=root_path.rstrip("/"), allowed_hosts=tuple(allow_host), allowed_origins=tuple(allow_origin),
        trusted_proxies=tuple(trusted_proxy), limits=limits,
    )  # fmt: skip
    run_server(settings, on_ready)


def run_server(settings: ServeSettings, on_ready: Callable[[str], None]) -> None:
    """Bind the address, load the models, and serve until a signal arrives."""
    check_packages()
    _raise_file_limit()
    listener = _listen(settings.host, settings.port)
    try:
        asyncio.run(_run(_with_threads(settings), listener, on_ready))
    finally:
        listener.close()


async def _run(settings: ServeSettings, listener: socket.socket, on_ready: Callable[[str], None]) -> None:
    from vitral.serving.service import Service

    service = Service(settings)
    await service.start()
    try:
        server = _make_server(service)
        on_ready(url_of(listener, settings.host))
        await server.serve(sockets=[listener])
    finally:
        await service.stop()


def _make_server(service: "Service") -> "uvicorn.Server":
    import uvicorn

    from vitral.serving.app import build_app
    from vitral.serving.protocol import limited_protocol

    class DrainingServer(uvicorn.Server):
        """Finish accepted requests before the listener closes, and what it accepted until then afterwards."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await service.drain()
            for listener in self.servers:
                listener.close()
            await asyncio.sleep(LAST_REQUESTS_SECONDS)
            await super().shutdown(sockets)

    settings = service.settings
    config = uvicorn.Config(
        build_app(service),  # pyright: ignore[reportArgumentType]
        http=limited_protocol(settings.limits, service.metrics),
        ws="none",
        loop="asyncio",
        root_path=settings.root_path,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        timeout_keep_alive=10,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    return DrainingServer(config)


def check_packages() -> None:
    """Raise MissingError if the extra is not installed."""
    try:
        import fastapi
        import prometheus_client
        import python_multipart
        import uvicorn
    except ImportError as error:
        raise missing_package(error.name or "fastapi", "serve", "vitral serve") from error
    del fastapi, prometheus_client, python_multipart, uvicorn


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)  # clients that come while the model loads wait
    except OSError as error:
        hint = "Pass another --port, or --port 0 for a free one."
        raise ConfigError(f"Cannot listen on {host}:{port}: {error.strerror or error}.", hint=hint) from error
    return listener


def url_of(listener: socket.socket, host: str) -> str:
    """Return the URL to open, with the port that was chosen."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{listener.getsockname()[1]}"


def _with_threads(settings: ServeSettings) -> ServeSettings:
    """Divide the cores among the workers of a model."""
    if settings.workers == 1:
        return settings
    threads = max(1, (os.cpu_count() or 1) // settings.workers)
    return replace(settings, models=tuple(replace(model, threads=threads) for model in settings.models))


def _raise_file_limit() -> None:
    """Allow as many open connections as the system permits; the default of 1,024 is soon used up by slow clients."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 16_384 if hard == resource.RLIM_INFINITY else min(16_384, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
