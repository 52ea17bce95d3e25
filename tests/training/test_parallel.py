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
from tests.training.short_runs import read_weights
from vitral.data.batches import share_batches
from vitral.devices import World, find_world
from vitral.errors import ConfigError
from vitral.runs import Run
from vitral.training.parallel import find_restarted

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


def interrupt(folder: Path, *words: str | Path, launcher: list[str] | None = None) -> None:
    """Train until the run has taken some new steps, and stop it with SIGTERM."""
    losses = folder / "losses.csv"
    before = len(losses.read_text().splitlines()) if losses.exists() else 0
    command = [*(launcher or [sys.executable]), "-m", "vitral", *map(str, words)]
    job = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while job.poll() is None and time.monotonic() < deadline:
        if losses.exists() and len(losses.read_text().splitlines()) > before + 10:
            break
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    job.wait(120)
    assert not (folder / "report.json").exists()


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
    interrupt(tmp_path / "two", *words, "--out", tmp_path / "two", launcher=TORCHRUN)
    assert list((tmp_path / "two/state").glob("step-*/manifest.json"))
    resumed = run("train", "--resume", tmp_path / "two", "--format", "quiet")
    whole = run(*words, "--accumulate", "2", "--out", tmp_path / "one")
    assert (resumed.returncode, whole.returncode) == (0, 0), resumed.stderr + whole.stderr
    assert hash_weights(tmp_path / "one") == hash_weights(tmp_path / "two")


@pytest.mark.soak
def test_three_processes_resume_a_run_of_two(photos: Path, tmp_path: Path) -> None:
    """Sums in another order differ in their last bits, but every image keeps its augmentation, mixing and dropout."""
    words = ["train", photos, *SETTINGS, *CASES["random"], "--optim.name", "sgd", "--augment.flip", "0.5"]
    words += ["--steps", "400", "--format", "quiet"]
    interrupt(tmp_path / "run", *words, "--out", tmp_path / "run", launcher=TORCHRUN)
    resumed = run("train", "--resume", tmp_path / "run", launcher=[*TORCHRUN[:-1], "3"])
    whole = run(*words, "--accumulate", "2", "--out", tmp_path / "whole")
    assert (resumed.returncode, whole.returncode) == (0, 0), resumed.stderr + whole.stderr
    first, second = read_weights(tmp_path / "run"), read_weights(tmp_path / "whole")
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], atol=1e-4, rtol=1e-3)


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


def test_restarted_processes_find_their_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was killed between its config and its manifest, but no run of anybody else."""
    world = World(launch="job", restarts=1)
    monkeypatch.setattr("vitral.training.parallel.join_world", lambda: world)
    monkeypatch.chdir(tmp_path)
    launches: dict[str, dict[str, str]] = {"mine": {"launch": "job"}, "other": {"launch": "else"}, "old": {}}
    manifest = {"data_fingerprint": "", "threads": 1, "choices": [], "resumes": []}
    contents = {name: json.dumps(manifest | launch) for name, launch in launches.items()}
    contents |= {"damaged": "{", "unknown": ""}
    for name, content in contents.items():
        run = Run(tmp_path / "runs" / name)
        run.folder.mkdir(parents=True)
        run.write_config("")
        if content:
            run.manifest.write_text(content)
    restarted = find_restarted(None)
    assert restarted is not None
    assert restarted.folder == Path("runs/mine")
    found = {name: find_restarted(tmp_path / "runs" / name) is not None for name in contents}
    assert found == {"mine": True, "other": False, "old": False, "damaged": False, "unknown": True}
    assert find_restarted(tmp_path / "none") is None
    world = World(launch="job")
    assert find_restarted(tmp_path / "runs/mine") is None


def test_find_world() -> None:
    assert find_world({}) == World()
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    with pytest.raises(ConfigError, match="static rendezvous"):
        find_world(environment)
    world = find_world(environment | {"TORCHELASTIC_RUN_ID": "job"})
    assert (world.rank, world.size, world.local_rank, world.is_first) == (3, 4, 1, False)
