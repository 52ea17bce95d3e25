"""Runs on small data: what is decided, what is written, what a resume does, what stops a run."""

import json
import multiprocessing
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import vitral
from tests.data.pictures import class_folders
from tests.training.leaving import leave_at
from vitral.data.sources import open_dataset
from vitral.data.splits import choose_splits
from vitral.evaluation.metrics import Scores
from vitral.training.best import Best
from vitral.training.entry import resume_run, train
from vitral.training.events import (
    Baseline,
    Chosen,
    EpochEnded,
    Event,
    Finished,
    Interrupted,
    Measuring,
    Saved,
    Started,
    Stepped,
    Warned,
)
from vitral.training.learner import Learner, TrainingError
from vitral.training.settings import reopen
from vitral.training.state import load_state

TINY: dict[str, Any] = dict(
    model="vit-pico4",
    network=dict(width=48, depth=2, heads=3, mlp_width=96),
    image_size=16,
    batch_size=8,
    epochs=2,
    workers=0,
    device="cpu",
    optim=dict(lr=2e-3),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("photos"), {"red": 24, "green": 24, "blue": 20}, size=(20, 24))


def run(folder: Path, out: Path, **settings: Any) -> list[Event]:
    return list(train(folder, out=out, **{**TINY, **settings}))


def last(events: list[Event], kind: Any) -> Any:
    return [event for event in events if isinstance(event, kind)][-1]


def test_a_run_from_folder_to_model(folder: Path, tmp_path: Path) -> None:
    events = run(folder, tmp_path / "run", epochs=6, augment=dict(flip=0.5), mix=dict(mixup=0.2))
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


def test_the_room_can_be_called(folder: Path, tmp_path: Path) -> None:
    events = list(vitral.train_events(folder, out=tmp_path / "run", **{**TINY, "epochs": 1}))  # pyright: ignore
    assert isinstance(events[-1], Finished)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def same(first: Path, second: Path) -> None:
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    states = [load_state(path / "state")[0] for path in (first, second)]
    assert states[0] is not None
    assert states[1] is not None
    for name, tensor in states[0].tensors.items():
        assert torch.equal(tensor, states[1].tensors[name]), name


def test_the_same_seed_is_the_same_run_and_another_is_not(folder: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(folder, tmp_path / name, seed=seed)
    same(tmp_path / "a", tmp_path / "b")
    assert not torch.equal(weights(tmp_path / "a")["norm.weight"], weights(tmp_path / "c")["norm.weight"])


EVERYTHING: dict[str, Any] = dict(
    dropout=0.1,
    drop_path=0.1,
    ema=0.9,
    optim=dict(name="muon", lr=2e-3, layer_decay=0.9),
    augment=dict(crop="resized", flip=0.5, randaugment=1, erase=0.3),
    mix=dict(mixup=0.3, cutmix=0.5),
    loss=dict(smoothing=0.1, class_weights="balanced"),
    accumulate=2,
    epochs=3,
)


@pytest.mark.parametrize("stop", [1, 4, 5, 7, 11, 15])  # 5 and 15: an epoch ends, and the run
def test_a_run_that_is_left_and_resumed_is_the_same_run(folder: Path, tmp_path: Path, stop: int) -> None:
    """Left at a step by a signal, resumed, and compared with one that was not disturbed, with everything on."""
    run(folder, tmp_path / "whole", **EVERYTHING)
    leave_at(stop, train(folder, out=tmp_path / "parts", **{**TINY, **EVERYTHING}))
    resumed = list(train(resume=tmp_path / "parts"))
    assert last(resumed, Started).step == stop
    same(tmp_path / "whole", tmp_path / "parts")
    assert (tmp_path / "whole" / "metrics.csv").read_text() == (tmp_path / "parts" / "metrics.csv").read_text()
    assert (tmp_path / "whole" / "losses.csv").read_text() == (tmp_path / "parts" / "losses.csv").read_text()
    whole, parts = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("whole", "parts"))
    assert whole["test"]["loss"] == parts["test"]["loss"]
    assert json.loads((tmp_path / "parts" / "manifest.json").read_text())["resumes"] == [stop]


def test_resuming_what_is_finished_or_changed(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "run")
    events = list(train(resume=tmp_path / "run"))
    assert isinstance(events[-1], Finished)
    assert "finished" in last(events, Warned).message
    (tmp_path / "run" / "report.json").unlink()
    assert isinstance(list(train(str(folder), resume=tmp_path / "run", batch_size=8))[-1], Finished)
    (tmp_path / "run" / "report.json").unlink()
    with pytest.raises(vitral.ConfigError, match="batch_size is 8"):
        list(train(resume=tmp_path / "run", batch_size=16))
    with pytest.raises(vitral.ConfigError, match="never overwrites"):
        run(folder, tmp_path / "run")
    with pytest.raises(vitral.ConfigError, match="is no run"):
        list(train(resume=tmp_path))


def test_a_damaged_state_is_passed_over_and_said(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "run")
    (tmp_path / "run" / "report.json").unlink()
    newest, older = sorted((tmp_path / "run" / "state").iterdir(), reverse=True)
    content = bytearray((newest / "tensors.safetensors").read_bytes())
    content[-100] ^= 1
    (newest / "tensors.safetensors").write_bytes(content)
    events = list(train(resume=tmp_path / "run"))
    assert "is damaged" in last(events, Warned).message
    assert last(events, Started).step == int(older.name.removeprefix("step-"))
    for path in (tmp_path / "run" / "state").iterdir():
        (path / "manifest.json").unlink()
    (tmp_path / "run" / "report.json").unlink()
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    with pytest.raises(
        vitral.VitralError, match=r"No saved state .* can be used: step-.*manifest\.json.*another --out"
    ):
        list(train(resume=tmp_path / "run"))
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


def test_other_data_are_refused_on_resume(folder: Path, tmp_path: Path) -> None:
    own = class_folders(tmp_path / "own", {"a": 12, "b": 12}, size=(16, 16))
    run(own, tmp_path / "run")
    (tmp_path / "run" / "report.json").unlink()
    class_folders(own, {"a": 14}, size=(16, 16))
    with pytest.raises(vitral.DataError, match="not those"):
        list(train(resume=tmp_path / "run"))


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}
    plain = Learner.gradients

    def poisoned(self: Learner, batch: Any, step: int) -> float:
        loss = plain(self, batch, step)
        if step == 3:
            found["before"] = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            found["model"] = self.model
            next(p for p in self.model.parameters() if p.grad is not None).grad.fill_(float("nan"))  # type: ignore[union-attr]
        return loss

    monkeypatch.setattr(Learner, "gradients", poisoned)
    with pytest.raises(TrainingError, match=r"Step 3.*Pictures of this step: .*\.png"):
        run(folder, tmp_path / "run")
    for name, parameter in found["model"].named_parameters():
        assert torch.equal(parameter, found["before"][name])


def test_bad_pictures_are_listed_and_too_many_stop(tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", {"a": 60, "b": 60}, size=(16, 16))
    splits = choose_splits(open_dataset(data))
    key = splits.train[20].key
    (data / key).write_bytes(b"")
    run(data, tmp_path / "one", most_bad=0.05)
    assert (tmp_path / "one" / "skipped.txt").read_text().splitlines() in ([f"{key}\tempty"], [f"{key}\tempty"] * 2)
    for index in range(10, 30):
        (data / "b" / f"{index:03d}.png").write_bytes(b"no picture")
    with pytest.raises(vitral.DataError, match="cannot be read"):
        run(data, tmp_path / "many")


def test_half_precision_learns_and_leaves_out_steps_that_do_not_fit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = run(folder, tmp_path / "run", precision="float16", epochs=6)
    assert last(events, Finished).test["top1"] > 0.8
    state, _ = load_state(tmp_path / "run" / "state")
    assert state is not None
    assert 1 <= state.facts["loss_scale"] <= 2**14
    monkeypatch.setattr("vitral.training.learner.STEPS_IN_RANGE", 5)  # so many that fit, and the scale rises again
    leave_at(7, train(folder, out=tmp_path / "left", **{**TINY, "precision": "float16", "epochs": 6}))
    list(train(resume=tmp_path / "left"))
    run(folder, tmp_path / "whole", precision="float16", epochs=6)
    states = [load_state(tmp_path / name / "state")[0] for name in ("whole", "left")]
    scales = [found.facts["loss_scale"] for found in states if found is not None]
    assert scales[0] == scales[1] > state.facts["loss_scale"]


def test_the_best_epoch_is_by_top1_and_by_loss_where_few_pictures_cannot_tell() -> None:
    def better(top1: float, loss: float, images: int, best: float, best_loss: float) -> bool:
        return Best(top1=best, loss=best_loss).take(Scores(images=images, loss=loss, top1=top1, top5=1.0), 1, 1)

    assert better(0.5, 9.0, 100, -1.0, float("inf"))
    assert better(0.90, 0.30, 10_000, 0.80, 0.20)  # clearly better, whatever the loss
    assert not better(0.80, 0.10, 10_000, 0.90, 0.20)  # clearly worse
    assert better(0.975, 0.10, 100, 0.985, 0.12)  # one picture of a hundred says nothing, the loss does
    assert not better(0.985, 0.13, 100, 0.975, 0.12)


def test_early_stopping_and_time_budget(folder: Path, tmp_path: Path) -> None:
    events = run(folder, tmp_path / "a", epochs=50, patience=2, optim=dict(lr=1e-12))
    assert len([event for event in events if isinstance(event, EpochEnded)]) < 10
    events = run(folder, tmp_path / "b", epochs="auto", minutes=0.02)
    assert "fit the time" in [event for event in events if isinstance(event, Chosen)][-1].reason
    assert "epochs = auto" not in (tmp_path / "b" / "config.toml").read_text()


def test_a_time_budget_knows_what_is_measured(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 8 pictures takes three seconds, so looking at a picture takes an eighth of one."""
    monkeypatch.setattr(Learner, "time_a_step", lambda *_: 3.0)
    monkeypatch.setattr(Learner, "learn", lambda *_: 1.0)
    plain = last(run(folder, tmp_path / "a", epochs="auto", minutes=5), Started)
    class_folders(tmp_path / "val", {"red": 200, "green": 200, "blue": 200}, size=(20, 24))
    large = last(run(folder, tmp_path / "b", epochs="auto", minutes=5, val=str(tmp_path / "val")), Started)
    assert large.steps < plain.steps
    for found in (plain, large):
        report = json.loads((found.folder / "report.json").read_text())["data"]["pictures"]
        seconds = 3 * found.steps + (report["validation"] * found.steps / found.batches + report["test"]) / 8
        assert seconds == pytest.approx(0.85 * 300, abs=4)


def test_the_last_step_can_be_kept_instead(folder: Path, tmp_path: Path) -> None:
    """What is kept is what the state ends with, and a run that is left goes on as if it had not been."""
    settings = dict(epochs=4, optim=dict(lr=0.05, schedule="constant"), keep="last")  # a rate that leaps about
    finished = last(run(folder, tmp_path / "whole", **settings), Finished)
    state, _ = load_state(tmp_path / "whole" / "state")
    assert state is None  # a run of seconds needs none
    assert finished.best_step == 20
    for event in train(folder, out=tmp_path / "left", **{**TINY, **settings}):
        if isinstance(event, Stepped) and event.step == 12:
            signal.raise_signal(signal.SIGTERM)
    list(train(resume=tmp_path / "left"))
    whole, left = (weights(tmp_path / name) for name in ("whole", "left"))
    assert all(torch.equal(whole[name], left[name]) for name in whole)
    best = last(run(folder, tmp_path / "best", **{**settings, "keep": "best"}), Finished)
    assert best.best_step <= 20
    vitral.write_report(tmp_path / "whole")
    assert "The model is that of the last step" in (tmp_path / "whole" / "report.html").read_text()
    with pytest.raises(vitral.ConfigError, match="patience waits"):
        run(folder, tmp_path / "refused", keep="last", patience=3)


@pytest.mark.parametrize("keep", ["best", "last"])
@pytest.mark.parametrize(("what", "left"), [("held out", 0), ("validation", 5)])
def test_a_run_that_is_left_while_it_is_measured_goes_on_with_that(
    folder: Path, tmp_path: Path, keep: str, what: str, left: int
) -> None:
    settings = {**TINY, "epochs": 2, "keep": keep, "ema": 0.9}
    whole = last(list(train(folder, out=tmp_path / "whole", **settings)), Finished)
    for event in train(folder, out=tmp_path / "left", **settings):
        if isinstance(event, Measuring) and event.what == what:
            signal.raise_signal(signal.SIGINT)
    assert isinstance(event, Interrupted)
    assert not (tmp_path / "left" / "report.json").exists()
    events = list(train(resume=tmp_path / "left"))
    assert len([event for event in events if isinstance(event, Stepped)]) == left  # what had not been learnt
    assert (tmp_path / "whole" / "metrics.csv").read_text() == (tmp_path / "left" / "metrics.csv").read_text()
    assert last(events, Finished).test["top1"] == whole.test["top1"]
    ours, theirs = (weights(tmp_path / name) for name in ("whole", "left"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_best_network_is_looked_for_when_a_run_goes_on(folder: Path, tmp_path: Path) -> None:
    leave_at(7, train(folder, out=tmp_path / "run", **{**TINY, "epochs": 2}))
    (tmp_path / "run" / "model.safetensors").write_bytes(b"nothing")
    events = list(train(resume=tmp_path / "run"))
    assert any("The best network so far is lost" in event.message for event in events if isinstance(event, Warned))
    assert last(events, Finished).best_step == 10
    vitral.load(tmp_path / "run" / "model.safetensors")


def test_what_was_lost_after_the_last_step_is_made_again(folder: Path, tmp_path: Path) -> None:
    for event in train(folder, out=tmp_path / "run", **TINY):
        if isinstance(event, Measuring) and event.what == "held out":
            signal.raise_signal(signal.SIGINT)
    (tmp_path / "run" / "model.safetensors").unlink()
    events = list(train(resume=tmp_path / "run"))
    assert any("is lost" in event.message for event in events if isinstance(event, Warned))
    assert last(events, Finished).best_step == 10
    vitral.load(tmp_path / "run" / "model.safetensors")


def test_a_run_that_keeps_its_last_step_misses_no_best_one(folder: Path, tmp_path: Path) -> None:
    leave_at(7, train(folder, out=tmp_path / "run", **{**TINY, "keep": "last"}))
    assert not [event for event in train(resume=tmp_path / "run") if isinstance(event, Warned)]


def test_processes_that_load_pictures_may_end_with_the_run(folder: Path, tmp_path: Path) -> None:
    """A scheduler sends a signal to all; here it comes while an epoch is measured."""
    for event in train(folder, out=tmp_path / "run", **{**TINY, "workers": 1}):
        if isinstance(event, Measuring):
            for child in multiprocessing.active_children():
                child.terminate()
            signal.raise_signal(signal.SIGTERM)
    assert isinstance(event, Interrupted)
    assert isinstance(list(train(resume=tmp_path / "run"))[-1], Finished)
    run(folder, tmp_path / "whole")
    same(tmp_path / "whole", tmp_path / "run")


def test_another_base_is_refused(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "base")
    base = tmp_path / "base" / "model.safetensors"
    given = {"from": str(base), "tune": dict(what="head"), "batch_size": 8, "epochs": 2, "device": "cpu", "workers": 0}
    leave_at(3, train(folder, out=tmp_path / "run", **given))
    run(folder, tmp_path / "other", seed=5)
    base.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    with pytest.raises(vitral.WeightsError, match="not the checkpoint that"):
        list(train(resume=tmp_path / "run"))


def test_other_pictures_of_val_are_refused(folder: Path, tmp_path: Path) -> None:
    class_folders(tmp_path / "val", {"red": 4, "green": 4, "blue": 4}, size=(20, 24))
    leave_at(7, train(folder, out=tmp_path / "left", **{**TINY, "val": str(tmp_path / "val")}))
    run(folder, tmp_path / "whole", val=str(tmp_path / "val"))
    (tmp_path / "val" / "red" / "000.png").unlink()
    with pytest.raises(vitral.DataError, match="pictures of --val are not those"):
        list(train(resume=tmp_path / "left"))
    with pytest.raises(vitral.DataError, match="not those that the run held out"):
        vitral.evaluate(tmp_path / "whole")


def test_what_the_checkpoint_knew_is_measured_though_the_run_ended_before(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "base")
    settings = {**TINY, "from": str(tmp_path / "base" / "model.safetensors"), "optim": dict(lr=1e-3)}
    settings.pop("model")
    settings.pop("network")
    for event in train(folder, out=tmp_path / "run", **settings):
        if isinstance(event, Measuring):
            break  # as if it were killed there
    told = list(train(resume=tmp_path / "run"))
    assert [event for event in told if isinstance(event, Baseline)]
    assert json.loads((tmp_path / "run" / "report.json").read_text())["baseline"] is not None


def test_a_warm_up_without_an_end_is_told(folder: Path, tmp_path: Path) -> None:
    events = run(folder, tmp_path / "run", optim=dict(lr=1e-3, warmup_steps=1000))
    assert "never comes to its peak" in last(events, Warned).message
    moved = run(folder, tmp_path / "one", epochs="auto", steps=1)  # a single step is one that learns
    assert last(moved, Stepped).lr > 0


def test_several_processes_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_at(3, train(folder, out=tmp_path / "begun", **TINY))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(vitral.ConfigError, match="without torchrun"):
        run(folder, tmp_path / "run")
    with pytest.raises(vitral.ConfigError, match="without torchrun"):
        list(resume_run(*reopen(tmp_path / "begun", None, {})))


def test_many_short_epochs_are_not_all_measured_and_saved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitral.training.loop.MOST_SCORED", 3)
    whole = run(folder, tmp_path / "whole", batch_size=64, epochs=10)  # one batch an epoch
    assert [event.epoch for event in whole if isinstance(event, EpochEnded)] == [2, 5, 8, 9]
    assert len([event for event in whole if isinstance(event, Saved)]) == 4
    for event in train(folder, out=tmp_path / "left", **{**TINY, "batch_size": 64, "epochs": 10}):
        if isinstance(event, Stepped) and event.step == 5:
            signal.raise_signal(signal.SIGTERM)  # at the end of an epoch that is not measured
    assert isinstance(event, Interrupted)
    assert event.step == 5
    list(train(resume=tmp_path / "left"))
    same(tmp_path / "whole", tmp_path / "left")


@pytest.mark.parametrize("what", ["head", "last-blocks", "lora", "all"])
def test_starting_from_a_checkpoint(folder: Path, tmp_path: Path, what: str) -> None:
    from vitral.training.tuning import load_adapter

    base = tmp_path / "base.safetensors"
    run(folder, tmp_path / "first")
    vitral.save(vitral.load(tmp_path / "first"), base)
    settings = {**TINY, "tune": dict(what=what, rank=2, blocks=1), "image_size": (24, 16)}
    for name in ("model", "network"):
        del settings[name]
    list(train(folder, out=tmp_path / "run", **{"from": str(base)}, **settings))
    loaded = vitral.load(tmp_path / "run")
    assert loaded.model.config.image_size == (24, 16)
    assert loaded.model.config.table_grid == (6, 4)
    if what == "all":
        assert not (tmp_path / "run" / "adapter.safetensors").exists()
        return
    size = (tmp_path / "run" / "adapter.safetensors").stat().st_size
    assert size < 0.8 * (tmp_path / "run" / "model.safetensors").stat().st_size
    start = vitral.load(base, image_size=(24, 16), num_classes=3, representation=None)
    again = load_adapter(start.model, tmp_path / "run" / "adapter.safetensors")
    for name, tensor in loaded.model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, atol=1e-6, rtol=0)


def test_native_sizes(tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", {"red": 16, "green": 16}, size=(20, 12))
    class_folders(tmp_path / "data", {"red": 6}, size=(12, 28))
    events = run(data, tmp_path / "run", resize="native", epochs=3)
    assert isinstance(events[-1], Finished)
    with pytest.raises(vitral.ConfigError, match="one size"):
        run(data, tmp_path / "no", resize="native", mix=dict(mixup=0.2))


def test_a_golden_loss_curve(tmp_path: Path) -> None:
    """Thirty steps on the built-in digits. A change to the numbers shows here first."""
    network, optim = dict(depth=2, pool="token"), dict(name="adamw", lr=1e-3, warmup_steps=5)
    settings = dict(model="vit-pico7", batch_size=32, steps=30, workers=0, device="cpu")
    events = train("builtin:digits", out=tmp_path / "run", network=network, optim=optim, **settings)
    losses = [event.loss for event in events if isinstance(event, Stepped)]
    assert losses[0] == pytest.approx(2.302585, abs=1e-5)  # ln 10: the head starts at zero
    assert len(losses) == 30
    assert sum(losses[-5:]) / 5 == pytest.approx(2.0313, abs=2e-3)
