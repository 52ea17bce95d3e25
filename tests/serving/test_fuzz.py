"""Mutated files and requests: never a 500, a crash, a hang, or memory that grows."""

import json
import random
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest

from tests.data.images import encoded, photo
from tests.faults.figures import record
from tests.serving.servers import RawResponse, RunningServer, request, running

IMAGE = photo(48, 64)
FILES = [
    encoded(IMAGE, "JPEG"),
    encoded(IMAGE, "JPEG", progressive=True),
    encoded(IMAGE.convert("CMYK"), "JPEG"),
    encoded(IMAGE, "PNG"),
    encoded(IMAGE.convert("P"), "PNG"),
    encoded(IMAGE.convert("RGBA"), "PNG"),
    encoded(IMAGE, "WEBP"),
    encoded(IMAGE, "WEBP", lossless=True),
    encoded(IMAGE, "GIF"),
]
PATHS = ["/api/predict", "/api/predict?top_k=3", "/api/features", "/api/attention", "/api/attention?layer=1"]
PIECES = [
    b"\xff\xff\xff\xff",
    b"\0\0\0\0",
    b"\x7f\xff\xff\xff",
    b"\r\n",
    b"\r\n\r\n",
    b"--b",
    b"{",
    b"\xff\xd8",
    b"IDAT",
    b"%s",
]
EXPECTED = {0, 200, 400, 403, 404, 405, 408, 413, 414, 415, 422, 429, 431, 501, 503}


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Return the content with some bytes changed, cut out, repeated or inserted."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(len(data) + 1)
        kind = chance.randrange(5)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[at:at] = chance.choice(PIECES)
        elif kind == 2:
            del data[at : at + chance.choice((1, 8, 100, 10_000))]
        elif kind == 3:
            data[at : at + 4] = chance.choice(PIECES)
        else:
            data[at:at] = data[max(0, at - chance.randrange(64)) : at]
    return bytes(data)


def fuzzed_request(seed: int) -> bytes:
    """Return a request with a mutated file, or a mutated request."""
    chance = random.Random(seed)
    file, path = chance.choice(FILES), chance.choice(PATHS)
    if not is_request_mutated(seed):
        return request(mutated(file, chance), path=path)
    body, headers = file, []
    if chance.random() < 0.5:
        body = b'--b\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n' + file + b"\r\n--b--\r\n"
        headers = ["Content-Type: multipart/form-data; boundary=b"]
    elif chance.random() < 0.5:
        body, headers = json.dumps({"image": "AAAA", "top_k": 3}).encode(), ["Content-Type: application/json"]
    return mutated(request(body, *headers, path=path), chance)


def is_request_mutated(seed: int) -> bool:
    """Return whether the whole request is mutated, and not only the file in it. Then it may lack its end."""
    return seed % 4 == 0


def send(server: RunningServer, seed: int) -> int:
    """Return the status; 0 if the server closed the connection, or still waits for the end of a mutated request."""
    seconds = 0.25 if is_request_mutated(seed) else 30
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        with suppress(OSError):
            connection.sendall(fuzzed_request(seed))
        return RawResponse.read(connection).status


def check_fuzz(server: RunningServer, count: int) -> tuple[Counter[int], int]:
    (worker,) = server.worker_pids()
    before = server.memory()
    peak, statuses = before, Counter[int]()
    with ThreadPoolExecutor(8) as pool:
        for start in range(0, count, 100):
            seeds = range(start, min(count, start + 100))
            for seed, status in zip(seeds, pool.map(partial(send, server), seeds), strict=True):
                statuses[status] += 1
                assert status in EXPECTED, f"seed {seed}: {status}"
                assert status or is_request_mutated(seed), f"seed {seed}: a complete request got no response"
            peak = max(peak, server.memory())
    assert server.worker_pids() == [worker], "a worker crashed"
    assert peak - before < 200 * 2**20
    assert server.post(FILES[0]).status_code == 200
    return statuses, peak - before


def test_fuzz(server: RunningServer) -> None:
    statuses, _ = check_fuzz(server, 200)
    assert statuses[200] > 10
    assert statuses[422] > 10


@pytest.mark.soak
def test_fuzz_50000() -> None:
    with running() as server:
        statuses, growth = check_fuzz(server, 50_000)
    counts = ", ".join(f"{count:,} x {status or 'closed'}" for status, count in sorted(statuses.items()))
    record(
        "50,000 mutated files and requests", "no 500, no crash, at most 200 MB", f"{counts}; {growth / 2**20:+.0f} MiB"
    )
