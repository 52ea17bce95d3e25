"""A server that the tests of a process share. They leave it as they found it."""

from collections.abc import Iterator

import pytest

from tests.serving.servers import RunningServer, running

pytest.importorskip("fastapi")


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with running() as server:
        yield server
