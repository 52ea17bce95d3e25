"""The run folder: created once, locked by one process, readable after a crash and by later versions."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vitral
from tests.conftest import small_model
from vitral.files import atomic_path, try_lock
from vitral.runs import MAX_DEPTH, Run, list_runs, quote
from vitral.training.entry import train_events
from vitral.training.events import Finished, Warned
from vitral.training.request import read_run_settings
from vitral.training.settings import read_toml

FIXTURES = Path(__file__).parent / "fixtures"


# ---- folders ----


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    run = Run.create(folder, "data", "model")
    with run.claim():
        pass
    assert Run.create(folder, "data", "model").folder == run.folder  # the run never started
    run.write_config("data = 'x'\n")
    with pytest.raises(vitral.ConfigError, match=rf"{folder} already exists.*another --out, .*--resume {folder}"):
        Run.create(folder, "data", "model")
    (tmp_path / "file").touch()
    for taken in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(vitral.ConfigError, match=f"Cannot create the run folder {taken}"):
            Run.create(taken, "data", "model")


def test_check_free(tmp_path: Path) -> None:
    Run.check_free(tmp_path / "missing")
    Run.check_free(tmp_path)  # empty
    (tmp_path / "notes.txt").touch()
    with pytest.raises(vitral.ConfigError, match="already exists") as caught:
        Run.check_free(tmp_path)
    assert "--resume" not in str(caught.value)  # not a run
    run = Run(tmp_path)
    run.write_config("")
    run.write_report({})
    with pytest.raises(vitral.ConfigError, match="already exists") as caught:
        Run.check_free(tmp_path)
    assert "--resume" not in str(caught.value)  # finished
    assert not (tmp_path / "missing").exists()


def test_a_folder_with_what_a_killed_process_left_is_free(tmp_path: Path) -> None:
    with atomic_path(tmp_path / "config.toml") as temporary:
        temporary.write_text("data =")
        shutil.copy(temporary, tmp_path / "copy")
    (tmp_path / "config.toml").unlink()
    (tmp_path / "copy").rename(temporary)  # as if the process had ended before the file got its name
    Run.check_free(tmp_path)
    (tmp_path / ".notes.tmp").touch()
    with pytest.raises(vitral.ConfigError, match="already exists"):
        Run.check_free(tmp_path)


def test_folders_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [str(Run.create(None, "a/b", "vit-s16").folder) for _ in range(3)]
    assert names == [str(Path("runs") / f"a-b-vit-s16-{number}") for number in (1, 2, 3)]


def test_open_needs_a_config(tmp_path: Path) -> None:
    assert not Run.is_run(tmp_path)
    with pytest.raises(vitral.ConfigError, match=r"not a run folder: .*config\.toml"):
        Run.open(tmp_path)
    Run(tmp_path).write_config("")
    assert Run.is_run(tmp_path)
    assert Run.open(tmp_path).folder == tmp_path


HOLD = """
import sys
from pathlib import Path
from vitral.runs import Run
with Run(Path(sys.argv[1])).claim():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("stop", [subprocess.Popen.kill, lambda process: process.stdin.close()], ids=["kill", "exit"])
def test_a_run_is_trained_by_one_process(tmp_path: Path, stop: Callable[[Any], None]) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        refused = pytest.raises(vitral.ConfigError, match=rf"Another process \(pid {process.pid}\).*another --out")
        with refused, Run(tmp_path).claim():
            pass
        stop(process)
        process.wait()
    refused = pytest.raises(vitral.ConfigError, match=f"pid {os.getpid()}")
    with Run(tmp_path).claim(), refused, Run(tmp_path).claim():  # the system released the lock of the other process
        pass
    with Run(tmp_path).claim():
        pass


# ---- files ----


def test_a_config_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.write_config("data = 'x'\n")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(vitral.ConfigError, match=r"config\.toml: No space"):
        run.write_config("data = 'y'\n")
    assert read_toml(run.config) == {"data": "x"}


@pytest.mark.parametrize("content", [b"a = = 3", b"\xff", b"a = " + b"[" * 5000])
def test_a_config_that_is_not_toml(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.toml").write_bytes(content)
    with pytest.raises(vitral.ConfigError, match=r"config\.toml is damaged"):
        Run(tmp_path).read_config()


def test_missing_files_are_empty(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.read_manifest() == run.read_report() == {}
    assert run.read_rows(run.metrics) == []


@pytest.mark.parametrize("content", [b"\xff\xfe\n1,2\n", b"1,2,3\n4,5,6\n"])
@pytest.mark.parametrize("name", ["metrics.csv", "losses.csv"])
def test_tables_that_no_run_has_written(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(vitral.ConfigError, match=rf"{name} is damaged"):
        Run(tmp_path).drop_rows_after(5)


def test_rows_of_later_steps_are_dropped(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (5, 10, 15):
        run.add_row(run.metrics, {"epoch": step // 5, "step": step, "loss": "0.5"})
    run.drop_rows_after(10)
    assert run.metrics.read_text() == "epoch,step,loss\n1,5,0.5\n2,10,0.5\n"
    assert not run.losses.exists()
    run.drop_rows_after(4)
    assert not run.metrics.exists()


def test_rows_that_were_cut_or_are_too_long_are_dropped(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.losses.write_text("step,loss\n1,2\n2,2,2\n²,1\n3\n4,1\n")
    run.drop_rows_after(3)
    assert run.read_rows(run.losses) == [{"step": "1", "loss": "2"}]
    run.losses.write_text("st")  # the power failed while the header was written
    run.drop_rows_after(3)
    assert not run.losses.exists()


def test_a_skipped_image_is_listed_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(2):
        run.add_skipped("a\nb.png", "empty")
        run.add_skipped("caf\udce9.png", "truncated")
        run.add_skipped("a\nb.png", "truncated")
    assert run.skipped.read_text() == "a\\nb.png\tempty\ncaf\\udce9.png\ttruncated\na\\nb.png\ttruncated\n"


def test_the_log_takes_any_text(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.add_log("one", "caf\udce9")
    run.add_log("two")
    lines = run.log.read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["one", "caf\\udce9", "two"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows quotes differently")
def test_quote() -> None:
    assert quote("runs/photos-1") == "runs/photos-1"
    assert quote("my runs/it's") == "'my runs/it'\"'\"'s'"


# ---- results ----


def test_an_unfinished_run_has_no_results(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.write_config("")
    with pytest.raises(vitral.ConfigError, match=f"not finished.*--resume {tmp_path}"):
        _ = run.test
    with pytest.raises(vitral.ConfigError, match=f"no model yet.*--resume {tmp_path}"):
        run.checkpoint()


def test_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    model = small_model()
    vitral.save(model, tmp_path / "model.safetensors")
    checkpoint = Run(tmp_path).checkpoint()
    assert checkpoint.model.config == model.config
    assert checkpoint.preprocess.size == (16, 16)


# ---- lists of runs ----


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a folder with a finished run of version 0.1 and, in a folder below, one that was interrupted."""
    shutil.copytree(FIXTURES / "run-0.1", tmp_path / "finished")
    shutil.copytree(FIXTURES / "run-0.1", tmp_path / "study" / "it's cut")
    (tmp_path / "study" / "it's cut" / "report.json").unlink()
    (tmp_path / "photos").mkdir()
    for age, path in enumerate(tmp_path.rglob("*")):
        os.utime(path, (1e9 - age,) * 2)
    os.utime(tmp_path / "finished" / "report.json", (1e9 + 100,) * 2)
    return tmp_path


def test_runs_are_listed_newest_first(runs: Path) -> None:
    finished, interrupted = list_runs(runs)
    assert (finished.folder, finished.state) == (str(runs / "finished"), "finished")
    assert (finished.data, finished.model, finished.top1, finished.images) == (
        "builtin:digits",
        "vit-pico7",
        0.162,
        1000,
    )
    assert finished.minutes == pytest.approx(Run(runs / "finished").read_report()["train_seconds"] / 60, abs=1e-3)
    assert finished.date.timestamp() == 1e9 + 100
    assert finished.resume is finished.problem is None
    assert interrupted.state == "interrupted"
    assert interrupted.resume == f"vitral train --resume {quote(interrupted.folder)}"
    assert (interrupted.data, interrupted.top1, interrupted.minutes) == ("builtin:digits", None, None)
    os.utime(Path(interrupted.folder) / "config.toml", (2e9,) * 2)
    assert [run.state for run in list_runs(str(runs))] == ["interrupted", "finished"]
    (itself,) = list_runs(finished.folder)
    assert itself == finished


def test_a_run_is_running_while_its_lock_is_held(runs: Path) -> None:
    run = Run(runs / "study" / "it's cut")
    with run.claim():
        (row,) = list_runs(runs / "study")
        assert (row.state, row.resume) == ("running", None)
    (row,) = list_runs(runs / "study")
    assert row.state == "interrupted"


def test_a_listing_does_not_disturb_a_run_that_starts(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing takes the lock for an instant, and a run that starts at that instant tries again."""
    handle = os.open(Run(runs).lock, os.O_RDWR | os.O_CREAT)
    assert try_lock(handle)
    monkeypatch.setattr("vitral.runs.sleep", lambda _: os.close(handle))
    with Run(runs).claim():
        pass


BAD_CANDIDATE = dict(name="probe", top1=0.5, interval=[0, 1], loss=1, evidence="", seconds=[], chosen=True)


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config.toml", b"a = = 3", "config.toml is damaged"),
        ("config.toml", b"title = 'of another program'", "data or model is missing"),
        ("config.toml", None, "no config.toml"),
        ("report.json", b"{", "report.json is damaged"),
        ("report.json", b"{}", "report.json is damaged: test is missing"),
        ("top1", "much", "top1 or images is missing or invalid"),
        ("candidates", [BAD_CANDIDATE], "report.json is damaged: the seconds"),
    ],
)  # fmt: skip
def test_a_damaged_run_is_listed_with_the_reason(runs: Path, file: str, content: Any, problem: str) -> None:
    run = Run(runs / "finished")
    if "." not in file:
        report = run.read_report()
        (report["test"] if file in report["test"] else report)[file] = content
        run.write_report(report)
    elif content is None:
        (run.folder / file).unlink()
    else:
        (run.folder / file).write_bytes(content)
    (row,) = [row for row in list_runs(runs) if row.folder == str(run.folder)]
    assert row.state == "damaged"
    assert row.problem
    assert problem in row.problem
    assert row.top1 is None


def test_runs_are_found_to_some_depth(runs: Path) -> None:
    deep = runs.joinpath("deep", *map(str, range(MAX_DEPTH - 2)))
    deep.mkdir(parents=True)
    (runs / "finished").rename(deep / "run")
    assert str(deep / "run") in [run.folder for run in list_runs(runs)]
    (deep / "below").mkdir()
    (deep / "run").rename(deep / "below" / "run")
    assert str(deep / "below" / "run") not in [run.folder for run in list_runs(runs)]
    assert list_runs(runs / "photos") == []
    with pytest.raises(vitral.ConfigError, match="Folder not found: .*nowhere"):
        list_runs(runs / "nowhere")


# ---- a run of version 0.1 ----


@pytest.fixture
def old(tmp_path: Path) -> Run:
    shutil.copytree(FIXTURES / "run-0.1", tmp_path / "run-0.1")
    return Run.open(tmp_path / "run-0.1")


def test_settings_of_an_old_run(old: Run) -> None:
    content = old.read_config()
    assert content["val_fraction"] == 0.1
    assert content["max_bad_fraction"] == 0.01
    assert not {"selection", "most_bad"} & set(content)
    assert content["masking"]["target"] == "mean-color"
    assert "momentum" not in content["optim"]
    config = read_run_settings(old)
    assert (config.model, config.steps, config.image_size, config.channels) == ("vit-pico7", 20, 28, 1)
    assert config.optim.name == "adamw"
    assert config.optim.lr == 1e-3


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        ({"name": "adam", "momentum": 0.9}, {"name": "adamw"}),
        ({"name": "muon", "momentum": 0.9, "lr": 0.1}, {"name": "muon", "lr": 0.1}),  # it had no effect
        ({"name": "sgd", "momentum": 0.9}, {"name": "sgd", "momentum": 0.9}),
    ],
)
def test_optimizers_of_old_runs(tmp_path: Path, optim: dict[str, Any], expected: dict[str, Any]) -> None:
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in optim.items())
    (tmp_path / "config.toml").write_text(f"selection = 0.1\n[optim]\n{lines}\n")
    assert Run(tmp_path).read_config()["optim"] == expected


def test_the_report_of_an_old_run(old: Run) -> None:
    report = old.read_report()
    assert {"test", "choices", "bad_images", "augmented", "data", "baseline", "command"} <= set(report)
    assert not {"held_out", "decisions", "bad_pictures", "changes_pictures"} & set(report)
    assert report["data"]["images"] == {"train": 3608, "validation": 392, "test": 1000}
    assert set(report["data"]["per_class"]) == set(report["data"]["images"])
    assert set(report["data"]["reasons"]) == {"validation", "test"}
    assert {"key", "label", "prediction"} <= set(report["test"]["mistakes"][0])
    assert {"images", "confidence", "accuracy"} == set(report["test"]["calibration"]["bins"][0])
    assert {"name", "value", "reason"} == set(report["choices"][0])
    assert old.read_manifest()["choices"]
    assert old.read_manifest()["images"]["train"] == 3608


def test_the_scores_of_an_old_run(old: Run) -> None:
    assert (old.test.top1, old.test.top5, old.test.images) == (0.162, 0.594, 1000)
    assert old.test.loss == pytest.approx(2.296084)
    assert old.test.details["top1_low"] == pytest.approx(0.140464)
    assert old.report == old.folder / "report.html"


def test_an_old_run_is_finished(old: Run) -> None:
    warned, finished = train_events(resume=old.folder)
    assert isinstance(warned, Warned)
    assert "finished" in warned.message
    assert isinstance(finished, Finished)
    assert finished.test["top1"] == 0.162


def test_the_model_of_an_old_run(old: Run) -> None:
    for checkpoint in (vitral.load(old.folder), old.checkpoint()):
        assert checkpoint.labels == tuple("0123456789")
        assert (checkpoint.model.config.width, checkpoint.model.config.channels) == (16, 1)
        assert checkpoint.preprocess.size == (28, 28)
