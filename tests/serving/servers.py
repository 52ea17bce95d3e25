"""Start real servers on loopback, and talk to them byte by byte where an HTTP client would be too polite."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
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
models = tuple(ModelSource(name=name, source=source) for name, source in options.pop("models").items())
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
    status: int
    body: bytes
    seconds: float

    @property
    def code(self) -> str:
        return json.loads(self.body)["error"]["code"]

    @classmethod
    def read(cls, connection: socket.socket) -> "RawResponse":
        start, data = time.monotonic(), b""
        try:
            while chunk := connection.recv(65536):
                data += chunk
                head, separator, body = data.partition(b"\r\n\r\n")
                length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
                if separator and length and len(body) >= int(length[1]):
                    break
        except (ConnectionResetError, TimeoutError):
            pass
        head, _, body = data.partition(b"\r\n\r\n")
        status = int(head.split()[1]) if data.startswith(b"HTTP/1.1 ") else 0
        return cls(status, body, time.monotonic() - start)


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
    """Run a command that prints `Serving at URL`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = process.stdout.readline()
        match = re.search(r"http://[^:]+:(\d+)", line)
        assert match, f"the server did not start: {process.stderr.read()}"
        yield RunningServer(process, int(match[1]))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


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
