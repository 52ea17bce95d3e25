"""Start real servers on loopback, and talk to them byte by byte where an HTTP client would be too polite."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

SCRIPT = """
import json, sys
from vitral.serving.server import run_server
from vitral.serving.settings import Limits, ModelSource, ServeSettings
options = json.loads(sys.argv[1])
exact = dict(engine="torch", precision="float32")  # whatever this machine computes fastest
models = tuple(
    ModelSource(name=name, source=source, **({} if source.endswith((".onnx", ".xml")) else exact))
    for name, source in options.pop("models").items()
)
limits = Limits(**options.pop("limits", {}))
settings = ServeSettings(models=models, port=0, limits=limits, **options)
run_server(settings, lambda url: print("Serving at", url, flush=True))
"""
START_SECONDS = 120  # of a busy machine


@dataclass(frozen=True)
class RunningServer:
    process: "subprocess.Popen[str]"
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def post(self, content: bytes, path: str = "/api/predict", **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, content=content, **options)

    def exchange(self, data: bytes, timeout: float = 20) -> "RawResponse":
        """Send bytes as they are and return the response."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):  # answered and closed before all was sent
                connection.sendall(data)
            return RawResponse.read(connection)

    def worker_pids(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"vitral.serving.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def memory(self) -> int:
        """Return the resident bytes of the server and its workers."""
        return sum(resident(pid) for pid in (self.process.pid, *self.worker_pids()))

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.MULTILINE))

    def wait_until_ready(self, seconds: float = START_SECONDS) -> float:
        """Return the seconds until /readyz returns 200."""
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            if httpx.get(f"{self.url}/readyz").status_code == 200:
                return time.monotonic() - start
            time.sleep(0.05)
        raise AssertionError("the server is not ready")


@dataclass(frozen=True)
class RawResponse:
    """A response; its status is 0 if none came or it was incomplete."""

    status: int
    head: bytes
    body: bytes
    was_reset: bool
    """The server closed the connection before it read the request, so that no response came."""

    @property
    def closes(self) -> bool:
        """Return whether the server announced that it closes the connection."""
        return re.search(rb"\r\nconnection: *close", self.head, re.IGNORECASE) is not None

    @property
    def retry_after(self) -> int:
        """Return the seconds to wait; 0 if the response does not name them."""
        match = re.search(rb"\r\nretry-after: *(\d+)", self.head, re.IGNORECASE)
        return int(match[1]) if match else 0

    @property
    def code(self) -> str:
        return json.loads(self.body)["error"]["code"]

    @classmethod
    def read(cls, connection: socket.socket) -> "RawResponse":
        data, was_reset, is_complete = b"", False, False
        try:
            while not is_complete and (chunk := connection.recv(65536)):
                data += chunk
                head, separator, body = data.partition(b"\r\n\r\n")
                length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
                is_complete = bool(separator) and length is not None and len(body) >= int(length[1])
        except TimeoutError:
            pass
        except ConnectionError:
            was_reset = True
        # If the end of the stream comes before the reset, recv does not raise the latter.
        was_reset = was_reset or (not data and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0)
        head, _, body = data.partition(b"\r\n\r\n")
        status = int(head.split()[1]) if is_complete and data.startswith(b"HTTP/1.1 ") else 0
        return cls(status, head, body, was_reset)


def resident(pid: int) -> int:
    """Return the resident bytes of a process; 0 if it has ended."""
    try:
        match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


@contextmanager
def running(models: dict[str, str] | None = None, **options: Any) -> Iterator[RunningServer]:
    """Run a server in a process of its own until the block ends."""
    arguments = json.dumps({"models": models or {"cifar": "vit-cifar10"}, **options})
    with started([sys.executable, "-c", SCRIPT, arguments]) as server:
        yield server


@contextmanager
def started(command: list[str]) -> Iterator[RunningServer]:
    """Run a command that prints `Serving at URL`. At its end, check that it has printed no traceback."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, Path(folder, "stderr.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            match = re.search(r"http://[^:]+:(\d+)", line)
            assert match, f"the server did not start: {Path(log.name).read_text()}"
            yield RunningServer(process, int(match[1]))
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        printed = Path(log.name).read_text()
        assert "Traceback" not in printed, printed[-5000:]


def request(body: bytes = b"", *headers: str, method: str = "POST", path: str = "/api/predict") -> bytes:
    """Return a request with a Host header and these others."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    if body or (method == "POST" and not any(line.lower().startswith(("content-l", "transfer")) for line in headers)):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until the condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.02)
