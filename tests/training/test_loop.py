"""The loop on small datasets: its events and files, repeatability, signals, and what stops it."""

import json
import multiprocessing
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import vitral
from tests.data.images import class_folders
from tests.training.short_runs import (
    TINY,
    assert_equal,
    assert_same_run,
    interrupt_at,
    last,
    read_weights,
    train,
    warnings_of,
)
from vitral.data.sources import open_dataset
from vitral.data.splits import choose_splits
from vitral.training.entry import train_events
from vitral.training.events import Chosen, EpochEnded, Finished, Interrupted, Measuring, Saved, Started, Stepped
from vitral.training.state import load_state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("photos"), {"red": 24, "green": 24, "blue": 20}, size=(20, 24))


def test_a_run_from_folder_to_model(folder: Path, tmp_path: Path) -> None:
    events = train(folder, tmp_path / "run", epochs=6, augment=dict(flip=0.5), mix=dict(mixup=0.2))
    finished = last(events, Finished)
    assert finished.test["top1"] > 0.9
    assert [event.epoch for event in events if isinstance(event, EpochEnded)] == list(range(6))
    assert {event.name for event in events if isinstance(event, Chosen)} >= {"test", "validation", "precision"}
    assert all(event.reason for event in events if isinstance(event, Chosen))
    steps = [event for event in events if isinstance(event, Stepped)]
    assert [event.step for event in steps] == list(range(1, last(events, Started).steps + 1))
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.toml", "manifest.json", "metrics.csv", "model.safetensors", "state", "report.json"} <= names
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["test"]["top1"] == finished.test["top1"]
    assert report["train_seconds"] > 0
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["resumes"] == []
    assert {"threads", "seed", "device", "data_fingerprint"} <= set(manifest)
    loaded = vitral.load(tmp_path / "run" / "model.safetensors")
    assert loaded.labels == ("blue", "green", "red")
    assert loaded.preprocess.size == (16, 16)
    assert vitral.load(tmp_path / "run").labels == loaded.labels


def test_the_same_seed_is_the_same_run_and_another_is_not(folder: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(folder, tmp_path / name, seed=seed)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    weights = [read_weights(tmp_path / name)["norm.weight"] for name in ("a", "c")]
    assert not torch.equal(*weights)


def test_a_golden_loss_curve(tmp_path: Path) -> None:
    """Thirty steps on the built-in digits. A change to the numbers shows here first."""
    network, optim = dict(depth=2, pool="token"), dict(name="adamw", lr=1e-3, warmup_steps=5)
    settings = dict(model="vit-pico7", batch_size=32, steps=30, workers=0, device="cpu")
    events = train_events("builtin:digits", out=tmp_path / "run", network=network, optim=optim, **settings)
    losses = [event.loss for event in events if isinstance(event, Stepped)]
    assert losses[0] == pytest.approx(2.302585, abs=1e-5)  # ln 10: the head starts at zero
    assert len(losses) == 30
    assert sum(losses[-5:]) / 5 == pytest.approx(2.0313, abs=2e-3)


# ---- the end of a run ----


def test_early_stopping_and_time_budget(folder: Path, tmp_path: Path) -> None:
    events = train(folder, tmp_path / "a", epochs=50, patience=2, optim=dict(lr=1e-12))
    assert len([event for event in events if isinstance(event, EpochEnded)]) < 10
    events = train(folder, tmp_path / "b", epochs="auto", minutes=0.02)
    assert [event for event in events if isinstance(event, Chosen) and event.name == "epochs"]
    config = (tmp_path / "b" / "config.toml").read_text()
    assert "= auto" not in config
    assert '= "auto"' not in config


def test_the_last_step_can_be_kept(folder: Path, tmp_path: Path) -> None:
    """The model is that of the last step, and a resumed run is the same run."""
    settings: dict[str, Any] = dict(epochs=4, optim=dict(lr=0.05, schedule="constant"), keep="last")  # a jumpy loss
    finished = last(train(folder, tmp_path / "whole", **settings), Finished)
    assert load_state(tmp_path / "whole" / "state") is None  # a run of seconds needs none
    assert finished.best_step == 20
    interrupt_at(12, train_events(folder, out=tmp_path / "parts", **{**TINY, **settings}))
    list(train_events(resume=tmp_path / "parts"))
    assert_equal(read_weights(tmp_path / "whole"), read_weights(tmp_path / "parts"))
    best = last(train(folder, tmp_path / "best", **{**settings, "keep": "best"}), Finished)
    assert best.best_step <= 20
    vitral.write_report(tmp_path / "whole")
    assert "last step" in (tmp_path / "whole" / "report.html").read_text()
    with pytest.raises(vitral.ConfigError, match="patience.*keep='last'"):
        train(folder, tmp_path / "refused", keep="last", patience=3)


def test_many_short_epochs_are_not_all_measured_and_saved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitral.training.job.MAX_SCORED_EPOCHS", 3)
    whole = train(folder, tmp_path / "whole", batch_size=64, epochs=10)  # one batch per epoch
    assert [event.epoch for event in whole if isinstance(event, EpochEnded)] == [3, 7, 9]
    assert len([event for event in whole if isinstance(event, Saved)]) == 3
    settings = {**TINY, "batch_size": 64, "epochs": 10}
    interrupted = interrupt_at(5, train_events(folder, out=tmp_path / "parts", **settings))  # an unmeasured epoch ends
    assert interrupted.step == 5
    list(train_events(resume=tmp_path / "parts"))
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


# ---- signals ----


def test_an_interrupted_run_names_the_command_that_resumes_it(folder: Path, tmp_path: Path) -> None:
    interrupted = interrupt_at(3, train_events(folder, out=tmp_path / "my run", **TINY))
    assert interrupted.step == 3
    assert interrupted.signal == signal.SIGTERM
    assert interrupted.resume == f"vitral train --resume '{tmp_path / 'my run'}'"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # restored


@pytest.mark.parametrize("keep", ["best", "last"])
@pytest.mark.parametrize(("split", "steps_left"), [("test", 0), ("validation", 5)])
def test_a_run_interrupted_while_it_measures_resumes_there(
    folder: Path, tmp_path: Path, keep: str, split: str, steps_left: int
) -> None:
    settings = {**TINY, "epochs": 2, "keep": keep, "ema": 0.9}
    whole = last(list(train_events(folder, out=tmp_path / "whole", **settings)), Finished)
    event = None
    for event in train_events(folder, out=tmp_path / "parts", **settings):
        if isinstance(event, Measuring) and event.what == split:
            signal.raise_signal(signal.SIGINT)
    assert isinstance(event, Interrupted)
    assert event.signal == signal.SIGINT
    assert not (tmp_path / "parts" / "report.json").exists()
    events = list(train_events(resume=tmp_path / "parts"))
    assert len([event for event in events if isinstance(event, Stepped)]) == steps_left
    assert (tmp_path / "whole" / "metrics.csv").read_text() == (tmp_path / "parts" / "metrics.csv").read_text()
    assert last(events, Finished).test["top1"] == whole.test["top1"]
    assert_equal(read_weights(tmp_path / "whole"), read_weights(tmp_path / "parts"))


def test_processes_that_load_images_may_end_with_the_run(folder: Path, tmp_path: Path) -> None:
    """A scheduler sends its signal to all processes, here while an epoch is measured."""
    event = None
    for event in train_events(folder, out=tmp_path / "parts", **{**TINY, "workers": 1}):
        if isinstance(event, Measuring):
            for child in multiprocessing.active_children():
                child.terminate()
            signal.raise_signal(signal.SIGTERM)
    assert isinstance(event, Interrupted)
    assert isinstance(list(train_events(resume=tmp_path / "parts"))[-1], Finished)
    train(folder, tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


# ---- unreadable images ----


def test_unreadable_images_are_listed_and_too_many_stop_the_run(tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", {"a": 60, "b": 60}, size=(16, 16))
    key = choose_splits(open_dataset(data)).train[20].key
    (data / key).write_bytes(b"")
    events = train(data, tmp_path / "one", max_bad_fraction=0.05)
    assert any(f"{key}: empty" in message for message in warnings_of(events))
    assert (tmp_path / "one" / "skipped.txt").read_text().splitlines() == [f"{key}\tempty"]
    assert json.loads((tmp_path / "one" / "report.json").read_text())["bad_images"] == 1
    for index in range(10, 30):
        (data / "b" / f"{index:03d}.png").write_bytes(b"no image")
    with pytest.raises(vitral.DataError, match=r"cannot be read.*--max-bad-fraction"):
        train(data, tmp_path / "many")
