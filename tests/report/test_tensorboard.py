"""The curves of a run, as TensorBoard itself reads them back: complete, and no step twice after a kill and a resume."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

import vitral
from tests.data.pictures import class_folders
from vitral.report.tensorboard import with_tensorboard
from vitral.training.entry import train
from vitral.training.events import EpochEnded, Event, Finished, Started, Stepped

TINY: dict[str, Any] = dict(
    model="vit-pico4",
    network=dict(width=48, depth=1, heads=3, mlp_width=48),
    image_size=16,
    batch_size=8,
    epochs=3,
    workers=0,
    device="cpu",
)
WORDS = [
    "--model",
    "vit-pico4",
    "--network.width",
    "48",
    "--network.depth",
    "1",
    "--network.heads",
    "3",
    "--network.mlp-width",
    "48",
    "--image-size",
    "16",
    "--batch-size",
    "8",
    "--epochs",
    "3",
    "--workers",
    "0",
    "--device",
    "cpu",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("photos"), {"red": 24, "green": 24, "blue": 20}, size=(16, 16))


def read_curves(run: Path) -> dict[str, dict[int, float]]:
    """Each curve as step: value; a step that is there twice fails."""
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
    """How often the files hold each step of the training loss, whatever a reader makes of it."""
    found: Counter[int] = Counter()
    for path in (run / "tensorboard").iterdir():
        for event in LegacyEventFileLoader(str(path)).Load():
            found.update(event.step for value in event.summary.value if value.tag == "train/loss")
    return found


def test_events_are_passed_on_and_come_back_as_curves(folder: Path, tmp_path: Path) -> None:
    events = list(with_tensorboard(train(folder, out=tmp_path / "run", **TINY)))
    curves = read_curves(tmp_path / "run")
    steps = [event for event in events if isinstance(event, Stepped)]
    epochs = [event for event in events if isinstance(event, EpochEnded)]
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert len(epochs) == 3
    expected = {f"train/{name}": {step.step: getattr(step, name) for step in steps} for name in ("loss", "lr")}
    expected["train/images_per_second"] = {step.step: step.images_per_second for step in steps}
    expected |= {f"validation/{name}": {one.step: getattr(one, name) for one in epochs} for name in ("top1", "loss")}
    expected |= {f"test/{name}": {steps[-1].step: finished.test[name]} for name in ("top1", "top5", "loss")}
    assert curves.keys() == expected.keys()
    for tag, curve in expected.items():
        assert curves[tag] == pytest.approx(curve, rel=1e-6), tag  # the files hold 32 bits

    again = list(with_tensorboard(train(resume=tmp_path / "run")))  # finished before: nothing is added
    assert isinstance(again[-1], Finished)
    assert read_curves(tmp_path / "run") == curves


def test_a_run_that_is_left_and_resumed_has_every_step_once(folder: Path, tmp_path: Path) -> None:
    list(with_tensorboard(train(folder, out=tmp_path / "whole", **TINY)))
    events = with_tensorboard(train(folder, out=tmp_path / "parts", **TINY))
    batches = next(event.batches for event in events if isinstance(event, Started))
    left_at = batches + 3  # three steps after the state that the first epoch saved
    for event in events:
        if isinstance(event, Stepped) and event.step == left_at:
            break
    del events
    went_on = [event for event in with_tensorboard(train(resume=tmp_path / "parts")) if isinstance(event, Started)]
    assert [event.step for event in went_on] == [batches]
    assert [step for step, times in written_steps(tmp_path / "parts").items() if times == 2] == [
        batches + 1,
        batches + 2,
        batches + 3,
    ]
    whole, parts = read_curves(tmp_path / "whole"), read_curves(tmp_path / "parts")
    for tag in ("train/loss", "train/lr", "validation/top1", "validation/loss", "test/top1", "test/loss"):
        assert parts[tag] == whole[tag], tag


def test_kill_dash_nine_and_a_resume_that_need_not_ask_again(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "vitral", "train"]
    words = [str(folder), "--out", str(run), *WORDS, "--tensorboard", "--format", "json"]
    with subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            told = json.loads(line)
            if told["event"] == "stepped" and told["step"] == 9:
                process.kill()
                break
    assert not (run / "report.json").exists()
    done = subprocess.run([*command, "--resume", str(run)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    curve = read_curves(run)["train/loss"]
    assert list(curve) == list(range(1, max(curve) + 1))
    assert max(written_steps(run).values()) == 2, "no step was done again, so nothing was tried"
    assert list(read_curves(run)["test/top1"]) == [max(curve)]


def test_a_missing_package_is_told_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    events = train("builtin:digits", out=tmp_path / "run", **TINY)
    with pytest.raises(vitral.VitralError, match=r"pip install 'vitral\[tensorboard\]'"):
        with_tensorboard(events)
    assert not (tmp_path / "run").exists()


def test_curves_need_no_torch(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from vitral.report.tensorboard import with_tensorboard
from vitral.training.events import Started, Stepped

began = Started(folder=Path(sys.argv[1]), step=0, steps=1, batches=1, parameters=1, trained=1)
stepped = Stepped(step=1, steps=1, epoch=0, loss=0.5, lr=0.1, images_per_second=1.0, seconds_left=0.0)
assert list(with_tensorboard([began, stepped])) == [began, stepped]
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert read_curves(tmp_path)["train/loss"] == {1: 0.5}


def test_an_event_that_is_no_point_of_a_curve_passes(tmp_path: Path) -> None:
    events: list[Event] = [Finished(folder=tmp_path, test={}, best_step=0, train_seconds=0.0)]
    assert list(with_tensorboard(events)) == events  # a finished run that was resumed: it never began
    assert not (tmp_path / "tensorboard").exists()
