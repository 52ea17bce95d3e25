"""The clients of the how-to guide, run as it prints them: in Python, and in Chromium on another site."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
from playwright.sync_api import Browser

from tests.data.images import encoded, photo
from tests.serving.servers import running, wait_for

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "serve.md").read_text(encoding="utf-8")
IMAGE = encoded(photo(), "JPEG")
ALLOWED = {"Authorization": "Bearer a-long-secret"}  # as in the guide


def block(start: str) -> str:
    """Return the code block of the guide that contains a text."""
    (code,) = [code for code in re.findall(r"^```text\n(.*?)^```", GUIDE, re.M | re.S) if start in code]
    return code


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>Another site</title>")

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def other_site() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Page) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield f"http://localhost:{site.server_port}"
        site.shutdown()


def test_python_client(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(IMAGE)
    with running(token="a-long-secret") as server:
        names: dict[str, object] = {}
        exec(block("import httpx"), names)
        predict = names["predict"]
        assert callable(predict)
        row = predict(tmp_path / "photo.jpg", f"{server.url}/api/predict")
        expected = server.post(IMAGE, headers=ALLOWED).json()["predictions"][0]
        assert row == expected


def test_javascript_client(browser: Browser) -> None:
    """It waits as long as Retry-After says, which its site may read, and reports errors."""
    with other_site() as site, running(token="a-long-secret", allowed_origins=[site], max_per_client=1) as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(site)
        page.add_script_tag(content=block("async function predict"))
        send = "url => { window.send = (data) => predict(new Blob([new Uint8Array(data)]), url); }"
        page.evaluate(send, f"{server.url}/api/predict")
        message = page.evaluate("data => send(data).catch((error) => error.message)", [1, 2, 3])
        assert message == "The file is not a JPEG, PNG or WebP image."
        (worker,) = server.worker_pids()
        os.kill(worker, signal.SIGSTOP)
        page.evaluate("data => { window.pending = Promise.all([send(data), send(data)]); }", list(IMAGE))
        wait_for(lambda: 'cause="too_many_requests"' in httpx.get(f"{server.url}/metrics", headers=ALLOWED).text)
        os.kill(worker, signal.SIGCONT)
        rows = page.evaluate("() => pending")
        assert rows == [server.post(IMAGE, headers=ALLOWED).json()["predictions"][0]] * 2
        context.close()
