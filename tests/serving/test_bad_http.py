"""Requests that break HTTP or its limits, byte by byte: endless, slow, ambiguous, for another host."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tests.serving.servers import RawResponse, RunningServer, request, running

MB = 1_000_000


def test_declared_length(server: RunningServer) -> None:
    """The response comes before any byte of the body is sent."""
    response = server.exchange(request(b"", "Content-Length: 1000000000"))
    assert (response.status, response.code) == (413, "too_large")


def test_endless_chunked_body(server: RunningServer) -> None:
    block = b"10000\r\n" + bytes(65536) + b"\r\n"
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(request(b"", "Transfer-Encoding: chunked"))
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(RawResponse.read, connection)
            while not reading.done() and sent < 60 * MB:
                with suppress(OSError):
                    connection.sendall(block)
                sent += len(block)
            response = reading.result()
    assert (response.status, response.code) == (413, "too_large")
    assert sent < 50 * MB


def test_chunked_body_at_the_limit(server: RunningServer) -> None:
    """A client that stops at the limit reads the response."""
    block = b"10000\r\n" + bytes(65536) + b"\r\n"
    response = server.exchange(request(b"", "Transfer-Encoding: chunked") + block * 165 + b"0\r\n\r\n")
    assert (response.status, response.code) == (413, "too_large")


def test_tiny_chunks(server: RunningServer) -> None:
    before = cpu_seconds(server.process.pid)
    response = server.exchange(request(b"", "Transfer-Encoding: chunked") + b"1\r\nX\r\n" * 3_000_000 + b"0\r\n\r\n")
    assert (response.status, response.code) == (413, "too_many_chunks")
    assert cpu_seconds(server.process.pid) - before < 1


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stream:
        fields = stream.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_large_heads(server: RunningServer) -> None:
    for data in (request(b"", *(f"X-{n}: a" for n in range(1000))), request(b"", "X: " + "a" * 65536)):
        response = server.exchange(data)
        assert (response.status, response.code) == (431, "headers_too_large")
    for length in (MB, 10_000):
        response = server.exchange(request(b"", method="GET", path="/" + "a" * length))
        assert (response.status, response.code) == (414, "url_too_long")


def test_slow_clients() -> None:
    """A client that sends a byte at a time is refused at the deadline: 10 s for the head and 30 s for the body."""
    starts = {b"": 0.5, b"POST /api/predict HTTP/1.1\r\nHost: loc": 0.5, request(b"", "Content-Length: 999"): 1.0}
    with running(limits={"head_seconds": 0.5, "body_seconds": 1.0}) as server:

        def be_slow(start: bytes) -> RawResponse:
            with socket.create_connection(("127.0.0.1", server.port), timeout=9) as connection:
                connection.sendall(start)
                begin, limit = time.monotonic(), starts[start]
                while start and time.monotonic() - begin < limit * 0.7:
                    connection.sendall(b"a")
                    time.sleep(0.1)
                response = RawResponse.read(connection)
                assert limit * 0.9 < time.monotonic() - begin < limit + 4
                return response

        with ThreadPoolExecutor(3) as pool:
            for response in pool.map(be_slow, starts):
                assert (response.status, response.code) == (408, "timeout")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "8.8.8.8", "localhost.evil.example", ""])
def test_foreign_host(server: RunningServer, host: str) -> None:
    data = f"GET /api/model HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    response = server.exchange(data)
    assert (response.status, response.code) == (403, "foreign_host")


def test_bad_http(server: RunningServer) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(99), b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 99):
        assert server.exchange(data + b"\r\n\r\n", timeout=3).status in (0, 400, 403)
    assert server.exchange(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n").status == 200


def test_no_request_hides_in_the_body_of_another(server: RunningServer) -> None:
    """With two lengths, a proxy and the server could disagree on where the next request starts."""
    before = server.metric('vitral_requests_total{route="/healthz",status="200"}')
    start = request(b"", "Content-Length: 5", "Transfer-Encoding: chunked")
    response = server.exchange(start + b"0\r\n\r\n" + request(method="GET", path="/healthz"))
    assert (response.status, response.code, response.closes) == (400, "bad_request", True)
    assert server.metric('vitral_requests_total{route="/healthz",status="200"}') == before
    two = ["Content-Length: 5", "Content-Length: 6"]
    for lengths in (two, ["Content-Length: +5"], ["Transfer-Encoding: xchunked"]):
        assert server.exchange(request(b"", *lengths) + b"0\r\n\r\n").status == 400
