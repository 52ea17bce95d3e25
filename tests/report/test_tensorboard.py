"""The TensorBoard curves of a run, as TensorBoard reads them back: complete, and each step once after a resume."""

import json
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

import vitral
from tests.cli.typed import typed
from tests.data.images import class_folders
from vitral.report.tensorboard import scalars_of, with_tensorboard
from vitral.runs import Run
from vitral.training.entry import train_events
from vitral.training.events import EpochEnded, Event, Finished, Saved, Started, Stepped

TINY: dict[str, Any] = dict(
    model="vit-pico4",
    network=dict(width=48, depth=1, heads=3, mlp_width=48),
    image_size=16,
    batch_size=8,
    epochs=3,
    workers=0,
    device="cpu",
)
TINY_FLAGS = shlex.split(
    "--model vit-pico4 --network.width 48 --network.depth 1 --network.heads 3 --network.mlp-width 48 --image-size 16 "
    "--batch-size 2 --epochs 3 --workers 0 --device cpu"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("photos"), {"red": 24, "green": 24, "blue": 20}, size=(16, 16))


def read_curves(run: Path) -> dict[str, dict[int, float]]:
    """Return each curve as a dict from step to value. Fail if a step occurs twice."""
    reader = EventAccumulator(str(run / "tensorboard"), size_guidance={SCALARS: 0})
    reader.Reload()
    curves = {}
    for tag in reader.Tags()[SCALARS]:
        points = reader.Scalars(tag)
        steps = [point.step for point in points]
        assert steps == sorted(set(steps)), f"{tag}: {steps}"
        curves[tag] = {point.step: point.value for point in points}
    return curves


def written_steps(run: Path) -> Counter[int]:
    """Return how often the files contain each step of the training loss, before a reader discards any."""
    steps: Counter[int] = Counter()
    for path in (run / "tensorboard").iterdir():
        for event in LegacyEventFileLoader(str(path)).Load():
            steps.update(event.step for value in event.summary.value if value.tag == "train/loss")
    return steps


def test_events_pass_through_and_read_back_as_curves(folder: Path, tmp_path: Path) -> None:
    events = list(with_tensorboard(train_events(folder, out=tmp_path / "run", **TINY)))
    curves = read_curves(tmp_path / "run")
    steps = [event for event in events if isinstance(event, Stepped)]
    epochs = [event for event in events if isinstance(event, EpochEnded)]
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert len(epochs) == 3
    expected = {f"train/{name}": {step.step: getattr(step, name) for step in steps} for name in ("loss", "lr")}
    expected["train/images_per_second"] = {step.step: step.images_per_second for step in steps}
    expected |= {
        f"validation/{name}": {epoch.step: getattr(epoch, name) for epoch in epochs} for name in ("top1", "loss")
    }
    expected |= {f"test/{name}": {steps[-1].step: finished.test[name]} for name in ("top1", "top5", "loss")}
    assert curves.keys() == expected.keys()
    for tag, curve in expected.items():
        assert curves[tag] == pytest.approx(curve, rel=1e-6), tag  # the files hold float32

    again = list(with_tensorboard(train_events(resume=tmp_path / "run")))  # already finished: nothing is added
    assert isinstance(again[-1], Finished)
    assert read_curves(tmp_path / "run") == curves


def test_a_resumed_run_has_every_step_once(folder: Path, tmp_path: Path) -> None:
    list(with_tensorboard(train_events(folder, out=tmp_path / "whole", **TINY)))
    events = with_tensorboard(train_events(folder, out=tmp_path / "parts", **TINY))
    epoch = next(event.steps_per_epoch for event in events if isinstance(event, Started))
    stop = epoch + 3  # three steps after the state that the first epoch saved
    for event in events:
        if isinstance(event, Stepped) and event.step == stop:
            break
    del events
    resumed = list(with_tensorboard(train_events(resume=tmp_path / "parts")))
    assert [event.step for event in resumed if isinstance(event, Started)] == [epoch]
    repeated = [step for step, count in written_steps(tmp_path / "parts").items() if count == 2]
    assert repeated == [epoch + 1, epoch + 2, epoch + 3]
    whole, parts = read_curves(tmp_path / "whole"), read_curves(tmp_path / "parts")
    for tag in ("train/loss", "train/lr", "validation/top1", "validation/loss", "test/top1", "test/loss"):
        assert parts[tag] == whole[tag], tag


def test_a_killed_run_continues_its_curves_without_the_flag(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "vitral", "train"]
    arguments = [str(folder), "--out", str(run), *TINY_FLAGS, "--tensorboard", "--format", "json"]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            event = json.loads(line)
            if event["event"] == "stepped" and event["step"] == 28:  # soon after the state of step 23
                process.kill()
                break
    assert not (run / "report.json").exists()
    done = typed("train", "--resume", str(run))
    assert done.returncode == 0, done.stderr
    curve = read_curves(run)["train/loss"]
    assert list(curve) == list(range(1, max(curve) + 1))
    assert max(written_steps(run).values()) == 2, "the resumed run repeated no step, so this proves nothing"
    assert list(read_curves(run)["test/top1"]) == [max(curve)]


def test_a_missing_package_raises_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    events = train_events("builtin:digits", out=tmp_path / "run", **TINY)
    with pytest.raises(vitral.VitralError, match=r"pip install 'vitral\[tensorboard\]'"):
        with_tensorboard(events)
    assert not (tmp_path / "run").exists()


def test_curves_need_no_torch(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from vitral.report.tensorboard import with_tensorboard
from vitral.training.events import Started, Stepped

started = Started(folder=Path(sys.argv[1]), step=0, steps=1, steps_per_epoch=1, parameters=1, trained=1)
stepped = Stepped(step=1, steps=1, epoch=0, loss=0.5, lr=0.1, images_per_second=1.0, seconds_left=0.0)
assert list(with_tensorboard([started, stepped])) == [started, stepped]
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert read_curves(tmp_path)["train/loss"] == {1: 0.5}


def test_a_finished_run_that_is_resumed_writes_nothing(tmp_path: Path) -> None:
    events: list[Event] = [
        Finished(folder=tmp_path, test={"top1": 0.5, "top5": 1, "loss": 1}, best_step=0, train_seconds=0)
    ]
    assert list(with_tensorboard(events)) == events
    assert not Run(tmp_path).tensorboard.exists()


def test_test_scores_of_a_run_resumed_after_its_last_step_stand_at_that_step(tmp_path: Path) -> None:
    started = Started(folder=tmp_path, step=7, steps=7, steps_per_epoch=1, parameters=1, trained=1)
    finished = Finished(folder=tmp_path, test={"top1": 0.5, "top5": None, "loss": 1}, best_step=7, train_seconds=0)
    assert list(with_tensorboard([started, finished])) == [started, finished]
    assert read_curves(tmp_path) == {"test/top1": {7: 0.5}, "test/loss": {7: 1.0}}


def test_scores_that_are_not_numbers_are_omitted() -> None:
    nan = float("nan")
    epoch = EpochEnded(epoch=0, step=1, train_loss=1, top1=nan, top5=nan, loss=2, is_best=False, seconds=1)
    assert scalars_of(epoch) == {"validation/loss": 2}
    assert scalars_of(Saved(path=Path("state"), step=1)) == {}
