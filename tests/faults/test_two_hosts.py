"""Train on two hosts through a cut link: two network namespaces, joined by a veth pair, with torchrun on each.

python -m tests.faults.test_two_hosts     # as root, on Linux with iproute2; prints the log that the docs show
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.data.images import class_folders
from tests.faults.figures import record
from tests.training.short_runs import assert_equal, read_weights

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NETWORK = "--recipe none --model vit-pico4 --network.width 48 --network.depth 2 --network.heads 3 --image-size 16"
RUN = "--batch-size 8 --steps 300 --save-seconds 1 --workers 0 --device cpu --precision float32 --seed 3"
SETTINGS = [*NETWORK.split(), *RUN.split(), "--dropout", "0.1", "--ema", "0.9", "--mix.mixup", "0.3"]
SETTINGS += ["--format", "quiet"]
CUT_SECONDS = 6


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def why_impossible() -> str | None:
    """Return why this machine cannot have two hosts, or None if it can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux with iproute2"
    name = f"vitral-try-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "exec", name, "ip", "link", "set", "lo", "up")
        ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"the kernel forbids network namespaces: {error.stderr.strip()}"
    return None


@dataclass
class Hosts:
    """Two namespaces, each with one end of a cable."""

    names: tuple[str, str]
    start: float = field(default_factory=time.monotonic)

    def log(self, text: str) -> None:
        print(f"{time.monotonic() - self.start:6.1f} s  {text}", flush=True)

    def set_link(self, state: str) -> None:
        ip("-n", self.names[1], "link", "set", "eth0", state)

    def can_reach(self) -> bool:
        probe = "import socket,sys; socket.create_connection((sys.argv[1], 9), 2)"
        command = ["ip", "netns", "exec", self.names[0], sys.executable, "-c", probe, ADDRESSES[1]]
        return "refused" in subprocess.run(command, capture_output=True, text=True).stderr  # somebody answered

    def torchrun(self, host: int, job: str, *words: str | Path) -> subprocess.Popen[str]:
        launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", f"{ADDRESSES[0]}:29400", "--rdzv-id", job, "--local-addr", ADDRESSES[host]]
        launcher += ["--rdzv-conf", f"is_host={int(host == 0)}"]  # both namespaces have one host name
        command = ["ip", "netns", "exec", self.names[host], sys.executable, *launcher, "-m", "vitral", "train"]
        return subprocess.Popen(
            [*command, *map(str, words)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def train(self, job: str, *words: str | Path) -> list[subprocess.Popen[str]]:
        self.log(f"{job}: torchrun --nnodes 2 --rdzv-backend c10d on both hosts")
        return [self.torchrun(host, job, *words) for host in (0, 1)]


@contextmanager
def make_hosts() -> Iterator[Hosts]:
    """Make two namespaces and the cable between them."""
    names = (f"vitral-a-{os.getpid()}", f"vitral-b-{os.getpid()}")
    hosts = Hosts(names)
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def finish(jobs: list[subprocess.Popen[str]], seconds: float = 400) -> None:
    """Wait for both hosts. Raise AssertionError with their messages if one fails."""
    try:
        messages = [job.communicate(timeout=seconds)[1] for job in jobs]
    finally:
        end(*jobs)
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(text[-2000:] for text in messages)


def end(*jobs: subprocess.Popen[str]) -> None:
    """Kill torchrun and its processes, as a host that loses its power does."""
    for job in jobs:
        if job.poll() is None:
            children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(job.pid)], capture_output=True, text=True)
            for pid in [job.pid, *map(int, children.stdout.split())]:
                os.kill(pid, signal.SIGKILL)
            job.wait(30)
        if job.stderr is not None:
            job.stderr.close()


def rows_logged(run: Path) -> int:
    """Return how many rows of losses.csv the first host has written."""
    losses = run / "losses.csv"
    return max(0, len(losses.read_text().splitlines()) - 1) if losses.is_file() else 0


def wait_for_steps(run: Path, jobs: list[subprocess.Popen[str]], above: int) -> None:
    limit = time.monotonic() + 200
    while not (rows_logged(run) > above and list((run / "state").glob("step-*"))):
        ended = [job for job in jobs if job.poll() is not None]
        assert not ended, ended[0].communicate()[1]
        assert time.monotonic() < limit
        time.sleep(0.02)


def cut_link(hosts: Hosts, run: Path) -> None:
    """Cut the cable, and check that nothing passes and that training stands still."""
    hosts.set_link("down")
    hosts.log(f"the link is down, after {rows_logged(run)} rows of losses.csv")
    assert not hosts.can_reach()
    before = rows_logged(run)
    time.sleep(CUT_SECONDS)
    assert rows_logged(run) == before
    hosts.log(f"training stands still: still {before} rows")


def mend_link(hosts: Hosts) -> None:
    hosts.set_link("up")
    while not hosts.can_reach():
        time.sleep(0.1)
    hosts.log("the link is up again")


def compare(hosts: Hosts, first: Path, second: Path) -> None:
    assert_equal(read_weights(first), read_weights(second))
    assert (first / "metrics.csv").read_text() == (second / "metrics.csv").read_text()
    hosts.log("finished; the weights equal those of the undisturbed run, bit for bit")


def train_through_cuts(folder: Path) -> None:
    """Train undisturbed, through a short cut, and through the loss of a host behind a cut."""
    data = class_folders(folder / "photos", {"red": 30, "green": 30, "blue": 30}, size=(20, 20))
    with make_hosts() as hosts:
        finish(hosts.train("undisturbed", data, "--out", folder / "whole", *SETTINGS))
        hosts.log("finished")

        run = folder / "cut"
        jobs = hosts.train("cut", data, "--out", run, *SETTINGS)
        try:
            wait_for_steps(run, jobs, above=0)
            cut_link(hosts, run)
            mend_link(hosts)
            finish(jobs)
        finally:
            end(*jobs)
        compare(hosts, folder / "whole", run)

        run = folder / "lost"
        jobs = hosts.train("lost", data, "--out", run, *SETTINGS)
        try:
            wait_for_steps(run, jobs, above=0)
            cut_link(hosts, run)
            end(jobs[1])
            hosts.log("the second host is lost: kill -9")
            mend_link(hosts)
            messages = jobs[0].communicate(timeout=120)[1]
            assert jobs[0].returncode != 0
            lines = [line for line in messages.splitlines() if line.startswith("vitral: ")]
            assert lines, messages
            assert "ended or stopped responding" in lines[0]
            hosts.log(f"the first host ended: {lines[0].removeprefix('vitral: ')}")
        finally:
            end(*jobs)
        finish(hosts.train("resumed", "--resume", run, "--format", "quiet"))
        compare(hosts, folder / "whole", run)


@pytest.mark.soak
def test_two_hosts(tmp_path: Path) -> None:
    if reason := why_impossible():
        pytest.skip(reason)
    train_through_cuts(tmp_path)
    record(
        "Two hosts with a cut and restored link",
        "training continues",
        f"continues after {CUT_SECONDS} s without a link; resumed after the loss of a host; both bit-equal",
    )


if __name__ == "__main__":
    if problem := why_impossible():
        sys.exit(f"Skipped: {problem}.")
    with tempfile.TemporaryDirectory() as temporary:
        train_through_cuts(Path(temporary))
