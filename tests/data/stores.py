"""Real servers on loopback that shards are read from: a web server that can fail, and an S3 server (moto)."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import boto3
from aiohttp import web
from moto.server import ThreadedMotoServer


@dataclass
class WebServer:
    """Serve a folder, with ranges; record the requests, and answer some of them badly."""

    folder: Path
    ranges: list[tuple[str, str]] = field(default_factory=list)
    """The name and the range of each request for a part of a file."""
    failures: int = 0
    """How many of the next requests for ranges fail."""
    failure: str = "drop"
    """drop: the connection closes in the middle; 503: an error; ignore: the whole file is sent."""
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = self.folder / request.match_info["name"].lstrip("/")
        if path.is_dir():
            links = "".join(f'<a href="{file.name}">{file.name}</a>\n' for file in sorted(path.iterdir()))
            return web.Response(text=f"<html>{links}</html>", content_type="text/html")
        if not path.is_file():
            return web.Response(status=404)
        if "Range" in request.headers and request.method == "GET":
            self.ranges.append((path.name, request.headers["Range"]))
            if self.failures:
                self.failures -= 1
                return await self._fail(request, path)
        return web.FileResponse(path)

    async def _fail(self, request: web.Request, path: Path) -> web.StreamResponse:
        if self.failure == "503":
            return web.Response(status=503)
        if self.failure == "ignore":
            return web.Response(body=path.read_bytes())
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"half of it")
        assert request.transport is not None
        request.transport.close()
        return response


@contextmanager
def serve_folder(folder: Path) -> Iterator[WebServer]:
    """Serve a folder over HTTP from a thread."""
    server = WebServer(folder)
    loop = asyncio.new_event_loop()
    stop = _run_in_thread(loop, server)
    try:
        yield server
    finally:
        stop()


def _run_in_thread(loop: asyncio.AbstractEventLoop, server: WebServer) -> Callable[[], None]:
    app = web.Application()
    app.router.add_route("*", "/{name:.*}", server.answer)
    runner = web.AppRunner(app)
    ready = threading.Event()

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{host}:{port}"
        ready.set()

    def run() -> None:
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(20)

    def stop() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)

    return stop


S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


@contextmanager
def serve_s3(folder: Path, bucket: str = "bucket") -> Iterator[dict[str, str]]:
    """Put the files of a folder into a bucket, and yield the environment that finds it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        options = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=endpoint, **options)
        client.create_bucket(Bucket=bucket)
        for file in sorted(folder.iterdir()):
            client.put_object(Bucket=bucket, Key=f"{folder.name}/{file.name}", Body=file.read_bytes())
        client.close()
        yield S3_ENVIRONMENT | {"AWS_ENDPOINT_URL": endpoint}
    finally:
        server.stop()
