"""A disk that fills up at different points of a save, and a folder that cannot be written: the old state stays.

The disk is a small tmpfs, which root can mount on Linux; without it, a limit on the size of files fails in its place.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.faults.figures import record
from tests.faults.test_killed_runs import SETTINGS
from vitral import VitralError
from vitral.training.state import TrainState, load_state, save_state

TENSORS = {f"model:{number}": torch.randn(64, 256) for number in range(8)}  # 512 KiB
STATE_BYTES = 8 * 64 * 256 * 4


@contextmanager
def small_disk(folder: Path, kibibytes: int) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)]
    try:
        is_mounted = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        is_mounted = False
    if not is_mounted:
        pytest.skip("mounting a tmpfs needs root on Linux")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, free: int) -> Path:
    """Fill a disk up to the given number of free bytes."""
    path, usage = folder / "other-data", shutil.disk_usage(folder)
    path.write_bytes(b"\0" * max(0, usage.free - free))
    return path


def check_full_disk(folder: Path, free_bytes: list[int]) -> int:
    """Save with little space, and return how often that failed and left the old state as the only one."""
    failures = 0
    with small_disk(folder, 2048) as disk:
        save_state(disk / "state", TrainState(step=1), TENSORS)
        for free in free_bytes:
            other = fill(disk, free)
            with pytest.raises(VitralError, match="Cannot save the state in .*No space left on device") as caught:
                save_state(disk / "state", TrainState(step=2), TENSORS)
            assert caught.value.exit_code == 1
            other.unlink()
            assert [path.name for path in (disk / "state").iterdir()] == ["step-00000001"]
            loaded = load_state(disk / "state")
            assert loaded is not None
            assert all(torch.equal(loaded[1][name], tensor) for name, tensor in TENSORS.items())
            failures += 1
        save_state(disk / "state", TrainState(step=2), TENSORS)  # there is space again
    return failures


def test_a_full_disk_leaves_the_old_state(tmp_path: Path) -> None:
    check_full_disk(tmp_path / "disk", [0, STATE_BYTES // 2, STATE_BYTES + 4096])


def test_a_run_on_a_full_disk_reports_it_and_resumes(tmp_path: Path) -> None:
    """The whole command: one sentence, exit code 1, and a run that continues once there is space."""
    from tests.data.images import class_folders

    data = class_folders(tmp_path / "photos", {"red": 15, "green": 15}, size=(20, 20))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with small_disk(tmp_path / "disk", 1500) as disk:
        command = [sys.executable, "-m", "vitral", "train", str(data), "--out", str(disk / "run"), *SETTINGS.split()]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 1, done.stderr
        assert "No space left on device" in done.stderr.splitlines()[-1]
        assert str(disk) in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
        assert not list(disk.rglob("*tmp*"))


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX file modes")
def test_a_read_only_folder_is_reported(tmp_path: Path) -> None:
    if os.geteuid() == 0:  # root writes anywhere, except on a file system that is mounted read-only
        with small_disk(tmp_path / "disk", 2048) as disk:
            save_state(disk / "state", TrainState(step=1), TENSORS)
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            check_read_only(disk / "state", "Read-only file system")
        return
    save_state(tmp_path / "state", TrainState(step=1), TENSORS)
    (tmp_path / "state").chmod(0o555)
    check_read_only(tmp_path / "state", "Permission denied")
    (tmp_path / "state").chmod(0o755)


def check_read_only(folder: Path, reason: str) -> None:
    with pytest.raises(VitralError, match=f"Cannot save the state in .*{reason}"):
        save_state(folder, TrainState(step=2), TENSORS)
    loaded = load_state(folder)
    assert loaded is not None
    assert loaded[0].step == 1


@pytest.mark.soak
def test_a_disk_that_is_full_at_ten_points(tmp_path: Path) -> None:
    points = [STATE_BYTES * number // 8 for number in range(9)] + [STATE_BYTES + 4096]
    failures = check_full_disk(tmp_path / "disk", points)
    test_a_read_only_folder_is_reported(tmp_path)
    record(
        "Disk full at 10 points of a save; read-only folder",
        "old state intact, no partial state, one clear sentence",
        f"{failures} of 10 points (a real 2 MiB disk), and the read-only folder",
    )
