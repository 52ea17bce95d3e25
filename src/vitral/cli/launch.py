"""`--processes N`: run the same command in N processes of this machine, as torchrun --standalone does."""

import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence

from vitral.devices import find_world
from vitral.errors import ConfigError, check_int

MAX_RESTARTS = 3
"""How often `--processes` starts all processes again after one was killed."""


def is_launched() -> bool:
    """Return whether a launcher has already started this process as one of several."""
    return find_world().size > 1


def check_single_process(command: str) -> None:
    """Raise ConfigError under torchrun for a command that several processes cannot share."""
    if is_launched():
        raise ConfigError(f"vitral {command} runs in one process.", hint="Start it without torchrun.")


def launch_if_asked(processes: int | None, *, max_restarts: int = 0) -> None:
    """Run this command in several processes and exit, if `--processes` asks for more than the one that runs."""
    if processes is not None and processes != 1 and not is_launched():
        sys.exit(launch(processes, sys.argv[1:], max_restarts=max_restarts))


def end_together(code: int) -> None:
    """Exit with a code other than 0 in the first process, once all processes are done.

    A launcher ends all processes as soon as one fails, which could cut off the output of the first.
    """
    from vitral.collectives import current_world, wait_for_all

    sys.stdout.flush()
    wait_for_all()
    if code and current_world().is_first:
        sys.exit(code)


def launch(processes: int, words: Sequence[str], *, max_restarts: int) -> int:
    """Run `vitral WORDS` in several processes and return the exit code of the command.

    The rendezvous is torch's c10d on a free port. A process that fails ends the others. If a signal killed it, all
    start again and resume the run; an error would only come back.
    """
    check_int("--processes", processes, minimum=1, maximum=1024)
    check_int("--max-restarts", max_restarts, minimum=0, maximum=1000)
    threads = max(1, (os.cpu_count() or 1) // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    name, attempt = str(uuid.uuid4()), 0
    while True:
        os.environ["VITRAL_RESTARTS"] = str(attempt)
        code, killed = _launch_once(processes, words, name)
        if killed is None:
            return code
        attempt += 1
        again = f" Starting all processes again ({attempt} of {max_restarts})." if attempt <= max_restarts else ""
        print(f"vitral: Process {killed} was killed.{again}", file=sys.stderr, flush=True)
        if not again:
            return code


def _launch_once(processes: int, words: Sequence[str], name: str) -> tuple[int, int | None]:
    """Return the exit code, and the rank of a process that a signal killed."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for logger in list(logging.root.manager.loggerDict):
        if logger.startswith("torch.distributed.elastic"):  # the processes print their errors themselves
            logging.getLogger(logger).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "vitral", *words)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in sorted(error.failures.items())}
        killed = next((rank for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM), None)
        failed = {rank: code for rank, code in codes.items() if code > 0}
        if failed and 0 not in failed and killed is None:  # the first process has printed nothing
            text = ", ".join(f"process {rank} failed with exit code {code}" for rank, code in failed.items())
            print(f"vitral: {text}.", file=sys.stderr, flush=True)
        return next(iter(failed.values()), 1), killed
    except SignalException as error:
        return 128 + error.sigval, None
    return 0, None


def let_first_print() -> None:
    """Wait a second in a silenced process, because the launcher ends all processes as soon as one fails."""
    if os.environ.get("RANK", "0") != "0" and sys.stderr is not sys.__stderr__:
        time.sleep(1)


def silence_other_ranks() -> None:
    """Print in the first process only. An unexpected error still reaches standard error, with its rank."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or os.environ.get("WORLD_SIZE", "1") == "1":
        return
    stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
    sys.stdout = sys.stderr = stream
    original = sys.excepthook

    def report(*error: object) -> None:
        sys.stderr = sys.__stderr__
        print(f"vitral: process {rank} failed:", file=sys.stderr)
        original(*error)  # type: ignore[arg-type]

    sys.excepthook = report
