"""A Hugging Face hub on this machine, for the tests of models and datasets."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

NOBODY = "http://127.0.0.1:9"
"""An address at which nothing listens."""
LARGE_FILES = (".safetensors", ".bin", ".parquet")
"""The hub publishes the SHA-256 of these only."""
Repositories = Mapping[str, Mapping[str, bytes]]
"""owner/name: path: content."""


def describe_large(path: str, content: bytes) -> dict[str, object]:
    """Return what the hub lists for a file in large-file storage; nothing for others."""
    if not path.endswith(LARGE_FILES):
        return {}
    return {"lfs": {"sha256": sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}}


@contextmanager
def serve_hub(
    repositories: Repositories,
    kind: Literal["models", "datasets"] = "models",
    gated: str = "",
    sent: Mapping[str, bytes] | None = None,
) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a hub and the list of requests to it.

    Files of the repository `gated` are listed but refused. `sent` replaces the content of files that it lists.
    """
    requests: list[str] = []
    commit = sha256(repr(repositories).encode()).hexdigest()[:40]
    folder = [] if kind == "models" else [kind]

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.respond()

        def do_GET(self) -> None:
            self.respond()

        def respond(self) -> None:
            requests.append(f"{self.command} {self.path}")
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:2] == ["api", kind] and "/".join(parts[2:4]) in repositories:
                if parts[4:] not in ([], ["revision", "main"]):
                    self.refuse(404, "RevisionNotFound")
                else:
                    self.list("/".join(parts[2:4]))
                return
            head, parts = parts[: len(folder)], parts[len(folder) :]
            if head != folder or parts[2:4] != ["resolve", "main"]:
                self.refuse(404, "RepoNotFound")
            elif gated == (name := "/".join(parts[:2])):
                self.refuse(403, "GatedRepo")
            elif (path := "/".join(parts[4:])) in repositories[name]:
                self.send(repositories[name][path], (sent or {}).get(path))
            else:
                self.refuse(404, "EntryNotFound")

        def list(self, name: str) -> None:
            files = [
                {"rfilename": path, "size": len(content), **describe_large(path, content)}
                for path, content in repositories[name].items()
            ]
            info = {"id": name, "sha": commit, "siblings": files, "private": False, "tags": [], "downloads": 0}
            self.send(json.dumps(info).encode())

        def send(self, content: bytes, instead: bytes | None = None) -> None:
            body = content if instead is None else instead
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def refuse(self, code: int, word: str) -> None:
            self.send_response(code)
            self.send_header("X-Error-Code", word)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run_python(*arguments: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a cache of the hub of its own."""
    quiet = {"HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **quiet, **environment}
    )


def run_vitral(*arguments: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a cache of the hub of its own."""
    return run_python("-m", "vitral", *arguments, cache=cache, **environment)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder as a repository."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
