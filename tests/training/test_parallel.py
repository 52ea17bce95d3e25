"""Several processes train as one process with as many micro-batches does: real torchrun processes, over gloo."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.reference_weights import hash_weights, write_folder
from vitral.data.batches import share_batches
from vitral.devices import World, find_world
from vitral.errors import ConfigError

NETWORK = ["--recipe", "none", "--model", "vit-pico4", "--network.width", "48", "--network.depth", "2"]
NETWORK += ["--network.heads", "3", "--image-size", "16"]
SETTINGS = ["--batch-size", "8", "--seed", "3", "--workers", "0", "--device", "cpu", "--precision", "float32"]
RANDOM = ["--dropout", "0.1", "--drop_path", "0.1", "--mix.mixup", "0.4", "--mix.cutmix", "1", "--ema", "0.9"]
CASES = {
    "random": [*NETWORK, *RANDOM],
    "masked-patches": [*NETWORK, "--objective", "masked-patches", "--optim.clip", "0"],
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("parallel") / "photos")


def run(*words: str | Path, launcher: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run vitral in one process, or in those of a launcher."""
    command = [*(launcher or [sys.executable]), "-m", "vitral", *map(str, words)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_two_micro_batches(case: str, photos: Path, tmp_path: Path) -> None:
    words = ["train", photos, *SETTINGS, *CASES[case], "--steps", "8", "--format", "quiet"]
    one = run(*words, "--accumulate", "2", "--out", tmp_path / "one")
    two = run(*words, "--out", tmp_path / "two", launcher=TORCHRUN)
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    assert hash_weights(tmp_path / "one") == hash_weights(tmp_path / "two")
    assert (tmp_path / "one/metrics.csv").read_text() == (tmp_path / "two/metrics.csv").read_text()
    assert one.stdout == two.stdout  # only the first process prints


def test_one_process_resumes_a_run_of_two(photos: Path, tmp_path: Path) -> None:
    words = ["train", photos, *SETTINGS, *CASES["random"], "--steps", "400", "--format", "quiet"]
    command = [*TORCHRUN, "-m", "vitral", *map(str, words), "--out", str(tmp_path / "two")]
    job = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "two/losses.csv").is_file() and time.monotonic() < deadline and job.poll() is None:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    job.wait(60)
    assert not (tmp_path / "two/report.json").exists()
    assert list((tmp_path / "two/state").glob("step-*/manifest.json"))
    resumed = run("train", "--resume", tmp_path / "two", "--format", "quiet")
    whole = run(*words, "--accumulate", "2", "--out", tmp_path / "one")
    assert (resumed.returncode, whole.returncode) == (0, 0), resumed.stderr + whole.stderr
    assert hash_weights(tmp_path / "one") == hash_weights(tmp_path / "two")


@pytest.mark.soak
def test_a_static_rendezvous_is_refused_with_the_reason(photos: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    done = run("train", photos, *SETTINGS, *NETWORK, "--steps", "2", "--out", tmp_path / "run", launcher=launcher)
    assert done.returncode != 0
    assert "WORLD_SIZE=2 comes from a static rendezvous" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
def test_torchrun_finds_its_options_in_the_environment(photos: Path, tmp_path: Path) -> None:
    """As the training operator of Kubernetes sets them from the elastic policy of the example in the docs."""
    policy = {"RDZV_BACKEND": "c10d", "RDZV_ENDPOINT": f"localhost:{free_port()}", "RDZV_ID": "flowers"}
    policy |= {"NNODES": "1:1", "NPROC_PER_NODE": "2", "MAX_RESTARTS": "3"}
    command = [sys.executable, "-m", "torch.distributed.run", "-m", "vitral", "train", str(photos), *SETTINGS, *NETWORK]
    command += ["--steps", "2", "--out", str(tmp_path / "run")]
    environment = ENVIRONMENT | {f"PET_{name}": value for name, value in policy.items()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/manifest.json").read_text())["launch"] == "flowers"


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


# ---- the parts of it ----


def test_shares_cover_each_batch_once() -> None:
    batches = list(torch.arange(23).split(8))
    parts = [share_batches(batches, rank, 3, split=True) for rank in range(3)]
    assert [torch.cat(same).tolist() for same in zip(*parts, strict=True)] == [batch.tolist() for batch in batches]
    turns = [share_batches(batches, rank, 2, split=False) for rank in range(2)]
    assert len(turns[0]) == len(turns[1]) == 2
    assert sorted(torch.cat([*turns[0], *turns[1]]).tolist()) == list(range(23))


def test_find_world() -> None:
    assert find_world({}) == World()
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    with pytest.raises(ConfigError, match="static rendezvous"):
        find_world(environment)
    world = find_world(environment | {"TORCHELASTIC_RUN_ID": "job"})
    assert (world.rank, world.size, world.local_rank, world.is_first) == (3, 4, 1, False)
