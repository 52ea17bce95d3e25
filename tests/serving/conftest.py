"""A server that the tests of a process share, and a browser. Tests leave the server as they found it."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.serving.pages import CHROMIUM, OPTIONS, require
from tests.serving.servers import RunningServer, running

pytest.importorskip("fastapi")


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")  # while it is open, asyncio.run fails in the tests of other modules
def browser() -> Iterator[Browser]:
    require(CHROMIUM, "Chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()
