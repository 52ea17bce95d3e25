"""Runs without labels: from pictures to an ordinary checkpoint."""

import io
import json
import tarfile
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitral
from tests.cli.typed import typed as run
from tests.data.pictures import class_folders
from tests.training.leaving import leave_at
from vitral.errors import ConfigError
from vitral.evaluation.metrics import Scores
from vitral.training.best import Best
from vitral.training.build import build_model
from vitral.training.config import with_settings
from vitral.training.entry import train
from vitral.training.events import Finished, Stepped
from vitral.training.settings import flatten

TINY: dict[str, Any] = dict(
    objective="masked-patches",
    model="vit-pico7",
    network=dict(width=48, depth=2, heads=3),
    batch_size=64,
    steps=24,
    device="cpu",
    recipe="none",
    optim=dict(name="adamw", lr=3e-3),
)


def last(events: list[Any], kind: type) -> Any:
    return next(event for event in reversed(events) if isinstance(event, kind))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("pretrained") / "run"
    return folder, list(train("builtin:digits", out=folder, **TINY))


def test_it_learns_and_leaves_an_ordinary_checkpoint(pretrained: tuple[Path, list[Any]]) -> None:
    folder, events = pretrained
    losses = [event.loss for event in events if isinstance(event, Stepped)]
    assert losses[0] == pytest.approx(torch.tensor(8.0).log().item(), abs=0.05)  # grey: eight classes, all alike
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
    checkpoint = vitral.load(folder / "model.safetensors")
    assert checkpoint.model.config.num_classes == 0
    assert checkpoint.labels is None
    features = vitral.evaluate(folder / "model.safetensors", "builtin:digits", knn=5)
    assert features.scores.top1 > 0.3  # chance is 0.1
    told = json.loads((folder / "report.json").read_text())
    assert told["objective"] == "masked-patches"
    assert 0.3 < told["test"]["commonest"] < 0.8  # most of a digit is black
    assert told["test"]["images"] == 1000
    assert told["test"]["loss"] == pytest.approx(last(events, Finished).test["loss"])
    vitral.write_report(folder)
    assert "hidden colours found" in (folder / "report.html").read_text()
    assert "fine-tuned" in (folder / "card.md").read_text()
    with Image.open(folder / "plots" / "masked.png") as sheet:
        assert sheet.size == (4 * 102 + 6, 18 + 8 * 102 + 6)


def test_it_can_be_fine_tuned(pretrained: tuple[Path, list[Any]], tmp_path: Path) -> None:
    start = str(pretrained[0] / "model.safetensors")
    settings: dict[str, Any] = dict(steps=60, batch_size=64, optim=dict(lr=2e-3, layer_decay=1.0))
    settings |= dict(tune=dict(what="all"), network=dict(pool="mean"))
    told = {"data": "", "channels": 1, "image_size": 28, "resize": "squash", "from": start, **flatten(settings)}
    begun = build_model(with_settings(None, told, "here"), classes=10)[0].state_dict()
    learnt = vitral.load(start).model.state_dict()
    for name, tensor in begun.items():
        if "head" not in name:
            assert torch.equal(learnt[name][-len(tensor) :], tensor), name  # of positions, the rows of patches
    events = list(train("builtin:digits", from_weights=start, out=tmp_path / "run", recipe="none", **settings))
    assert last(events, Finished).test["top1"] > 0.2  # chance is 0.1


@pytest.mark.parametrize("target", ["small-patch", "pixels"])
def test_other_targets(target: str, tmp_path: Path) -> None:
    settings = {**TINY, "steps": 10, "masking": dict(target=target, ratio=0.25)}
    events = list(train("builtin:digits", out=tmp_path / "run", **settings))
    losses = [event.loss for event in events if isinstance(event, Stepped)]
    assert losses[-1] < losses[0]
    held = last(events, Finished).test
    assert held["target"] == target
    assert (held["top1"] is None) == (target == "pixels")  # of which none is right or wrong
    assert (held["commonest"] is None) == (target == "pixels")
    vitral.write_report(tmp_path / "run")


def test_a_batch_in_parts_is_the_same_batch(tmp_path: Path) -> None:
    found = []
    for parts in (1, 4):
        settings = {**TINY, "steps": 4, "accumulate": parts}
        events = list(train("builtin:digits", out=tmp_path / str(parts), **settings))
        found.append(last(events, Finished).test)
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-4)  # also while it is measured


def test_pixels_are_told_by_their_loss(tmp_path: Path) -> None:
    words = [
        "train",
        "builtin:digits",
        "--objective",
        "masked-patches",
        "--masking.target",
        "pixels",
        "--steps",
        "3",
        "--batch-size",
        "8",
    ]
    words += ["--network.depth", "1", "--device", "cpu", "--tensorboard"]
    told = run(*words, "--out", str(tmp_path / "human"))
    assert told.returncode == 0, told.stderr
    assert "%" not in next(line for line in told.stderr.split("\n") if line.startswith("epoch"))
    quiet = run(*words, "--out", str(tmp_path / "quiet"), "--format", "quiet")
    held = json.loads((tmp_path / "quiet" / "report.json").read_text())["test"]
    assert quiet.stdout == f"{held['loss']:.4f}\n"
    lines = run(*words, "--out", str(tmp_path / "json"), "--format", "json").stderr.split("\n")
    assert "NaN" not in "".join(lines)
    ended = [json.loads(line) for line in lines if '"epochended"' in line]
    assert ended[-1]["top1"] is None


@pytest.mark.parametrize("stop", [1, 10])
def test_a_run_that_is_left_and_resumed_is_the_same_run(tmp_path: Path, stop: int) -> None:
    settings = {**TINY, "steps": 16, "ema": 0.9, "augment": dict(shift=0.1), "optim": dict(name="muon", lr=2e-3)}
    list(train("builtin:digits", out=tmp_path / "whole", **settings))
    leave_at(stop, train("builtin:digits", out=tmp_path / "parts", **settings))
    list(train(resume=tmp_path / "parts"))
    for name in ("model.safetensors", "masking.safetensors"):
        whole, parts = (load_file(tmp_path / run / name) for run in ("whole", "parts"))
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[key], parts[key]) for key in whole), name


def test_micro_batches_add_up(tmp_path: Path) -> None:
    losses = {}
    for parts in (1, 4):
        events = train("builtin:digits", out=tmp_path / str(parts), **{**TINY, "steps": 3, "accumulate": parts})
        losses[parts] = [event.loss for event in events if isinstance(event, Stepped)]
    assert losses[1] == pytest.approx(losses[4], rel=1e-4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(model="bit-r26x1", network={}), "a BiT has none"),
        (dict(mix=dict(mixup=0.2)), "does not mix"),
        (dict(resize="native"), "one size"),
        (dict(loss=dict(smoothing=0.1)), r"loss.smoothing=0.1 is for objective='classify'.* say loss.smoothing=0.0"),
        (dict(loss=dict(kind="sigmoid")), "loss.kind='sigmoid' is for objective='classify'"),
        (dict(loss=dict(class_weights="balanced")), "loss.class_weights='balanced' is for"),
        (dict(objective="classify", masking=dict(ratio=0.4)), "masking.ratio=0.4 is for objective='masked-patches'"),
    ],
)
def test_what_does_not_go_together(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        list(train("builtin:digits", out=tmp_path / "run", **{**TINY, **change}))


def test_a_recipe_with_a_loss_can_be_used_without_labels(tmp_path: Path) -> None:
    settings = {**TINY, "recipe": "digits", "steps": 1, "loss": dict(smoothing=0.0, class_weights="none")}
    list(train("builtin:digits", out=tmp_path / "run", **settings))
    again = train("builtin:digits", out=tmp_path / "again", recipe="none", config=tmp_path / "run" / "config.toml")
    assert last(list(again), Finished).best_step == 1  # with all that a run writes down


def test_patience_is_counted_from_the_epoch_that_is_kept() -> None:
    """Of pixels none is right, so the loss alone says which epoch is better."""
    best = Best()
    for epoch, loss in enumerate((0.9, 0.8, 0.7, 0.75, 0.76)):
        kept = best.take(Scores(images=10, loss=loss, top1=nan, top5=nan), step=epoch + 1, epoch=epoch)
        assert kept == (epoch <= 2)
        assert best.is_old(epoch, patience=2) == (epoch == 4)
    assert not best.is_old(100, patience=0)


@pytest.mark.parametrize("form", ["folder", "splits", "csv", "parquet", "shards"])
def test_pictures_without_labels(form: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    contents = [png(number) for number in range(40)]
    if form in ("folder", "splits", "csv"):
        for number, content in enumerate(contents):
            place = data / ("train" if number % 4 else "test") if form == "splits" else data
            place.mkdir(exist_ok=True)
            (place / f"{number:02d}.png").write_bytes(content)
    if form == "csv":
        (data / "list.csv").write_text("image\n" + "".join(f"{number:02d}.png\n" for number in range(40)))
        data = data / "list.csv"
    if form == "parquet":
        pa, pq = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
        data = data / "list.parquet"
        pq.write_table(pa.table({"image": [{"bytes": content, "path": None} for content in contents]}), data)
    if form == "shards":
        with tarfile.open(data / "train-000.tar", "w") as shard:
            for number, content in enumerate(contents):
                member = tarfile.TarInfo(f"{number:02d}.png")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
    settings = {**TINY, "steps": 2, "batch_size": 8, "image_size": 28}
    events = list(train(data, out=tmp_path / "run", **settings))
    finished = last(events, Finished)
    assert finished.test["images"] >= 5
    if form == "splits":
        assert finished.test["images"] == 10
    vitral.write_report(tmp_path / "run")
    assert "No labels were used" in (tmp_path / "run" / "report.html").read_text()
    list(train(resume=tmp_path / "run"))  # finished, and says so


def png(number: int) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def test_labels_are_left_aside(tmp_path: Path) -> None:
    from vitral.data.sources import open_dataset

    data = open_dataset("builtin:digits", labelled=False)
    assert data.classes == ()
    assert {item.label for item in data.splits["train"]} == {-1}
    (tmp_path / "empty").mkdir()
    with pytest.raises(vitral.DataError, match="holds no pictures"):
        open_dataset(tmp_path / "empty", labelled=False)


def test_the_average_is_of_the_network_and_its_head(tmp_path: Path) -> None:
    """With an average that never moves, what is measured and kept is what the run began with."""
    settings = {**TINY, "steps": 6, "ema": 0.999999}
    events = list(train("builtin:digits", out=tmp_path / "run", **settings))
    assert last(events, Finished).test["loss"] == pytest.approx(torch.tensor(8.0).log().item(), abs=1e-2)


@pytest.mark.parametrize("objective", ["classify", "masked-patches"])
def test_compile_reaches_the_network(objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling itself takes a minute and is tested in tests/model; here, that every step goes through it."""
    calls: list[str] = []

    def compile(function: Any) -> Any:
        return lambda *arguments: (calls.append("step"), function(*arguments))[1]

    monkeypatch.setattr(torch, "compile", compile)
    settings = {**TINY, "objective": objective, "steps": 3, "compile": True}
    list(train("builtin:digits", out=tmp_path / "run", **settings))
    assert len(calls) >= 3


def test_a_checkpoint_is_pretrained_further_as_a_whole(pretrained: tuple[Path, list[Any]], tmp_path: Path) -> None:
    start = {"objective": "masked-patches", "from_weights": str(pretrained[0] / "model.safetensors"), "steps": 2}
    events = list(train("builtin:digits", out=tmp_path / "run", batch_size=32, device="cpu", **start))
    told = {event.name: event.value for event in events if type(event).__name__ == "Chosen"}
    assert told["tune.what"] == "all"


def test_other_pictures_may_be_held_out(tmp_path: Path) -> None:
    class_folders(tmp_path / "data", {"red": 12, "green": 12}, size=(28, 28))
    class_folders(tmp_path / "others", {"blue": 5}, size=(28, 28))
    *_, finished = train(tmp_path / "data", val=str(tmp_path / "others"), out=tmp_path / "run", **TINY | {"steps": 2})
    assert isinstance(finished, Finished)
    assert finished.test["images"] == 5


def test_a_run_without_labels_is_measured_by_its_features(pretrained: tuple[Path, list[Any]]) -> None:
    run, _ = pretrained
    assert vitral.evaluate(run, knn=5).split == "the data's own test split"
    with pytest.raises(ConfigError, match="has no head"):
        vitral.evaluate(run)


def test_a_head_that_is_not_there_cannot_be_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has none"):
        list(train("builtin:digits", out=tmp_path / "run", **TINY | {"tune": dict(what="head")}))
    assert not (tmp_path / "run").exists()
