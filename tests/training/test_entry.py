"""Starting and resuming: a resumed run is the same run, and one that cannot be is refused."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
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
from vitral.files import sha256_of
from vitral.training.entry import resume_run, train_events
from vitral.training.events import Event, Finished, Measuring, Started, Stepped
from vitral.training.request import reopen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("photos"), {"red": 24, "green": 24, "blue": 20}, size=(20, 24))


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "finished"
    assert isinstance(train(folder, run)[-1], Finished)
    return run


@pytest.fixture
def unfinished(finished: Path, tmp_path: Path) -> Path:
    """A run that can be resumed, after its last step."""
    shutil.copytree(finished, tmp_path / "unfinished")
    (tmp_path / "unfinished" / "report.json").unlink()
    return tmp_path / "unfinished"


# ---- the same run ----

EVERYTHING: dict[str, Any] = dict(
    dropout=0.1,
    drop_path=0.1,
    ema=0.9,
    optim=dict(name="muon", lr=2e-3, layer_decay=0.9, momentum=0.9),
    augment=dict(crop="resized", flip=0.5, randaugment=1, erase=0.3),
    mix=dict(mixup=0.3, cutmix=0.5),
    loss=dict(smoothing=0.1, class_weights="balanced"),
    accumulate=2,
    epochs=3,
)


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    train(folder, run, **EVERYTHING)
    return run


@pytest.mark.parametrize("step", [1, 4, 5, 7, 11, 15])  # 5 and 15: the end of an epoch, and of the run
def test_an_interrupted_and_resumed_run_is_the_same_run(folder: Path, whole: Path, tmp_path: Path, step: int) -> None:
    """Interrupted at a step by a signal, with every setting on, and compared with an undisturbed run."""
    parts = tmp_path / "parts"
    interrupt_at(step, train_events(folder, out=parts, **{**TINY, **EVERYTHING}))
    resumed = list(train_events(resume=parts))
    assert last(resumed, Started).step == step
    assert_same_run(whole, parts)
    for name in ("metrics.csv", "losses.csv"):
        assert (whole / name).read_text() == (parts / name).read_text()
    losses = [json.loads((run / "report.json").read_text())["test"]["loss"] for run in (whole, parts)]
    assert losses[0] == losses[1]
    assert json.loads((parts / "manifest.json").read_text())["resumes"] == [step]


def test_the_command_of_the_report_gives_the_same_weights(folder: Path, tmp_path: Path) -> None:
    settings = {**TINY, "epochs": "auto"}
    for name, length in (("counted", {"steps": 7}), ("timed", {"minutes": 0.01})):
        events = list(train_events(folder, out=tmp_path / name, **settings, **length))
        steps = last(events, Started).steps
        config = tmp_path / name / "config.toml"
        events = list(train_events(folder, out=tmp_path / f"{name}-again", recipe="none", config=config))
        assert last(events, Started).steps == steps
        assert_equal(read_weights(tmp_path / name), read_weights(tmp_path / f"{name}-again"))


# ---- finished or changed ----


def test_resuming_a_finished_or_changed_run(folder: Path, unfinished: Path, tmp_path: Path) -> None:
    assert isinstance(list(train_events(str(folder), resume=unfinished, batch_size=8))[-1], Finished)
    events = list(train_events(resume=unfinished))
    assert isinstance(events[-1], Finished)
    assert len(events) == 2
    assert "finished" in warnings_of(events)[0]
    (unfinished / "report.json").unlink()
    with pytest.raises(vitral.ConfigError, match="batch_size=8.*got 16"):
        list(train_events(resume=unfinished, batch_size=16))
    with pytest.raises(vitral.ConfigError, match="never overwritten.*--resume"):
        train(folder, unfinished)
    with pytest.raises(vitral.ConfigError, match="not a run folder"):
        list(train_events(resume=tmp_path))


@pytest.mark.parametrize("text", ["[1]", "5", "null", "{}", "{", "[" * 100_000, '{"a": 1}', "\xff"])
@pytest.mark.parametrize("name", ["manifest.json", "report.json"])
def test_json_that_no_run_has_written(unfinished: Path, name: str, text: str) -> None:
    (unfinished / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(vitral.ConfigError, match=f"{name} is damaged"):
        list(train_events(resume=unfinished))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("choices", 5),
        ("choices", [["a", "b"]]),
        ("choices", [[1, 2, 3]]),
        ("resumes", "no"),
        ("resumes", [None]),
        ("candidates", [1]),
        ("candidates", {"name": "probe"}),
        ("threads", "two"),
        ("data_fingerprint", None),
    ],
)
def test_a_manifest_with_a_wrong_value(unfinished: Path, name: str, value: Any) -> None:
    manifest = json.loads((unfinished / "manifest.json").read_text())
    (unfinished / "manifest.json").write_text(json.dumps({**manifest, name: value}))
    with pytest.raises(vitral.ConfigError, match=rf"manifest\.json is damaged: {name} "):
        list(train_events(resume=unfinished))


def test_a_run_without_its_manifest_resumes_with_a_warning(unfinished: Path) -> None:
    (unfinished / "manifest.json").unlink()
    events = list(train_events(resume=unfinished))
    assert any("manifest.json is missing" in message for message in warnings_of(events))
    assert isinstance(events[-1], Finished)


def test_another_dataset_is_refused(tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", {"a": 12, "b": 12}, size=(16, 16))
    train(data, tmp_path / "run")
    (tmp_path / "run" / "report.json").unlink()
    class_folders(data, {"a": 14}, size=(16, 16))
    with pytest.raises(vitral.DataError, match=f"dataset is not the one .*{tmp_path / 'run'}"):
        list(train_events(resume=tmp_path / "run"))


def test_an_image_replaced_under_its_name_is_reported(tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", {"a": 12, "b": 12}, size=(16, 16))
    interrupt_at(1, train_events(data, out=tmp_path / "run", **TINY))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert not warnings_of(train_events(resume=tmp_path / "copy"))
    image = data / "a" / "003.png"
    content, status = (data / "b" / "003.png").read_bytes(), image.stat()
    image.write_bytes(content)
    os.utime(image, ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # also within the resolution of a clock
    events = list(train_events(resume=tmp_path / "run"))
    assert any("image files have changed" in message for message in warnings_of(events))
    assert isinstance(events[-1], Finished)


def test_another_base_is_refused(folder: Path, finished: Path, tmp_path: Path) -> None:
    base = tmp_path / "base.safetensors"
    shutil.copy(finished / "model.safetensors", base)
    settings = {"from": str(base), "tune": dict(what="head"), "batch_size": 8, "epochs": 2, "device": "cpu"}
    interrupt_at(3, train_events(folder, out=tmp_path / "run", workers=0, **settings))
    train(folder, tmp_path / "other", seed=5, epochs=1)
    shutil.copy(tmp_path / "other" / "model.safetensors", base)
    with pytest.raises(vitral.WeightsError, match=rf"{base} is not the checkpoint"):
        list(train_events(resume=tmp_path / "run"))


def test_another_dataset_of_val_is_refused(folder: Path, tmp_path: Path) -> None:
    class_folders(tmp_path / "val", {"red": 4, "green": 4, "blue": 4}, size=(20, 24))
    interrupt_at(7, train_events(folder, out=tmp_path / "parts", **{**TINY, "val": str(tmp_path / "val")}))
    train(folder, tmp_path / "whole", val=str(tmp_path / "val"))
    (tmp_path / "val" / "red" / "000.png").unlink()
    with pytest.raises(vitral.DataError, match="--val is not the one"):
        list(train_events(resume=tmp_path / "parts"))
    with pytest.raises(vitral.DataError):
        vitral.evaluate(tmp_path / "whole")


# ---- saved states ----


def test_a_damaged_state_is_skipped_with_a_warning(unfinished: Path) -> None:
    newest, older = sorted((unfinished / "state").iterdir(), reverse=True)
    content = bytearray((newest / "tensors.safetensors").read_bytes())
    content[-100] ^= 1
    (newest / "tensors.safetensors").write_bytes(content)
    events = list(train_events(resume=unfinished))
    assert any(f"{newest.name} is damaged" in message for message in warnings_of(events))
    assert last(events, Started).step == int(older.name.removeprefix("step-"))
    for path in (unfinished / "state").iterdir():
        (path / "manifest.json").unlink()
    (unfinished / "report.json").unlink()
    before = (unfinished / "model.safetensors").read_bytes()
    with pytest.raises(vitral.VitralError, match=r"No saved state .*: step-.*manifest\.json.*another --out"):
        list(train_events(resume=unfinished))
    assert (unfinished / "model.safetensors").read_bytes() == before


def test_a_run_killed_while_its_first_state_is_written_starts_over(unfinished: Path) -> None:
    """The best model of an epoch is on the disk before the state, which a thread writes."""
    expected = (unfinished / "model.safetensors").read_bytes()
    for state in (unfinished / "state").iterdir():
        shutil.rmtree(state)
    (unfinished / "state" / "step-00000004.tmp-1").mkdir()
    events = list(train_events(resume=unfinished))
    assert any("starts over" in message for message in warnings_of(events))
    assert isinstance(events[-1], Finished)
    assert (unfinished / "model.safetensors").read_bytes() == expected


def test_a_model_without_states_is_not_overwritten(unfinished: Path) -> None:
    shutil.rmtree(unfinished / "state")
    before = (unfinished / "model.safetensors").read_bytes()
    with pytest.raises(vitral.ConfigError, match="a model but no saved state.*another --out"):
        list(train_events(resume=unfinished))
    assert (unfinished / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    "text", ["5", '{"step": "x"}', "[" * 100_000, '{"best": {}, "unreadable": {}, "seconds": "x"}']
)
def test_forged_states_are_one_error(unfinished: Path, text: str) -> None:
    for path in (unfinished / "state").iterdir():
        (path / "state.json").write_text(text)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["state.json"]["sha256"] = sha256_of(path / "state.json")
        (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(vitral.VitralError, match=r"No saved state .*another --out"):
        list(train_events(resume=unfinished))


def test_a_state_of_another_network_is_refused(unfinished: Path) -> None:
    config = unfinished / "config.toml"
    config.write_text(config.read_text().replace("mlp_width = 96", "mlp_width = 80"))
    with pytest.raises(vitral.ConfigError, match=r"mlp\.expand\.weight has shape \(96, 48\) \(expected \(80, 48\)\)"):
        list(train_events(resume=unfinished))


def test_a_lost_best_model_is_reported(folder: Path, tmp_path: Path) -> None:
    interrupt_at(7, train_events(folder, out=tmp_path / "run", **{**TINY, "epochs": 2}))
    (tmp_path / "run" / "model.safetensors").write_bytes(b"nothing")
    events = list(train_events(resume=tmp_path / "run"))
    assert any("best model so far is lost" in message for message in warnings_of(events))
    assert last(events, Finished).best_step == 10
    vitral.load(tmp_path / "run" / "model.safetensors")


def interrupt_test(events: Iterator[Event]) -> None:
    """Interrupt a run while it measures the test split."""
    for event in events:
        if isinstance(event, Measuring) and event.what == "test":
            signal.raise_signal(signal.SIGINT)


def test_a_model_lost_after_the_last_step_is_written_again(folder: Path, tmp_path: Path) -> None:
    interrupt_test(train_events(folder, out=tmp_path / "run", **TINY))
    (tmp_path / "run" / "model.safetensors").unlink()
    events = list(train_events(resume=tmp_path / "run"))
    assert any("is lost" in message for message in warnings_of(events))
    assert last(events, Finished).best_step == 10
    assert not [event for event in events if isinstance(event, Stepped)]
    vitral.load(tmp_path / "run" / "model.safetensors")


def test_a_run_that_keeps_its_last_step_misses_no_best_model(folder: Path, tmp_path: Path) -> None:
    interrupt_at(7, train_events(folder, out=tmp_path / "run", **{**TINY, "keep": "last"}))
    assert not warnings_of(train_events(resume=tmp_path / "run"))


def test_several_processes_are_refused(
    folder: Path, unfinished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(vitral.ConfigError, match="WORLD_SIZE=2.*static rendezvous"):
        train(folder, tmp_path / "run")
    with pytest.raises(vitral.ConfigError, match="WORLD_SIZE=2.*static rendezvous"):
        list(resume_run(*reopen(unfinished, None, {})))


def test_threads_that_changed_are_reported(unfinished: Path) -> None:
    manifest = json.loads((unfinished / "manifest.json").read_text())
    manifest["threads"] = torch.get_num_threads() + 1
    (unfinished / "manifest.json").write_text(json.dumps(manifest))
    assert any("threads" in message for message in warnings_of(train_events(resume=unfinished)))


# ---- settings of the other objective ----


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        (dict(masking=dict(ratio=0.4)), r"masking\.ratio=0\.4 .*objective=masked-patches.*masking\.ratio=0\.5"),
        (dict(objective="masked-patches", loss=dict(smoothing=0.1)), r"loss\.smoothing=0\.1 .*loss\.smoothing=0\.0"),
        (dict(objective="masked-patches", loss=dict(kind="sigmoid")), r"loss\.kind=sigmoid"),
        (dict(objective="masked-patches", loss=dict(class_weights="balanced")), r"loss\.class_weights=balanced"),
        (dict(objective="masked-patches", tune=dict(what="head")), r"tune\.what=head.*tune\.what=all"),
    ],
)
def test_settings_that_nothing_would_read(tmp_path: Path, settings: dict[str, Any], fragment: str) -> None:
    with pytest.raises(vitral.ConfigError, match=fragment):
        train("builtin:digits", tmp_path / "run", recipe="none", **settings)
    assert not (tmp_path / "run").exists()
