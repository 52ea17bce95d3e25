"""A run records itself in manifest.json, report.json, log.txt and its tables."""

import csv
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

import vitral
from tests.data.images import class_folders
from tests.training.short_runs import last, train
from vitral.data.sources import open_dataset
from vitral.runs import Run
from vitral.training.events import Chosen, EpochEnded, Event, Finished, Started, Stepped

CLASSES = ("blue", "green", "red")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Event], Path]:
    folder = tmp_path_factory.mktemp("records")
    data = class_folders(folder / "my photos", {"red": 24, "green": 24, "blue": 20}, size=(20, 24))
    events = train(data, folder / "run", augment=dict(flip=0.5), seed=3)
    return Run(folder / "run"), events, data


def test_the_report(trained: tuple[Run, list[Event], Path]) -> None:
    run, events, data = trained
    report = json.loads(run.results.read_text())
    finished = last(events, Finished)
    keys = {
        "test",
        "objective",
        "best_step",
        "keep",
        "steps",
        "refit_steps",
        "train_seconds",
        "bad_images",
        "augmented",
    }
    keys |= {"parameters", "candidates", "data", "choices", "environment", "command"}
    assert set(report) == keys
    assert report["test"] == finished.test
    assert (report["objective"], report["keep"], report["augmented"]) == ("classify", "best", True)
    assert (report["steps"], report["best_step"]) == (10, finished.best_step)
    assert report["parameters"] == last(events, Started).parameters
    chosen = [event for event in events if isinstance(event, Chosen)]
    assert report["choices"] == [
        {"name": event.name, "value": str(event.value), "reason": event.reason} for event in chosen
    ]
    assert report["command"] == f"vitral train '{data}' --recipe none --config {run.config}"
    assert run.read_report() == report
    assert run.test.top1 == finished.test["top1"]
    assert run.checkpoint().labels == CLASSES


def test_the_data_of_the_report(trained: tuple[Run, list[Event], Path]) -> None:
    run, _, data = trained
    content = json.loads(run.results.read_text())["data"]
    assert set(content) == {"name", "classes", "multi_label", "images", "per_class", "reasons", "notes"}
    assert (content["name"], content["classes"], content["multi_label"]) == (data.name, list(CLASSES), False)
    assert set(content["images"]) == set(content["per_class"]) == {"train", "validation", "test"}
    assert set(content["reasons"]) == {"validation", "test"}
    assert sum(content["images"].values()) == 68
    for split, counts in content["per_class"].items():
        assert sum(counts) == content["images"][split]
    assert [sum(counts) for counts in zip(*content["per_class"].values(), strict=True)] == [20, 24, 24]


def test_the_manifest(trained: tuple[Run, list[Event], Path]) -> None:
    run, _, data = trained
    manifest = run.read_manifest()
    dataset = open_dataset(data)
    assert manifest["data_fingerprint"] == dataset.fingerprint()
    assert manifest["content_fingerprint"] == dataset.content_fingerprint()
    assert manifest["classes"] == list(CLASSES)
    assert (manifest["seed"], manifest["device"], manifest["threads"]) == (3, "cpu", torch.get_num_threads())
    assert manifest["versions"]["vitral"] == vitral.__version__
    assert manifest["resumes"] == []
    assert "val_fingerprint" not in manifest


def test_tables_log_and_sheet(trained: tuple[Run, list[Event], Path]) -> None:
    run, events, _ = trained
    ended = [event for event in events if isinstance(event, EpochEnded)]
    with run.metrics.open() as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == ["epoch", "step", "train_loss", "loss", "top1", "top5"]
    assert [float(row["top1"]) for row in rows] == pytest.approx([event.top1 for event in ended], abs=1e-6)
    stepped = [event for event in events if isinstance(event, Stepped)]
    with run.losses.open() as stream:
        losses = [float(row["loss"]) for row in csv.DictReader(stream)]
    assert losses == pytest.approx([event.loss for event in stepped], abs=1e-6)
    log = run.log.read_text()
    for word in ("chosen name=test", "started folder=", "epochended epoch=1", "finished folder="):
        assert word in log
    assert "stepped" not in log
    with Image.open(run.plots / "data.png") as sheet:
        assert sheet.size[0] > 100
