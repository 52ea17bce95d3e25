"""The worker without a process around it: cancelled images, and the order of tasks."""

import io
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np

from vitral.serving import frames
from vitral.serving.settings import Limits
from vitral.serving.worker import Task, Worker


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


def test_attention_is_computed_one_by_one() -> None:
    """A batch of slow maps would send nothing for a long time, and the server would take the worker for hung."""
    worker = make_worker()
    for number, kind in enumerate(["attention", "attention", "predict", "predict"]):
        image = np.zeros((3, 8, 8), np.uint8)
        worker._ready.append(Task(number=number, kind=kind, options={}, image=image, ready=time.monotonic()))
    batches = [[task.number for task in worker._next_batch(16, 0.0)] for _ in range(3)]
    assert batches == [[0], [1], [2, 3]]
