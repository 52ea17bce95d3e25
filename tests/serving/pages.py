"""Visit the page of a server with Chromium, and check it with axe-core. `make browser` fetches both."""

import os
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.serving.servers import RunningServer

AXE = Path(__file__).parents[2] / "build" / "axe.min.js"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
OPTIONS += ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]


def require(condition: object, what: str) -> None:
    if not condition:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{what} is missing. Run: make browser")


class Visit:
    """A page and everything that went wrong on it."""

    def __init__(self, browser: Browser, server: RunningServer, path: str = "/", **options: object):
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 850}, **options})
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console", lambda message: message.type in ("error", "warning") and self.errors.append(message.text)
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.server = server
        self.page.goto(server.url + path)
        self.page.locator("#facts dd").first.wait_for(state="attached")

    def upload(self, *paths: Path) -> None:
        self.page.set_input_files("#files", [str(path) for path in paths])
        self.page.locator("#rows td", has_text="waiting").first.wait_for(state="detached")

    def check(self, *, allowed: str = "nothing at all") -> None:
        """Check that nothing failed, and that no request left the server."""
        assert [error for error in self.errors if allowed not in error] == []
        assert all(url.startswith((self.server.url, "blob:", "data:")) for url in self.requests)
        self.context.close()

    def violations(self) -> list[str]:
        """Return what axe-core objects to."""
        require(AXE.exists(), "axe-core")
        result = self.page.evaluate(AXE.read_text(encoding="utf-8") + "; axe.run()")
        return [f"{rule['id']}: {rule['nodes'][0]['html']}" for rule in result["violations"]]


def pixels(page: Page) -> str:
    """Return the drawn attention map."""
    return page.evaluate("() => document.getElementById('overlay').toDataURL()")
