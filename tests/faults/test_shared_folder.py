"""Start a second command on the folder of a run that is training: it is refused, and the first one is not disturbed."""

from pathlib import Path

from tests.data.images import class_folders
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
