"""No process of the server opens a connection or asks a name server, whatever clients send."""

import base64
import json
import os
import sys
from pathlib import Path

import pytest

from tests.data.images import encoded, photo
from tests.serving.servers import started

SPY = """
import os, sys

def watch(event, arguments):
    names = ("connect", "sendto", "getaddrinfo", "gethostbyname", "gethostbyaddr")
    if event.startswith("socket.") and event[7:] in names:
        with open(os.environ["SPY_LOG"], "a") as log:
            log.write(f"{event} {arguments[-1] if event == 'socket.connect' else arguments}\\n")

sys.addaudithook(watch)
"""


def test_no_outgoing_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "connections.txt"
    (tmp_path / "sitecustomize.py").write_text(SPY, encoding="utf-8")
    monkeypatch.setenv("SPY_LOG", str(log))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    image = encoded(photo(), "JPEG")
    with started(
        [sys.executable, "-m", "vitral", "serve", "vit-cifar10", "--port", "0", "--host", "0.0.0.0"]
    ) as server:
        as_json = {"Content-Type": "application/json"}
        for path in ("/api/predict", "/api/features", "/api/attention"):
            assert server.post(image, path).status_code == 200
            for url in ("http://169.254.169.254/", "file:///etc/passwd", "http://192.0.2.1/cat.jpg"):
                assert server.post(json.dumps({"url": url}).encode(), path, headers=as_json).status_code == 400
                assert server.post(url.encode(), path).status_code == 415
        as_base64 = json.dumps({"image": base64.b64encode(image).decode()}).encode()
        assert server.post(as_base64, headers=as_json).status_code == 200
    text = log.read_text(encoding="utf-8")
    assert "0.0.0.0" in text, "the address to listen on is looked up, so that the log shows that the hook works"
    assert [line for line in text.splitlines() if "0.0.0.0" not in line] == []
