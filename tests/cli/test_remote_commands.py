"""Train, check and evaluate on shards of a web server: the commands of a folder, with an address."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.reference_weights import hash_weights
from tests.cli.typed import typed
from tests.data.images import class_folders, write_shard
from tests.data.stores import WebServer, serve_folder, serve_s3

NETWORK = "--recipe none --model vit-pico4 --network.width 48 --network.depth 1 --network.heads 3 --image-size 16"
SETTINGS = [*NETWORK.split(), "--batch-size", "8", "--seed", "3", "--workers", "0", "--device", "cpu"]
SETTINGS += ["--precision", "float32", "--format", "quiet"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 60 images of two classes to shards of unequal length, and 10 for testing."""
    home = tmp_path_factory.mktemp("web")
    photos = sorted(class_folders(home / "photos", {"green": 35, "red": 35}, size=(20, 20)).glob("*/*.png"))
    photos = [photos[index % 2 * 35 + index // 2] for index in range(70)]
    start = 0
    (home / "shards").mkdir()
    for name, count in {"train-0": 7, "train-1": 33, "train-2": 20, "test-0": 10}.items():
        members = []
        for file in photos[start : start + count]:
            key = f"{file.parent.name}-{file.stem}"
            members += [(f"{key}.png", file.read_bytes()), (f"{key}.cls", file.parent.name.encode())]
        write_shard(home / "shards" / f"{name}.tar", members)
        start += count
    return home / "shards"


@pytest.fixture(scope="module")
def server(shards: Path) -> Iterator[WebServer]:
    with serve_folder(shards.parent) as server:
        yield server


def test_data_train_and_evaluate(server: WebServer, tmp_path: Path) -> None:
    url = f"{server.url}/shards"
    scan = json.loads(typed("data", url, "--format", "json").stdout)
    assert scan["splits"] == {"test": 10, "train": 60}
    assert scan["can_train"]
    done = typed("train", url, "--out", str(tmp_path / "run"), "--epochs", "6", "--optim.lr", "3e-3", *SETTINGS)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["test"]["images"] == 10
    assert report["test"]["top1"] == 1.0
    scores = json.loads(typed("evaluate", str(tmp_path / "run"), "--format", "json").stdout)
    expected = {name: report["test"][name] for name in scores["test"]}
    assert scores["test"] == pytest.approx(expected, rel=1e-5)  # other batches than in the run
    other = json.loads(typed("evaluate", str(tmp_path / "run"), f"{url}/train-2.tar", "--format", "json").stdout)
    assert other["images"] == 20


def test_a_missing_store_is_a_usage_error(server: WebServer) -> None:
    done = typed("train", f"{server.url}/shards/none-{{0..3}}.tar", *SETTINGS)
    assert done.returncode == 2
    assert "none-0.tar not found" in done.stderr


@pytest.mark.soak
def test_two_processes_on_s3_equal_one(shards: Path, tmp_path: Path) -> None:
    with serve_s3(shards) as environment:
        hashes = []
        for name, more in {"one": ["--accumulate", "2"], "two": ["--processes", "2"]}.items():
            command = [sys.executable, "-m", "vitral", "train", "s3://bucket/shards", "--out", str(tmp_path / name)]
            command += [*SETTINGS, "--steps", "12", "--dropout", "0.1", *more]
            result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr
            hashes.append(hash_weights(tmp_path / name))
        assert hashes[0] == hashes[1]
