"""Load and lost workers: every accepted request gets its own response, or a status that names the reason."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from tests.data.images import encoded, photo
from tests.faults.figures import record
from tests.serving.servers import RunningServer, running, wait_for

IMAGES = [
    encoded(photo(30 + seed, 50 - seed, seed), format) for seed in range(12) for format in ("JPEG", "PNG", "WEBP")
]


@pytest.fixture(scope="module")
def busy() -> Iterator[RunningServer]:
    with running(max_batch=4, max_queue=24, max_per_client=16) as server:
        yield server


def test_answers_are_never_swapped(busy: RunningServer) -> None:
    check_mixed_requests(busy, 400)


@pytest.mark.soak
def test_answers_are_never_swapped_in_20000_requests() -> None:
    with running(workers=2, max_per_client=64) as server:
        before = server.memory()
        statuses = check_mixed_requests(server, 20_000)
        growth = server.memory() / before - 1
    refused = 20_000 - statuses[200]
    reached = f"none of {statuses[200]:,} swapped, {refused:,} bad files refused, memory {growth:+.0%}"
    record("20,000 mixed requests to a server", "no swapped response", reached)


def check_mixed_requests(server: RunningServer, count: int) -> Counter[int]:
    """Send many kinds of images at once, bad ones too, and compare every response with that of the image alone."""
    expected = [server.post(image).json()["predictions"][0]["top"] for image in IMAGES]
    order = np.random.default_rng(0).integers(0, len(IMAGES) + 2, count)
    statuses: Counter[int] = Counter()
    with server.client(limits=httpx.Limits(max_connections=12)) as client:

        def ask(index: int) -> None:
            content = IMAGES[index] if index < len(IMAGES) else (b"not an image", IMAGES[0][:-100])[index - len(IMAGES)]
            response = client.post("/api/predict", content=content)
            statuses[response.status_code] += 1
            if index >= len(IMAGES):
                assert response.status_code == (415, 422)[index - len(IMAGES)]
                return
            assert response.status_code == 200, response.text
            for got, want in zip(response.json()["predictions"][0]["top"], expected[index], strict=True):
                assert got["label"] == want["label"]
                assert abs(got["probability"] - want["probability"]) < 1e-5

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(ask, order.tolist()))
    assert statuses[200] == (order < len(IMAGES)).sum()
    return statuses


def test_overload_is_refused(busy: RunningServer) -> None:
    """With a stopped worker the queue fills: 429 for one client, 503 for all, each with Retry-After."""
    (worker,) = busy.worker_pids()
    os.kill(worker, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(40) as pool:
            responses = [pool.submit(busy.post, IMAGES[0]) for _ in range(40)]
            wait_for(lambda: sum(future.done() for future in responses) >= 24)
            refused = [future.result() for future in responses if future.done()]
            assert {response.status_code for response in refused} == {429}
            assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
            parts = [("images", ("a.jpg", IMAGES[0]))] * 17
            assert httpx.post(f"{busy.url}/api/predict", files=parts).status_code == 429
            assert httpx.get(f"{busy.url}/healthz").status_code == 200  # the event loop is free
            os.kill(worker, signal.SIGCONT)
            assert Counter(future.result().status_code for future in responses) == {200: 16, 429: 24}
    finally:
        os.kill(worker, signal.SIGCONT)


def test_full_queue_and_deadline() -> None:
    with running(max_batch=1, max_queue=4, max_per_client=100, timeout=1.0) as server:
        (worker,) = server.worker_pids()
        os.kill(worker, signal.SIGSTOP)
        with ThreadPoolExecutor(20) as pool:
            responses = list(pool.map(lambda _: server.post(IMAGES[0]), range(20)))
        os.kill(worker, signal.SIGCONT)
        codes = Counter(response.json()["error"]["code"] for response in responses)
        assert {response.status_code for response in responses} == {503}
        assert set(codes) == {"queue_full", "timeout"}
        assert codes["queue_full"] >= 4
        assert codes["timeout"] >= 5  # a batch of one image that is computed, and four images that wait
        assert server.post(IMAGES[0]).status_code == 200


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.soak)])
def test_killed_worker(busy: RunningServer, kills: int) -> None:
    """Kill the worker while it has requests: they get 503 within a second, and a new worker serves the next ones."""
    slowest = longest = 0.0
    for _ in range(kills):
        (worker,) = busy.worker_pids()
        os.kill(worker, signal.SIGSTOP)  # so that the requests are in its hands
        with ThreadPoolExecutor(12) as pool:
            responses = [pool.submit(busy.post, IMAGES[0]) for _ in range(12)]
            wait_for(lambda: busy.metric("vitral_pending_images") == 12)
            start = time.monotonic()
            os.kill(worker, signal.SIGKILL)
            for future in responses:
                assert future.result().status_code == 503
                assert future.result().json()["error"]["code"] == "worker_lost"
                assert "retry-after" in future.result().headers
            slowest = max(slowest, time.monotonic() - start)
        assert busy.post(IMAGES[0]).status_code in (200, 503)
        longest = max(longest, busy.wait_until_ready())
        assert busy.post(IMAGES[0]).status_code == 200
    assert slowest < 1
    if kills == 20:
        reached = f"503 after {slowest:.2f} s, ready after {longest:.1f} s"
        record("kill -9 of the model's worker, 20 times", "503 within 1 s, ready within 10 s", reached)
