"""Start a second command on the folder of a run that is training: it is refused, and the first one is not disturbed."""

from pathlib import Path

import pytest

from tests.data.images import class_folders
from tests.faults.figures import record
from tests.faults.test_killed_runs import SETTINGS, run, start, wait_for_save


def test_the_second_command_is_refused(tmp_path: Path) -> None:
    data = class_folders(tmp_path / "photos", {"red": 30, "green": 30}, size=(20, 20))
    folder, settings = tmp_path / "run", SETTINGS.replace("--epochs 8", "--epochs 2000").split()
    with start(str(data), "--out", str(folder), *settings, "--format", "quiet") as process:
        try:
            wait_for_save(process, folder / "state")
            resumed = run("--resume", str(folder))
            started = run(str(data), "--out", str(folder), *settings)
            assert process.poll() is None
        finally:
            process.kill()
    assert resumed.returncode == 2
    assert f"Another process (pid {process.pid}) is training in {folder}." in resumed.stderr
    assert started.returncode == 2
    assert "already exists" in started.stderr


@pytest.mark.soak
def test_ten_second_commands_are_refused(tmp_path: Path) -> None:
    for number in range(5):
        test_the_second_command_is_refused(tmp_path / str(number))
    record(
        "Two commands on one run folder",
        "the second is refused, the first is not disturbed",
        "10 of 10 refused (5 resumed, 5 started), the first still running",
    )
