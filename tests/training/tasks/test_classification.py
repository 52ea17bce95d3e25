"""The task of learning from labels: targets, class weights, mixing, scores and the images of mistakes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.conftest import small_model
from tests.data.images import class_folders
from vitral.data.batches import Batch, BatchLoader, ImageDataset
from vitral.data.dataset import DatasetIndex, FileSource, Item
from vitral.data.sources import open_dataset
from vitral.data.splits import Splits, choose_splits
from vitral.inference.pipeline import ModelOutputs
from vitral.preprocess import Preprocess
from vitral.runs import Run
from vitral.training.config import as_resolved
from vitral.training.events import Measuring
from vitral.training.settings import with_settings
from vitral.training.step import Learner
from vitral.training.tasks import Measurement
from vitral.training.tasks.classification import Classification
from vitral.training.tasks.relevance_images import relevance_files, typical_images

PREPROCESS = Preprocess(size=(16, 16))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[DatasetIndex, Splits]:
    folder = class_folders(tmp_path_factory.mktemp("photos"), {"a": 30, "b": 20, "c": 10}, size=(16, 16))
    dataset = open_dataset(folder)
    return dataset, choose_splits(dataset)


def make_task(data: tuple[DatasetIndex, Splits], **settings: Any) -> tuple[Any, Classification]:
    model = small_model(num_classes=3)
    config = as_resolved(
        with_settings(
            None,
            {"data": "x", "device": "cpu", "precision": "float32", "tune.views": 0, "compile": False, **settings},
            "test",
        )
    )
    return model, Classification(model, PREPROCESS, config, *data)


def make_batch(labels: list[int]) -> Batch:
    images = torch.randint(0, 256, (len(labels), 3, 16, 16), dtype=torch.uint8)
    return Batch(images=images, labels=torch.tensor(labels), items=torch.arange(len(labels)))


def test_a_batch_is_normalized_with_smooth_targets(data: tuple[DatasetIndex, Splits]) -> None:
    _, task = make_task(data, **{"loss.smoothing": 0.3})
    batch = make_batch([0, 2])
    prepared = task.prepare(batch, step=0)
    assert isinstance(batch.images, torch.Tensor)
    torch.testing.assert_close(prepared.images, batch.images / 127.5 - 1)
    torch.testing.assert_close(prepared.targets, torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.1, 0.8]]))
    assert len(prepared) == 2


def test_compiled_networks_draw_no_noise_per_image(data: tuple[DatasetIndex, Splits]) -> None:
    """Each batch has other keys, for which the network would be compiled again."""
    model, task = make_task(data, **{"optim.layer_decay": 1.0, "optim.lr": 1e-3})
    learner = Learner(model, task, task.config)
    batch = make_batch([0, 2])
    assert len(learner._image_keys(batch, slice(0, 2), step=0)) == 2
    task.compile_network(True)  # compiles with the first batch, which never comes
    assert learner._image_keys(batch, slice(0, 2), step=0) == []


def test_mixing_depends_on_seed_and_step(data: tuple[DatasetIndex, Splits]) -> None:
    _, task = make_task(data, **{"mix.mixup": 1.0})
    _, other = make_task(data, **{"mix.mixup": 1.0, "seed": 1})
    batch = make_batch([0, 1, 2, 0])
    first, again, later = task.prepare(batch, 5), task.prepare(batch, 5), task.prepare(batch, 6)
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.targets, again.targets)
    assert not torch.equal(first.targets, later.targets)
    assert not torch.equal(first.targets, other.prepare(batch, 5).targets)


def test_parts_of_a_batch_add_up(data: tuple[DatasetIndex, Splits]) -> None:
    _, task = make_task(data, **{"loss.class_weights": "balanced", "loss.kind": "softmax"})
    prepared = task.prepare(make_batch([0, 1, 2, 0]), 0)
    assert task.class_weights is not None
    assert task.class_weights[2] > task.class_weights[1] > task.class_weights[0]
    whole = task.loss(task.forward(prepared, slice(0, 4)), prepared, slice(0, 4))
    parts = [task.loss(task.forward(prepared, part), prepared, part) for part in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(sum(parts), whole)


def measure(task: Classification, model: Any, splits: Splits, split: str) -> tuple[list[Any], Measurement]:
    loader = BatchLoader(images=ImageDataset(splits.test, PREPROCESS), batch_size=4, classes=3)
    events, generator = [], task.measure(model, loader, split)
    while True:
        try:
            events.append(next(generator))
        except StopIteration as end:
            return events, end.value


def test_scores_mistakes_and_their_images(data: tuple[DatasetIndex, Splits], tmp_path: Path) -> None:
    """A head that always predicts c has the accuracy of the fraction of c."""
    model, task = make_task(data)
    splits = data[1]
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor([0.0, 0.0, 5.0]))
    events, measured = measure(task, model, splits, "test")
    labels = [item.label for item in splits.test]
    assert measured.scores.top1 == pytest.approx(labels.count(2) / len(labels))
    assert measured.scores.images == len(labels)
    assert all(isinstance(event, Measuring) and event.what == "test" for event in events)
    assert events[-1].done == len(labels)
    assert measured.report["split"] == splits.reasons["test"]
    mistakes = measured.report["mistakes"]
    assert {mistake["prediction"] for mistake in mistakes} == {"c"}
    assert {mistake["label"] for mistake in mistakes} == {"a", "b"}
    run = Run(tmp_path)
    run.plots.mkdir()
    task.draw(model, run, measured.report, splits.test, seconds=20.0)
    images = sorted(run.plots.glob("mistake-*.png"))
    assert len(images) == len(mistakes)
    Image.open(images[0]).close()
    typical = measured.report["typical"]
    assert [row["label"] for row in typical] == ["c"]  # the only class that is ever predicted
    assert len(list(run.plots.glob("relevance-*.png"))) == len(mistakes) + len(typical)
    assert len(list(run.plots.glob("typical-*.png"))) == 1
    _, validation = measure(task, model, splits, "validation")
    assert validation.scores == measured.scores
    assert validation.report == {}


def test_unreadable_images_are_listed(tmp_path: Path) -> None:
    folder = class_folders(tmp_path / "data", {"a": 8, "b": 8, "c": 8}, size=(16, 16))
    dataset = open_dataset(folder)
    splits = choose_splits(dataset)
    key = splits.test[0].key
    (folder / key).write_bytes(b"")
    model, task = make_task((dataset, splits))
    _, measured = measure(task, model, splits, "test")
    assert list(measured.unreadable) == [(key, "empty")]
    assert measured.scores.images == len(splits.test) - 1


def test_a_failing_overlay_never_fails_the_run(
    data: tuple[DatasetIndex, Splits], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = make_task(data)
    _, measured = measure(task, model, data[1], "test")
    run = Run(tmp_path)
    run.plots.mkdir()

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("vitral.training.tasks.relevance_images.relevance", fail)
    task.draw(model, run, measured.report, data[1].test, seconds=20.0)
    assert not list(run.plots.glob("relevance-*.png"))
    assert "relevance was not drawn: RuntimeError: out of memory" in run.log.read_text()


def test_overlays_stop_when_they_take_too_long(data: tuple[DatasetIndex, Splits], tmp_path: Path) -> None:
    model, task = make_task(data)
    _, measured = measure(task, model, data[1], "test")
    run = Run(tmp_path)
    run.plots.mkdir()
    task.draw(model, run, measured.report, data[1].test, seconds=0.0)
    assert not list(run.plots.glob("relevance-*.png"))
    assert "stopped after" in run.log.read_text()


def test_mistakes_and_typical_images_are_drawn_by_turns() -> None:
    """A time limit leaves some of each."""
    row = {"key": "a.jpg"}
    files = [file for file, _ in relevance_files({"mistakes": [row], "typical": [row, row]})]
    assert files == ["relevance-mistake-01.png", "relevance-typical-01.png", "relevance-typical-02.png"]


def test_every_class_has_a_typical_image() -> None:
    labels = torch.arange(102)
    items = [Item(f"{number}.jpg", number, FileSource("x.jpg")) for number in range(102)]
    outputs = ModelOutputs(items=items, outputs=torch.eye(102), labels=labels, indices=labels, unreadable=())
    assert len(typical_images(outputs, [str(number) for number in range(102)])) == 102
