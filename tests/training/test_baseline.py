"""The baseline of a fine-tuning: its images, its scores, and the reason for none."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import vitral
from tests.conftest import small_model
from tests.data.images import class_folders
from tests.training.short_runs import TINY, last, warnings_of
from vitral.data.dataset import FileSource, Item
from vitral.data.sources import open_dataset
from vitral.data.splits import choose_splits
from vitral.inference.loaded_model import load_model
from vitral.training import baseline
from vitral.training.baseline import measure_features, take_evenly
from vitral.training.entry import train_events
from vitral.training.events import Baseline, Event, Measuring
from vitral.weights.checkpoint import Checkpoint


def test_take_evenly() -> None:
    items = [Item(str(number), 0, FileSource("")) for number in range(10)]
    assert take_evenly(items, 10) == take_evenly(items, 99) == tuple(items)
    assert [item.key for item in take_evenly(items, 4)] == ["0", "2", "5", "7"]
    assert take_evenly(items, 0) == ()


def measure(data: Path, model: vitral.ViT) -> list[Event]:
    dataset = open_dataset(data)
    preprocess = vitral.Preprocess(size=(16, 16))
    loaded = load_model(Checkpoint(model=model, preprocess=preprocess), device="cpu")
    return list(measure_features(loaded, dataset, choose_splits(dataset)))


@pytest.fixture(scope="module")
def colors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("colors"), {"red": 40, "green": 40, "blue": 40}, size=(16, 16))


def test_features_that_separate_the_classes(colors: Path) -> None:
    events = measure(colors, small_model())
    scores = last(events, Baseline)
    assert scores.knn > 0.9  # the mean color is in any feature
    assert scores.few_shot > 0.9
    splits = choose_splits(open_dataset(colors))
    assert (scores.train_images, scores.images) == (len(splits.train), len(splits.validation))
    progress = [event for event in events if isinstance(event, Measuring)]
    assert {event.what for event in progress} == {"baseline"}
    assert [event.done for event in progress] == sorted(event.done for event in progress)
    assert progress[-1].done == progress[-1].total == scores.train_images + scores.images


def test_features_without_information(colors: Path) -> None:
    model = small_model()
    with torch.no_grad():
        model.norm.weight.zero_()  # every image has the same features
    assert last(measure(colors, model), Baseline).knn < 0.6


def test_too_few_images(tmp_path: Path) -> None:
    data = class_folders(tmp_path / "data", {"a": 3, "b": 3}, size=(16, 16))
    (message,) = warnings_of(measure(data, small_model()))
    assert "too few images" in message


def test_a_device_that_is_too_slow(colors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "_MAX_FLOPS", {"cpu": 1.0})
    (message,) = warnings_of(measure(colors, small_model()))
    assert "too long" in message


def test_a_run_reports_its_baseline(colors: Path, tmp_path: Path) -> None:
    """Classification from a checkpoint has one; from scratch there is none."""
    vitral.save(small_model(), tmp_path / "base.safetensors")
    settings: dict[str, Any] = {name: value for name, value in TINY.items() if name not in ("model", "network")}
    settings |= {"epochs": 1, "from": str(tmp_path / "base.safetensors")}
    events = list(train_events(colors, out=tmp_path / "run", **settings))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["baseline"]["knn"] == last(events, Baseline).knn
    assert set(report["baseline"]) == {"few_shot", "knn", "train_images", "images"}
    scratch = list(train_events(colors, out=tmp_path / "scratch", **{**TINY, "epochs": 1}))
    assert not [event for event in scratch if isinstance(event, Baseline)]
    assert json.loads((tmp_path / "scratch" / "report.json").read_text())["baseline"] is None
