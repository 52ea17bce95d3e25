"""Load hf:owner/name from a server on this machine, then from the cache alone."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import vitral
from tests.cli.typed import typed
from tests.conftest import small_model
from vitral.weights.hub import choose_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a hub with one repository, team/small, and a list of the requests to it."""
    folder = tmp_path / "repository"
    vitral.save(small_model(), folder, dialect="huggingface", labels=[f"kind {i}" for i in range(7)])
    requests: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.respond(body=False)

        def do_GET(self) -> None:
            self.respond(body=True)

        def respond(self, body: bool) -> None:
            requests.append(f"{self.command} {self.path}")
            path = self.path.split("?")[0]
            if path in ("/api/models/team/small", "/api/models/team/small/revision/main"):
                files = [{"rfilename": file.name, "size": file.stat().st_size} for file in folder.iterdir()]
                info = {"id": "team/small", "sha": COMMIT, "siblings": files, "private": False, "tags": []}
                content = json.dumps(info).encode()
            elif path.startswith("/team/small/resolve/main/"):
                content = (folder / path.rpartition("/")[2]).read_bytes()
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{abs(hash(content)):x}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    thread.join()
    server.server_close()


def describe(name: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vitral", "describe", name, "--format", "json"],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1", **environment},
    )


def test_a_download_prints_files_size_and_folder_and_the_cache_works_offline(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    endpoint, requests = hub
    cache = tmp_path / "cache"
    first = describe("hf:team/small", cache, HF_ENDPOINT=endpoint)
    assert first.returncode == 0, first.stderr
    (line,) = [line for line in first.stderr.splitlines() if "downloading" in line]
    assert "model.safetensors" in line
    assert "MB" in line
    assert str(cache) in line
    described = json.loads(first.stdout)
    assert described["report"]["dialect"] == "huggingface"
    assert described["labels"][3] == "kind 3"

    again = describe("hf:team/small", cache, HF_ENDPOINT=endpoint)
    assert "downloading" not in again.stderr
    before = len(requests)
    offline = describe("hf:team/small", cache, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert len(requests) == before, "offline means no request"
    unreachable = describe("hf:team/small", cache, HF_ENDPOINT="http://127.0.0.1:9")
    assert unreachable.returncode == 0, unreachable.stderr
    for done in (again, offline, unreachable):
        assert json.loads(done.stdout)["config"] == described["config"]


def test_missing_repositories_are_one_sentence(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, _ = hub
    for name, environment, reason in (
        ("hf:team/other", {"HF_ENDPOINT": endpoint}, "no public model team/other"),
        ("hf:team/small", {"HF_HUB_OFFLINE": "1"}, "is not in the cache"),
    ):
        done = describe(name, tmp_path / "empty", **environment)
        assert done.returncode == 2
        assert reason in done.stderr
        assert "Traceback" not in done.stderr
    done = typed("describe", "hf:small")
    assert done.returncode == 2
    assert "expected hf:owner/name" in done.stderr


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(vitral.VitralError, match=r"pip install 'vitral\[hub\]'"):
        vitral.load("hf:team/small")


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["model.safetensors", "pytorch_model.bin", "config.json", "README.md"], ["model.safetensors", "config.json"]),
        (["pytorch_model.bin", "x.npz"], ["pytorch_model.bin"]),
        (["ViT-B_16.npz", "README.md"], ["ViT-B_16.npz"]),
        (
            ["model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"],
            ["model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"],
        ),
    ],
)
def test_the_safest_checkpoint_is_chosen(files: list[str], chosen: list[str]) -> None:
    assert list(choose_files("x/y", dict.fromkeys(files, 1))) == chosen


def test_two_checkpoints_are_ambiguous() -> None:
    with pytest.raises(vitral.WeightsError, match="single checkpoint"):
        choose_files("x/y", {"a.npz": 1, "b.npz": 1})
