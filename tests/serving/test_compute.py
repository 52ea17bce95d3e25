"""The worker without a process around it: cancelled images, the order of tasks, and the engine."""

import io
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitral
from tests.data.images import encoded, photo
from tests.serving.servers import wait_for
from vitral.inference.engines import choosing
from vitral.serving import frames
from vitral.serving.compute import Computer, load_predictor
from vitral.serving.settings import Limits, ModelSource
from vitral.serving.worker import Task, Worker, choose_engine


def make_worker() -> Worker:
    unused: Any = SimpleNamespace()
    return Worker(unused, unused, Limits(), io.BytesIO())


def test_cancelled_images_keep_no_bytes() -> None:
    """Clients that send large images and leave cannot fill the memory of a worker whose decoders are busy."""
    worker, is_over = make_worker(), Event()
    message = {"task": "predict", "options": {}}
    sent = [frames.pack({"id": number, **message}, bytes(1000)) for number in range(5)]
    cancels = [frames.pack({"cancel": number}) for number in range(4)]
    with ThreadPoolExecutor(1) as decoders:
        decoders.submit(is_over.wait)  # a long image
        worker.read_tasks(io.BytesIO(b"".join(sent)), decoders)
        tasks = list(worker._decoding.values())
        assert [len(task.content) for task in tasks] == [1000] * 5
        worker.read_tasks(io.BytesIO(b"".join(cancels)), decoders)
        assert [len(task.content) for task in tasks] == [0] * 4 + [1000]
        worker._cancel(4)
        is_over.set()


def test_small_images_do_not_wait_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few images of many pixels, each of which takes seconds, cannot occupy all decoders."""
    monkeypatch.setattr("vitral.serving.worker.LARGE_IMAGE", 50 * 50)
    is_over, sizes = Event(), list[int]()

    def prepare(content: bytes) -> np.ndarray:
        is_large = Image.open(io.BytesIO(content)).width > 50
        if is_large:
            is_over.wait(20)
        sizes.append(60 if is_large else 40)
        return np.zeros((3, 8, 8), np.uint8)

    predictor: Any = SimpleNamespace(prepare=prepare, loaded=None)
    worker = Worker(predictor, SimpleNamespace(), Limits(), io.BytesIO())  # type: ignore[arg-type]
    images = [encoded(photo(side, side), "JPEG") for side in (60, 60, 60, 40)]
    sent = [frames.pack({"id": n, "task": "predict", "options": {}}, image) for n, image in enumerate(images)]
    with ThreadPoolExecutor(2) as decoders:
        worker.read_tasks(io.BytesIO(b"".join(sent)), decoders)
        wait_for(lambda: [task.number for task in worker._ready] == [3])
        is_over.set()
        wait_for(lambda: len(worker._ready) == 4)
    assert sizes == [40, 60, 60, 60]


def test_attention_is_computed_one_by_one() -> None:
    """A batch of slow maps would send nothing for a long time, and the server would take the worker for hung."""
    worker = make_worker()
    for number, kind in enumerate(["attention", "attention", "predict", "predict"]):
        image = np.zeros((3, 8, 8), np.uint8)
        worker._ready.append(Task(number=number, kind=kind, options={}, image=image, ready=time.monotonic()))
    batches = [[task.number for task in worker._next_batch(16, 0.0)] for _ in range(3)]
    assert batches == [[0], [1], [2, 3]]


def test_the_engine_is_measured_if_that_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path))
    model = vitral.create("vit-pico7", num_classes=3).eval()
    vitral.save(model, tmp_path / "model.safetensors", labels=["a", "b", "c"])
    monkeypatch.setattr(choosing, "list_candidates", lambda *_: iter([("openvino", "float32")]))
    monkeypatch.setattr(choosing, "MIN_SPEEDUP", 0.0)

    def start(preparation_seconds: float) -> Computer:
        monkeypatch.setattr(choosing, "PREPARATION_SECONDS", {"openvino": preparation_seconds})
        predictor = load_predictor(ModelSource(name="tiny", source=str(tmp_path / "model.safetensors")))
        computer = Computer(predictor, reject=2.0)
        choose_engine(Worker(predictor, computer, Limits(), io.BytesIO()), batch=4)
        return computer

    assert start(1e9).predictor.engine == "torch float32"
    assert not capsys.readouterr().err
    computer = start(0.0)
    assert computer.predictor.engine == "openvino float32"
    assert "vitral: tiny: engine: openvino float32" in capsys.readouterr().err
    image = np.full((3, 28, 28), 90, np.uint8)
    answer = json.loads(computer.predict([image], [{"top_k": 3}])[0])
    expected = vitral.Predictor(tmp_path / "model.safetensors", engine="torch").predict_prepared([image])[0]
    assert answer["probability"] == pytest.approx(expected.probability, abs=1e-5)
