"""Runs that are gone on with: the same words spelt otherwise, damaged folders, states that do not fit, two at once."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import vitral
from tests.data.pictures import class_folders
from vitral.runs import Run
from vitral.training.config import TrainConfig, as_toml, read_toml
from vitral.training.entry import train
from vitral.training.events import Finished, Started
from vitral.training.settings import collect_settings, read_run_settings, reopen
from vitral.training.state import State, check_fits, load_state, save_state

TINY: dict[str, Any] = dict(
    model="ViT-pico4",
    network=dict(width=48, depth=1, heads=3, mlp_width=96),
    image_size=16,
    batch_size=8,
    steps=7,
    device="cpu",
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("photos"), {"red": 24, "green": 24}, size=(16, 16))


@pytest.fixture(scope="module")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert isinstance(list(train(photos, out=run, **TINY))[-1], Finished)
    return run


@pytest.fixture
def left(whole: Path, tmp_path: Path) -> Path:
    """A run that can be gone on with."""
    shutil.copytree(whole, tmp_path / "left")
    (tmp_path / "left" / "report.json").unlink()
    return tmp_path / "left"


# ---- the same run once more ----


def same_weights(first: Path, second: Path) -> None:
    one, other = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_command_of_the_report_gives_the_same_weights(photos: Path, whole: Path, tmp_path: Path) -> None:
    list(train(photos, out=tmp_path / "again", recipe="none", config=whole / "config.toml"))
    same_weights(whole, tmp_path / "again")
    events = list(train(photos, out=tmp_path / "timed", **{**TINY, "steps": None, "minutes": 0.01}))
    steps = next(event.steps for event in events if isinstance(event, Started))
    settled = collect_settings(photos, {}, recipe="none", config=tmp_path / "timed" / "config.toml").config
    assert settled.minutes is None
    events = list(train(photos, out=tmp_path / "timed-again", recipe="none", config=tmp_path / "timed" / "config.toml"))
    assert next(event.steps for event in events if isinstance(event, Started)) == steps
    same_weights(tmp_path / "timed", tmp_path / "timed-again")


def test_a_length_in_two_ways_is_still_refused_in_a_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("steps = 3\nepochs = 2\n")
    with pytest.raises(vitral.ConfigError, match="steps and epochs both say"):
        collect_settings("x", {}, recipe="none", config=tmp_path / "x.toml")
    (tmp_path / "x.toml").write_text("resume = 3\n")
    with pytest.raises(vitral.ConfigError, match="no setting 'resume'"):
        collect_settings("x", {}, recipe="none", config=tmp_path / "x.toml")


@pytest.mark.parametrize("length", [{"steps": 20}, {"minutes": 5.0}])
def test_a_resume_reads_the_length_in_both_ways(left: Path, length: dict[str, Any]) -> None:
    run = Run(left)
    config = TrainConfig(**{**vars_of(read_run_settings(run)), "steps": None, "epochs": 3.125, **length})
    run.write_config(as_toml(config))
    assert read_run_settings(run) == config
    assert reopen(left, None, length)[1] == config
    with pytest.raises(vitral.ConfigError, match=f"{next(iter(length))} is .* and 6"):
        reopen(left, None, dict.fromkeys(length, 6))


def vars_of(config: TrainConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in TrainConfig.__dataclass_fields__}


# ---- what is said again ----


def test_what_is_said_again_may_be_spelt_in_another_way(left: Path, photos: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(photos.parent)
    for data in (photos, f"{photos}/", photos.name, f"{photos.name}/../{photos.name}"):
        reopen(left, data, {})
    for said in ({"model": "vit-pico4"}, {"device": "auto"}, {"optim.lr": "auto"}, {"device": "cpu:0"}, {"steps": 7}):
        reopen(left, None, said)
    for said in ({"model": "vit-pico7"}, {"optim.lr": 0.5}, {"val": "photos"}, {"data": "elsewhere"}, {"steps": 8}):
        with pytest.raises(vitral.ConfigError, match=f"{next(iter(said))} is .* now"):
            reopen(left, None, said)


@pytest.mark.parametrize("said", [{"recipe": "small"}, {"config": "x.toml"}, {"out": "elsewhere"}])
def test_a_resumed_run_takes_no_other_recipe_file_or_folder(left: Path, said: dict[str, Any]) -> None:
    reopen(left, None, {}, out=left)
    with pytest.raises(vitral.ConfigError, match="goes on with a run as it is"):
        reopen(left, None, {}, **said)


# ---- damaged folders ----


@pytest.mark.parametrize("name", ["image_size", "channels", "lr", "batch_size", "workers", "device", "epochs", "what"])
def test_a_config_that_has_lost_a_line(left: Path, name: str) -> None:
    lines = (left / "config.toml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(f"{name} =")]
    assert len(kept) < len(lines)
    (left / "config.toml").write_text("\n".join(kept))
    with pytest.raises(vitral.ConfigError, match=rf"config\.toml is damaged: a run settles .*{name}"):
        reopen(left, None, {})


@pytest.mark.parametrize("size", [0, 1, 100, 300, 700, 1500])
def test_a_config_that_was_cut(left: Path, size: int) -> None:
    (left / "config.toml").write_bytes((left / "config.toml").read_bytes()[:size])
    with pytest.raises(vitral.ConfigError, match=r"config\.toml") as told:
        reopen(left, None, {})
    assert "__init__" not in str(told.value)


@pytest.mark.parametrize("text", ["[1]", "5", "null", "{}", "{", "[" * 100_000, '{"a": 1}', "\xff"])
@pytest.mark.parametrize("name", ["manifest.json", "report.json"])
def test_json_that_no_run_has_written(left: Path, name: str, text: str) -> None:
    (left / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(vitral.ConfigError, match=f"{name} is damaged"):
        list(train(resume=left))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decisions", 5),
        ("decisions", [["a", "b"]]),
        ("decisions", [[1, 2, 3]]),
        ("resumes", "no"),
        ("resumes", [None]),
        ("baseline", [1]),
        ("baseline", {"few_shot": 1}),
        ("threads", "two"),
        ("data_fingerprint", None),
    ],
)
def test_a_manifest_with_something_else_in_it(left: Path, name: str, value: Any) -> None:
    told = json.loads((left / "manifest.json").read_text())
    (left / "manifest.json").write_text(json.dumps({**told, name: value}))
    with pytest.raises(vitral.ConfigError, match=f"damaged: {name} is missing or not what a run writes"):
        list(train(resume=left))


@pytest.mark.parametrize("content", [b"\xff\xfe\n1,2\n", b"1,2,3\n4,5,6\n"])
@pytest.mark.parametrize("name", ["metrics.csv", "losses.csv"])
def test_curves_that_no_run_has_written(left: Path, name: str, content: bytes) -> None:
    (left / name).write_bytes(content)
    with pytest.raises(vitral.ConfigError, match=f"{name} is damaged"):
        Run(left).keep_rows(5)


def test_rows_that_were_cut_or_are_too_long_are_done_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.losses.write_text("step,loss\n1,2\n2,2,2\n²,1\n3\n4,1\n")
    run.keep_rows(3)
    assert run.read_rows(run.losses) == [{"step": "1", "loss": "2"}]
    run.losses.write_text("st")  # the power went while the header was written
    run.keep_rows(3)
    assert not run.losses.exists()


def test_a_config_is_there_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.write_config("data = 'x'\n")

    def fails(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space"):
        run.write_config("data = 'y'\n")
    assert read_toml(run.config) == {"data": "x"}


# ---- states ----


def spoil(path: Path) -> None:
    (path / "tensors.safetensors").write_bytes(b"nothing")


def test_the_state_before_a_damaged_one_is_used_where_there_is_one(tmp_path: Path) -> None:
    assert load_state(tmp_path) == (None, [])
    for step in (1, 2):
        save_state(tmp_path, State(step=step, tensors={"a": torch.ones(2)}, facts={}))
    (tmp_path / "step-00000002 copy").mkdir()  # somebody's own
    spoil(tmp_path / "step-00000002")
    state, problems = load_state(tmp_path)
    assert state is not None
    assert state.step == 1
    assert problems == [
        "step-00000002 is damaged (tensors.safetensors is not what was written); the state before it is used."
    ]
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    with pytest.raises(
        vitral.VitralError, match=r"step-00000002 .*; step-00000001 .*manifest.json.*another --out"
    ) as told:
        load_state(tmp_path)
    assert "before it" not in str(told.value)


@pytest.mark.parametrize(
    ("fresh", "words"),
    [
        ({"model:a": (3,)}, r"a has shape \(2,\), and \(3,\) is expected"),
        ({"model:a": (2,), "model:b": (1,)}, "b is not there"),
        ({}, "they have no a"),
    ],
)
def test_a_state_of_another_network(tmp_path: Path, fresh: dict[str, tuple[int, ...]], words: str) -> None:
    state = State(step=1, tensors={"model:a": torch.ones(2), "optimizer:0/a/step": torch.ones(1)}, facts={})
    check_fits(state, {"model:a": torch.zeros(2)}, tmp_path)
    with pytest.raises(vitral.ConfigError, match=words):
        check_fits(state, {name: torch.zeros(shape) for name, shape in fresh.items()}, tmp_path)


# ---- one at a time ----

HOLD = """
import sys
from pathlib import Path
from vitral.runs import Run
with Run(Path(sys.argv[1])).claim():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("stop", [subprocess.Popen.kill, lambda process: process.stdin.close()])
def test_a_run_is_trained_by_one_process(tmp_path: Path, stop: Callable[[Any], None]) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        refused = pytest.raises(vitral.ConfigError, match=rf"trained by another process \(pid {process.pid}\)")
        with refused, Run(tmp_path).claim():
            pass
        stop(process)
        process.wait()
    refused = pytest.raises(vitral.ConfigError, match=f"pid {os.getpid()}")
    with Run(tmp_path).claim(), refused, Run(tmp_path).claim():  # the system has let go of it
        pass
    with Run(tmp_path).claim():
        pass


def test_a_folder_is_made_by_one_run(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a" / "b", "data", "model")
    with run.claim():
        pass
    assert Run.create(tmp_path / "a" / "b", "data", "model").folder == run.folder  # it never came to anything
    run.write_config("data = 'x'\n")
    with pytest.raises(vitral.ConfigError, match="never overwrites another"):
        Run.create(tmp_path / "a" / "b", "data", "model")
    (tmp_path / "file").touch()
    for taken in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(vitral.ConfigError, match="cannot be made"):
            Run.create(taken, "data", "model")
