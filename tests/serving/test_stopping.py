"""SIGTERM: every request that the server has begun to read gets a response, and the process ends in time.

A request that arrives as its connection or the port closes has not been read. Its client sees that the connection was
reset, before the first byte of a response, and may send the request again.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections import Counter

import httpx
import pytest

from tests.data.images import encoded, photo
from tests.faults.figures import record
from tests.serving.servers import RawResponse, RunningServer, request, resident, running, started, wait_for

IMAGE = encoded(photo(), "JPEG")
CLIENTS = 8


class Client(threading.Thread):
    """Send requests over open connections until the server is gone, and count what became of each."""

    def __init__(self, server: RunningServer):
        super().__init__()
        self.port = server.port
        self.outcomes: Counter[str] = Counter()

    def run(self) -> None:
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
                    self.use(connection)
            except ConnectionError:  # the server no longer listens
                return

    def use(self, connection: socket.socket) -> None:
        """Send requests until the server closes the connection."""
        while True:
            try:
                connection.sendall(request(IMAGE))
            except ConnectionError:
                self.outcomes["reset"] += 1
                return
            response = RawResponse.read(connection)
            if response.was_reset and not response.head:
                self.outcomes["reset"] += 1
                return
            self.outcomes[str(response.status)] += 1  # 0 for a response that is cut or missing
            if response.status == 503:
                assert (response.code, response.closes) == ("draining", True)
                assert response.retry_after >= 1
            if response.closes:
                self.outcomes["closed"] += 1
                return


@pytest.mark.parametrize("count", [1, pytest.param(20, marks=pytest.mark.soak)])
def test_sigterm_under_load(count: int) -> None:
    answered, slowest, resets = 0, 0.0, 0
    for _ in range(count):
        command = [sys.executable, "-m", "vitral", "serve", "vit-cifar10", "--port", "0", "--max-per-client", "64"]
        with started(command) as server:
            clients = [Client(server) for _ in range(CLIENTS)]
            for client in clients:
                client.start()
            wait_for(lambda clients=clients: all(client.outcomes["200"] > 2 for client in clients))
            start = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30) == 143
            slowest = max(slowest, time.monotonic() - start)
            for client in clients:
                client.join()
        outcomes = sum((client.outcomes for client in clients), Counter[str]())
        assert slowest < 15
        assert set(outcomes) <= {"200", "503", "reset", "closed"}, outcomes
        assert outcomes["reset"] <= CLIENTS, outcomes
        answered += outcomes["200"] + outcomes["503"]
        resets += outcomes["reset"]
    if count == 20:
        reached = f"{answered:,} responses, {resets} requests not read, exit after {slowest:.1f} s"
        record("SIGTERM to a server under load, 20 times", "every accepted request answered, exit within 15 s", reached)


def test_every_request_that_was_read_is_answered() -> None:
    """With a worker that hangs: images, bodies and headers that are incomplete at the end of the drain get 503."""
    with running(drain_seconds=1.0) as server:
        (worker,) = server.worker_pids()
        os.kill(worker, signal.SIGSTOP)
        data = request(IMAGE)
        starts = {"image": data, "late body": data[:-9], "half body": data[:-9], "half head": data[:30], "idle": b""}
        starts["late head"] = b""
        connections = {name: socket.create_connection(("127.0.0.1", server.port), timeout=20) for name in starts}
        for name, start in starts.items():
            connections[name].sendall(start)
        wait_for(lambda: server.metric("vitral_pending_images") == 1)
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{server.url}/readyz").status_code == 503)
        connections["late body"].sendall(data[-9:])
        connections["late head"].sendall(request(method="GET", path="/api/models"))
        responses = {}
        for name, connection in connections.items():
            with connection:
                responses[name] = RawResponse.read(connection)
        server.process.wait(20)
        assert time.monotonic() - start < 5  # the drain, and two seconds for the worker that hangs
        assert resident(worker) == 0
    late = responses.pop("late head")
    assert (late.status, late.closes) == (200, True)
    idle = responses.pop("idle")
    assert (idle.head, idle.was_reset) == (b"", False)  # closed in order
    for name, response in responses.items():
        assert response.status == 503, name
        assert (response.code, response.closes) == ("draining", True), name
        assert response.retry_after >= 1, name


def test_accepted_bodies_are_received_and_computed() -> None:
    """A client that was uploading when the signal arrived gets its result."""
    with running() as server, socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        data = request(IMAGE)
        connection.sendall(data[:-9])
        assert httpx.get(f"{server.url}/healthz").status_code == 200  # the server has read what was sent before
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{server.url}/readyz").status_code == 503)
        time.sleep(0.5)  # longer than connections stay open after the last request
        connection.sendall(data[-9:])
        response = RawResponse.read(connection)
        assert (response.status, response.closes) == (200, True)
        assert b'"label"' in response.body
        server.process.wait(20)


def test_workers_end_with_a_killed_server() -> None:
    with running() as server:
        (worker,) = server.worker_pids()
        server.process.kill()
        wait_for(lambda: resident(worker) == 0)
