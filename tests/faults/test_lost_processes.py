"""Processes of a run die or freeze, or compute a NaN: the others notice, and a restart loses nothing.

python -m pytest -m soak -s tests/faults/test_lost_processes.py          # ten kills each under DDP and FSDP2
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.reference_weights import hash_weights, write_folder
from tests.faults.figures import record
from tests.training.test_parallel import ENVIRONMENT, NETWORK, RANDOM, SETTINGS, TORCHRUN, free_port, run
from vitral.training.state import load_state

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and sends POSIX signals")
STEPS, MAX_RESTART_SECONDS, MAX_GRACE_SECONDS = "40", 30, 35
OPTIONS = [*SETTINGS, *NETWORK, *RANDOM, "--save_seconds", "0", "--format", "quiet"]
POISON = """
import os, sys
from vitral.training.tasks.classification import Classification
original = Classification.loss
def loss(self, outputs, *rest):
    self.calls = getattr(self, "calls", 0) + 1
    value = original(self, outputs, *rest)
    return value * float("nan") if os.environ["RANK"] == "1" and self.calls == 3 else value
Classification.loss = loss
from vitral.cli.main import main
sys.argv[0] = "vitral"
main()
"""

STOP = """
import os, signal, sys
from vitral.training.tasks.classification import Classification
original = Classification.measure
def measure(self, *rest):
    os.kill(os.getpid(), signal.SIGTERM)
    return original(self, *rest)
Classification.measure = measure
from vitral.cli.main import main
sys.argv[0] = "vitral"
main()
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("lost") / "photos")


@pytest.fixture(scope="module")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    done = run("train", photos, *OPTIONS, "--steps", STEPS, "--accumulate", "2", "--out", folder)
    assert done.returncode == 0, done.stderr
    return folder


def start(*words: str | Path, launcher: list[str], **environment: str) -> subprocess.Popen[str]:
    command = [*launcher, *map(str, words)]
    return subprocess.Popen(
        command, env=ENVIRONMENT | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def find_ranks(parent: int) -> dict[int, int]:
    """Return the process of each rank among the descendants of a launcher."""
    ranks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_child = f"PPid:\t{parent}\n" in (path / "status").read_text()
            match = re.search(r"\0RANK=([0-9]+)\0", (path / "environ").read_text()) if is_child else None
        except OSError:
            continue
        if match:
            ranks[int(match[1])] = int(path.name)
    return ranks


def count_rows(folder: Path) -> int:
    losses = folder / "losses.csv"
    return len(losses.read_text().splitlines()) if losses.exists() else 0


def wait_for_steps(job: subprocess.Popen[str], folder: Path, rows: int, seconds: float = 240) -> float:
    """Wait until the run has logged so many steps, or ended; return the time that it took."""
    begin = time.monotonic()
    while job.poll() is None and count_rows(folder) < rows and time.monotonic() < begin + seconds:
        time.sleep(0.02)
    return time.monotonic() - begin


def newest_log_lines(folder: Path) -> int:
    log = folder / "log.txt"
    return len(log.read_text().splitlines()) if log.exists() else 0


def kill_and_resume(photos: Path, folder: Path, strategy: str, kills: int, chance: random.Random) -> list[float]:
    """Kill a random rank again and again. Return the seconds after each until the run took its next step."""
    launcher = [sys.executable, "-m", "vitral"]
    words = ["train", photos, *OPTIONS, "--steps", STEPS, "--parallel", strategy, "--out", folder]
    words += ["--processes", "2", "--max-restarts", str(kills)]
    job, times = start(*words, launcher=launcher), list[float]()
    for kill in range(kills):
        wait_for_steps(job, folder, 2 + (kill + 1) * 30 // (kills + 1))
        time.sleep(chance.uniform(0, 0.3))
        ranks = find_ranks(job.pid)
        if job.poll() is not None or len(ranks) < 2:
            break
        lines, begin = newest_log_lines(folder), time.monotonic()
        os.kill(ranks[chance.randrange(2)], signal.SIGKILL)
        while job.poll() is None and newest_log_lines(folder) <= lines and time.monotonic() < begin + 240:
            time.sleep(0.02)
        wait_for_steps(job, folder, count_rows(folder) + 1)
        times.append(time.monotonic() - begin)
    _, err = job.communicate(timeout=300)
    assert job.returncode == 0, err
    assert err.count(" was killed. Starting all processes again") == len(times)
    assert "torch/distributed/elastic" not in err  # the launcher's own log
    return times


def test_a_killed_process_is_replaced(photos: Path, whole: Path, tmp_path: Path) -> None:
    assert len(kill_and_resume(photos, tmp_path / "run", "fsdp", 1, random.Random(0))) == 1
    assert hash_weights(tmp_path / "run") == hash_weights(whole)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ten_killed_processes_are_replaced(strategy: str, photos: Path, whole: Path, tmp_path: Path) -> None:
    chance, times, runs = random.Random(time.time_ns()), list[float](), 0
    while len(times) < 10:
        folder, runs = tmp_path / f"run-{runs}", runs + 1
        times += kill_and_resume(photos, folder, strategy, 2, chance)
        assert hash_weights(folder) == hash_weights(whole)
    assert max(times) < MAX_RESTART_SECONDS
    record(
        f"kill -9 of a random process, {strategy.upper()}",
        "10 of 10 bit-equal, no hang, training again within 30 s",
        f"{len(times)} of {len(times)} in {runs} runs, all bit-equal, training again after at most {max(times):.1f} s",
    )


@pytest.mark.soak
def test_torchrun_restarts_and_the_run_resumes(photos: Path, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launcher = [*TORCHRUN, "--max-restarts", "2", "-m", "vitral"]
    job = start("train", photos, *OPTIONS, "--steps", STEPS, "--parallel", "fsdp", "--out", folder, launcher=launcher)
    wait_for_steps(job, folder, 20)
    os.kill(find_ranks(job.pid)[1], signal.SIGKILL)
    _, err = job.communicate(timeout=300)
    assert job.returncode == 0, err
    assert hash_weights(folder) == hash_weights(whole)


@pytest.mark.soak
def test_a_killed_process_of_another_host_is_replaced(photos: Path, whole: Path, tmp_path: Path) -> None:
    """Only the launcher of its host counts that as a restart, but the processes of both resume the run."""
    folder, endpoint, jobs = tmp_path / "run", f"127.0.0.1:{free_port()}", list[subprocess.Popen[str]]()
    for host in (0, 1):
        launcher = [*TORCHRUN[:3], "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2"]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "flowers"]
        launcher += ["--rdzv-conf", f"is_host={int(host == 0)}", "-m", "vitral"]
        words = ["train", photos, *OPTIONS, "--steps", STEPS, "--out", folder]
        jobs.append(start(*words, launcher=launcher))
    wait_for_steps(jobs[0], folder, 20)
    ranks = {rank: (host, pid) for host, job in enumerate(jobs) for rank, pid in find_ranks(job.pid).items()}
    host, pid = ranks[1]  # the first process writes the run folder
    os.kill(pid, signal.SIGKILL)
    messages = [job.communicate(timeout=300)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], messages[host]
    assert hash_weights(folder) == hash_weights(whole)


@pytest.mark.soak
def test_a_sharded_run_stopped_in_validation_resumes(photos: Path, whole: Path, tmp_path: Path) -> None:
    """It starts with validation, whose tensors must not be in the way of the gradients after it."""
    script, folder = tmp_path / "stop.py", tmp_path / "run"
    script.write_text(STOP)
    words = ["train", photos, *OPTIONS, "--steps", STEPS, "--parallel", "fsdp", "--out", folder]
    _, err = start(*words, launcher=[*TORCHRUN, str(script)]).communicate(timeout=240)
    loaded = load_state(folder / "state")
    assert loaded is not None, err
    assert loaded[0].is_unscored
    done = run("train", "--resume", folder, launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert hash_weights(folder) == hash_weights(whole)


def freeze(frozen: int, photos: Path, folder: Path) -> float:
    """Freeze a process of a run with a timeout of 8 s. Return the seconds until the command ended."""
    launcher = [*TORCHRUN, "-m", "vitral"]
    words = ["train", photos, *OPTIONS, "--steps", "4000", "--parallel", "fsdp", "--out", folder]
    job = start(*words, launcher=launcher, VITRAL_PROCESS_TIMEOUT="8")
    wait_for_steps(job, folder, 5)
    os.kill(find_ranks(job.pid)[frozen], signal.SIGSTOP)
    begin = time.monotonic()
    _, err = job.communicate(timeout=120)
    seconds = time.monotonic() - begin
    assert job.returncode != 0
    assert f"Process {frozen} ended or stopped responding" in err
    assert seconds < 8 + MAX_GRACE_SECONDS
    return seconds


@pytest.mark.soak
def test_a_frozen_process_is_named(photos: Path, tmp_path: Path) -> None:
    seconds = [freeze(frozen, photos, tmp_path / f"run-{frozen}") for frozen in (0, 1)]
    record(
        "A frozen process (SIGSTOP)",
        "the command ends by its timeout plus 35 s and names the process",
        f"process 0 and process 1 named, after {seconds[0]:.1f} s and {seconds[1]:.1f} s with a timeout of 8 s",
    )


def poison(strategy: str, photos: Path, folder: Path) -> None:
    """Compute a NaN in the third step of process 1: both stop there, and the weights are those of the second step."""
    script, out = folder / "poison.py", folder / f"run-{strategy}"
    script.write_text(POISON)
    words = ["train", photos, *OPTIONS, "--steps", STEPS, "--parallel", strategy]
    job = start(*words, "--out", out, launcher=[*TORCHRUN, str(script)])
    _, err = job.communicate(timeout=240)
    assert job.returncode != 0
    assert "Step 2: the loss is nan" in err
    assert "so the weights were not updated. Images of this step in process 1: " in err
    loaded = load_state(out / "state")
    assert loaded is not None
    assert loaded[0].step <= 2
    assert all(tensor.isfinite().all() for tensor in loaded[1].values())


def test_nan_in_one_process_stops_all(photos: Path, tmp_path: Path) -> None:
    poison("fsdp", photos, tmp_path)


@pytest.mark.soak
def test_nan_under_each_strategy(photos: Path, whole: Path, tmp_path: Path) -> None:
    """The weights did not change, because the run continues without the NaN as if there had been none."""
    for strategy in ("ddp", "fsdp"):
        poison(strategy, photos, tmp_path)
        folder = tmp_path / f"run-{strategy}"
        done = run("train", "--resume", folder, launcher=TORCHRUN)
        assert done.returncode == 0, done.stderr
        assert hash_weights(folder) == hash_weights(whole)
    record(
        "NaN on one rank",
        "all stop at the same step, weights unchanged, images named",
        "DDP and FSDP: stopped at step 2, images named; resumed without the NaN: bit-equal",
    )
