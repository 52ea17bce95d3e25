"""Runs without labels: from images to an ordinary checkpoint."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitral
from tests.cli.typed import typed as run_command
from tests.data.images import class_folders
from tests.training.short_runs import assert_equal, interrupt_at, last
from vitral.data.sources import open_dataset
from vitral.errors import ConfigError
from vitral.training.config import as_resolved
from vitral.training.entry import train_events
from vitral.training.events import Chosen, Event, Finished, Stepped
from vitral.training.prepare import build_model
from vitral.training.settings import flatten, with_settings

MASKED: dict[str, Any] = dict(
    objective="masked-patches",
    model="vit-pico7",
    network=dict(width=48, depth=2, heads=3),
    batch_size=64,
    steps=24,
    device="cpu",
    recipe="none",
    optim=dict(name="adamw", lr=3e-3),
)
LN_8 = torch.tensor(8.0).log().item()
"""The loss of a head at zero on gray images, which have eight classes."""


def pretrain(data: str | Path, out: Path, **settings: Any) -> list[Event]:
    return list(train_events(data, out=out, **{**MASKED, **settings}))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event]]:
    folder = tmp_path_factory.mktemp("pretrained") / "run"
    return folder, pretrain("builtin:digits", folder)


def test_a_run_learns_and_leaves_an_ordinary_checkpoint(pretrained: tuple[Path, list[Event]]) -> None:
    folder, events = pretrained
    losses = [event.loss for event in events if isinstance(event, Stepped)]
    assert losses[0] == pytest.approx(LN_8, abs=0.05)
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
    checkpoint = vitral.load(folder / "model.safetensors")
    assert checkpoint.model.config.num_classes == 0
    assert checkpoint.labels is None
    features = vitral.evaluate(folder / "model.safetensors", "builtin:digits", knn=5).as_dict()
    assert features["knn"]["top1"] > 0.3  # chance is 0.1
    report = json.loads((folder / "report.json").read_text())
    assert report["objective"] == "masked-patches"
    assert 0.3 < report["test"]["most_common"] < 0.8  # most of a digit is black
    assert report["test"]["images"] == 1000
    assert report["test"]["loss"] == pytest.approx(last(events, Finished).test["loss"])
    vitral.write_report(folder)
    assert "masked patches" in (folder / "report.html").read_text()
    assert "fine-tuned" in (folder / "card.md").read_text()
    with Image.open(folder / "plots" / "masked.png") as sheet:
        assert sheet.size == (4 * 102 + 6, 18 + 8 * 102 + 6)


def test_a_pretrained_model_can_be_fine_tuned(pretrained: tuple[Path, list[Event]], tmp_path: Path) -> None:
    start = str(pretrained[0] / "model.safetensors")
    settings: dict[str, Any] = dict(steps=60, batch_size=64, optim=dict(lr=2e-3, layer_decay=1.0))
    settings |= dict(tune=dict(what="all"), network=dict(pool="mean"))
    requested = {"data": "", "channels": 1, "image_size": 28, "resize": "squash", "from": start, **flatten(settings)}
    initial = build_model(as_resolved(with_settings(None, requested, "test")), classes=10)[0].state_dict()
    learned = vitral.load(start).model.state_dict()
    for name, tensor in initial.items():
        if "head" not in name:
            assert torch.equal(learned[name][-len(tensor) :], tensor), name  # of positions, the rows of patches
    events = train_events("builtin:digits", from_weights=start, out=tmp_path / "run", recipe="none", **settings)
    assert last(events, Finished).test["top1"] > 0.2  # chance is 0.1


def test_a_checkpoint_is_pretrained_further_as_a_whole(pretrained: tuple[Path, list[Event]], tmp_path: Path) -> None:
    start = {"objective": "masked-patches", "from_weights": str(pretrained[0] / "model.safetensors"), "steps": 2}
    events = train_events("builtin:digits", out=tmp_path / "run", batch_size=32, device="cpu", **start)
    values = {event.name: event.value for event in events if isinstance(event, Chosen)}
    assert values["tune.what"] == "all"


def test_a_run_without_labels_is_evaluated_by_its_features(pretrained: tuple[Path, list[Event]]) -> None:
    folder, _ = pretrained
    assert "test split" in str(vitral.evaluate(folder, knn=5).split)
    with pytest.raises(ConfigError, match="no classification head"):
        vitral.evaluate(folder)


# ---- settings ----


@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize("target", ["small-patch", "pixels"])
def test_other_targets(target: str, tmp_path: Path) -> None:
    events = pretrain("builtin:digits", tmp_path / "run", steps=10, masking=dict(target=target, ratio=0.25))
    losses = [event.loss for event in events if isinstance(event, Stepped)]
    assert losses[-1] < losses[0]
    scores = last(events, Finished).test
    assert scores["target"] == target
    assert (scores["top1"] is None) == (target == "pixels")  # pixels are never exactly right
    assert (scores["most_common"] is None) == (target == "pixels")
    vitral.write_report(tmp_path / "run")


@pytest.mark.usefixtures("few_digits")
def test_micro_batches_add_up_in_training_and_in_measuring(tmp_path: Path) -> None:
    losses: dict[int, list[float]] = {}
    scores: list[float] = []
    for parts in (1, 4):
        events = pretrain("builtin:digits", tmp_path / str(parts), steps=4, accumulate=parts)
        losses[parts] = [event.loss for event in events if isinstance(event, Stepped)]
        scores.append(last(events, Finished).test["loss"])
    assert losses[1] == pytest.approx(losses[4], rel=1e-4)
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)


@pytest.mark.usefixtures("few_digits")
def test_predicted_pixels_are_shown_by_their_loss(tmp_path: Path) -> None:
    options = (
        "--objective masked-patches --masking.target pixels --steps 3 --batch-size 8 --network.depth 1 --device cpu "
        "--tensorboard"
    )
    words = ["train", "builtin:digits", *options.split()]
    human = run_command(*words, "--out", str(tmp_path / "human"))
    assert human.returncode == 0, human.stderr
    assert "%" not in next(line for line in human.stderr.split("\n") if line.startswith("epoch"))
    quiet = run_command(*words, "--out", str(tmp_path / "quiet"), "--format", "quiet")
    scores = json.loads((tmp_path / "quiet" / "report.json").read_text())["test"]
    assert quiet.stdout == f"{scores['loss']:.4f}\n"
    lines = run_command(*words, "--out", str(tmp_path / "json"), "--format", "json").stderr.split("\n")
    assert "NaN" not in "".join(lines)
    ended = [event for event in map(json.loads, filter(None, lines)) if "train_loss" in event]
    assert ended[-1]["top1"] is None


@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize("step", [1, 10])
def test_an_interrupted_and_resumed_run_is_the_same_run(tmp_path: Path, step: int) -> None:
    settings = {**MASKED, "steps": 16, "ema": 0.9, "augment": dict(shift=0.1), "optim": dict(name="muon", lr=2e-3)}
    list(train_events("builtin:digits", out=tmp_path / "whole", **settings))
    interrupt_at(step, train_events("builtin:digits", out=tmp_path / "parts", **settings))
    list(train_events(resume=tmp_path / "parts"))
    for name in ("model.safetensors", "masking.safetensors"):
        whole, parts = (load_file(tmp_path / run / name) for run in ("whole", "parts"))
        assert_equal(whole, parts)


def test_a_lost_head_of_the_best_model_is_reported(tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", {"red": 30}, size=(28, 28)) / "red"
    settings = {**MASKED, "batch_size": 8, "steps": 5}
    interrupt_at(4, train_events(data, out=tmp_path / "run", **settings))  # after an epoch of 3 batches
    (tmp_path / "run" / "masking.safetensors").unlink()
    events = list(train_events(resume=tmp_path / "run"))
    assert any("masking.safetensors is missing" in str(getattr(event, "message", "")) for event in events)
    assert isinstance(events[-1], Finished)


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        (dict(model="bit-r26x1", network={}), "BiT"),
        (dict(mix=dict(mixup=0.2)), "does not mix"),
        (dict(resize="native"), "one size"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], fragment: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"masked-patches .*{fragment}"):
        pretrain("builtin:digits", tmp_path / "run", **settings)


@pytest.mark.usefixtures("few_digits")
def test_a_recipe_with_a_loss_can_be_used_without_labels(tmp_path: Path) -> None:
    pretrain(
        "builtin:digits", tmp_path / "run", recipe="digits", steps=1, loss=dict(smoothing=0.0, class_weights="none")
    )
    config = tmp_path / "run" / "config.toml"
    again = train_events("builtin:digits", out=tmp_path / "again", recipe="none", config=config)
    assert last(again, Finished).best_step == 1  # config.toml also lists the settings of the other objective


@pytest.mark.usefixtures("few_digits")
def test_the_average_covers_the_network_and_its_head(tmp_path: Path) -> None:
    """With an average that never moves, the measured and kept weights are the initial ones."""
    events = pretrain("builtin:digits", tmp_path / "run", steps=6, ema=0.999999)
    assert last(events, Finished).test["loss"] == pytest.approx(LN_8, abs=1e-2)


@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize("objective", ["classify", "masked-patches"])
def test_compile_reaches_the_network(objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling itself takes a minute and is tested in tests/model; here, every step goes through it."""
    calls: list[str] = []

    def compile(function: Any) -> Any:
        return lambda *arguments: (calls.append("step"), function(*arguments))[1]

    monkeypatch.setattr(torch, "compile", compile)
    pretrain("builtin:digits", tmp_path / "run", objective=objective, steps=3, compile=True)
    assert len(calls) >= 3


# ---- data ----


@pytest.mark.parametrize("form", ["folder", "splits", "csv", "parquet", "shards"])
def test_images_without_labels(form: str, tmp_path: Path) -> None:
    data = write_unlabeled(tmp_path / "data", form, [encode_png(number) for number in range(40)])
    events = pretrain(data, tmp_path / "run", steps=2, batch_size=8, image_size=28)
    finished = last(events, Finished)
    assert finished.test["images"] >= 5
    if form == "splits":
        assert finished.test["images"] == 10
    vitral.write_report(tmp_path / "run")
    assert "masked patches" in (tmp_path / "run" / "report.html").read_text()
    assert isinstance(list(train_events(resume=tmp_path / "run"))[-1], Finished)


def write_unlabeled(data: Path, form: str, contents: list[bytes]) -> Path:
    data.mkdir()
    if form in ("folder", "splits", "csv"):
        for number, content in enumerate(contents):
            folder = data / ("train" if number % 4 else "test") if form == "splits" else data
            folder.mkdir(exist_ok=True)
            (folder / f"{number:02d}.png").write_bytes(content)
    if form == "csv":
        (data / "list.csv").write_text("image\n" + "".join(f"{number:02d}.png\n" for number in range(40)))
        return data / "list.csv"
    if form == "parquet":
        pa, pq = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
        table = pa.table({"image": [{"bytes": content, "path": None} for content in contents]})
        pq.write_table(table, data / "list.parquet")
        return data / "list.parquet"
    if form == "shards":
        with tarfile.open(data / "train-000.tar", "w") as shard:
            for number, content in enumerate(contents):
                member = tarfile.TarInfo(f"{number:02d}.png")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
    return data


def encode_png(number: int) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def test_labels_are_ignored(tmp_path: Path) -> None:
    data = open_dataset("builtin:digits", labeled=False)
    assert data.classes == ()
    assert {item.label for item in data.splits["train"]} == {-1}
    (tmp_path / "empty").mkdir()
    with pytest.raises(vitral.DataError, match="empty.*no images"):
        open_dataset(tmp_path / "empty", labeled=False)


def test_another_dataset_may_be_the_test_split(tmp_path: Path) -> None:
    class_folders(tmp_path / "data", {"red": 12, "green": 12}, size=(28, 28))
    class_folders(tmp_path / "others", {"blue": 5}, size=(28, 28))
    events = pretrain(tmp_path / "data", tmp_path / "run", val=str(tmp_path / "others"), steps=2)
    assert last(events, Finished).test["images"] == 5


def test_a_missing_head_cannot_be_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tune\.what=head.*has none"):
        pretrain("builtin:digits", tmp_path / "run", tune=dict(what="head"))
    assert not (tmp_path / "run").exists()
