"""A worker process: read images from standard input, decode them in threads, compute batches, write results.

Decoding starts when an image arrives. A batch starts when the previous one has ended: with all images that are decoded
by then, after waiting for others for at most `max_wait`. A killed server closes the pipe, which ends the worker.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from vitral.data.decode import BadImageError
from vitral.data.headers import Header, read_header
from vitral.errors import VitralError
from vitral.inference.engines.choosing import example_images
from vitral.inference.predictor import Predictor
from vitral.serving import frames
from vitral.serving.compute import Computer, describe_model, load_predictor, seen_box
from vitral.serving.refusals import RequestError, bad_image
from vitral.serving.settings import Limits, ModelSource
from vitral.serving.uploads import check_size

LARGE_IMAGE = 8_000_000
"""Images of more pixels are decoded one at a time, which bounds the memory of a worker, in a thread of their own: some
take seconds, and the others must not wait for them."""
WARM_UP_SIZES = (1, 2)
MEASURED_IMAGES, MEASURED_SECONDS, MEASURED_BATCH = 5000, 200.0, 8
"""Engines are measured if that pays within so many images, or within so many seconds of eager torch."""


@dataclass(eq=False, slots=True)
class Task:
    """An image on its way through the worker."""

    number: int
    kind: str
    options: dict[str, Any]
    content: bytes = b""
    image: np.ndarray | None = None
    info: dict[str, Any] = field(default_factory=dict)
    ready: float = 0.0


class Worker:
    """Decode and compute the images of one model."""

    def __init__(self, predictor: Predictor, computer: Computer, limits: Limits, output: BinaryIO):
        self.predictor = predictor
        self.computer = computer
        self.limits = limits
        self._output = output
        self._output_lock = threading.Lock()
        self._large_images = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode-large")
        self._ready: deque[Task] = deque()
        self._changed = threading.Condition()
        self._decoding: dict[int, Task] = {}
        self._is_closed = False

    def send(self, head: dict[str, Any], content: bytes = b"") -> None:
        with self._output_lock:
            self._output.write(frames.pack(head, content))
            self._output.flush()

    def read_tasks(self, stream: BinaryIO, decoders: ThreadPoolExecutor) -> None:
        """Decode every image that arrives, until the server closes the stream."""
        while (message := frames.read(stream)) is not None:
            head, content = message
            if "cancel" in head:
                self._cancel(head["cancel"])
            else:
                task = Task(number=head["id"], kind=head["task"], options=head["options"], content=content)
                with self._changed:
                    self._decoding[task.number] = task
                decoders.submit(self._decode, task)
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _cancel(self, number: int) -> None:
        """Drop an image that has not been computed, and its bytes: clients can leave faster than it decodes."""
        with self._changed:
            if task := self._decoding.pop(number, None):
                task.content = b""
            self._ready = deque(task for task in self._ready if task.number != number)

    def _decode(self, task: Task, *, is_large: bool = False) -> None:
        try:
            content = task.content
            if task.number not in self._decoding:  # cancelled
                return
            header = read_header(content)
            check_size(header.height, header.width, self.limits)
            if header.height * header.width > LARGE_IMAGE and not is_large:
                self._large_images.submit(self._decode, task, is_large=True)
                return
            task.content = b""
            task.info = self._describe(header, with_box=task.kind == "attention")
            task.image = self.predictor.prepare(content)
        except BadImageError as error:
            self._fail(task, bad_image(error.reason))
        except MemoryError:
            self._fail(task, RequestError(503, "out_of_memory", "The server is out of memory.", retry_after=5))
        except Exception:
            traceback.print_exc()
            self._fail(task, RequestError(500, "internal_error", "The image could not be decoded."))
        else:
            task.ready = time.monotonic()
            with self._changed:
                if self._decoding.pop(task.number, None):
                    self._ready.append(task)
                    self._changed.notify()

    def _describe(self, header: Header, *, with_box: bool) -> dict[str, Any]:
        """Return the size of the image, and the region that the model sees."""
        loaded = self.predictor.loaded
        box = {"box": seen_box(header, loaded.preprocess, loaded.step_hw)} if with_box else {}
        return {"width": header.width, "height": header.height, **box}

    def _fail(self, task: Task, error: RequestError) -> None:
        with self._changed:
            self._decoding.pop(task.number, None)
        problem = {"status": error.status, "code": error.code, "message": error.message}
        self.send({"id": task.number, "error": problem | {"retry_after": error.retry_after}})

    def compute_batches(self, *, max_batch: int, max_wait: float) -> None:
        """Compute batches until the server closes the stream."""
        while batch := self._next_batch(max_batch, max_wait):
            start = time.monotonic()
            self._compute(batch)
            self.send({"batch": len(batch), "seconds": time.monotonic() - start})

    def _next_batch(self, max_batch: int, max_wait: float) -> list[Task]:
        """Return images of the same task, at least one, or none at the end."""
        with self._changed:
            while not self._ready:
                if self._is_closed:
                    return []
                self._changed.wait()
            deadline = self._ready[0].ready + max_wait
            while len(self._ready) < max_batch and not self._is_closed:
                if (remaining := deadline - time.monotonic()) <= 0 or not self._changed.wait(remaining):
                    break
            if not self._ready:  # cancelled meanwhile
                return self._next_batch(max_batch, max_wait)
            kind = self._ready[0].kind
            max_batch = 1 if kind == "attention" else max_batch  # it is computed per image; each result is sent at once
            batch: list[Task] = []
            while self._ready and self._ready[0].kind == kind and len(batch) < max_batch:
                batch.append(self._ready.popleft())
            return batch

    def _compute(self, batch: Sequence[Task]) -> None:
        images = [task.image for task in batch if task.image is not None]
        try:
            results = self.computer.tasks[batch[0].kind](images, [task.options for task in batch])
        except RequestError as error:
            self._divide(batch, error)
        except MemoryError:
            self._divide(batch, RequestError(503, "out_of_memory", "The server is out of memory.", retry_after=5))
        except VitralError as error:
            print(f"vitral: {error}", file=sys.stderr)
            self._divide(batch, RequestError(500, "model_failed", "The model produced no usable output."))
        except Exception:
            traceback.print_exc()
            self._divide(batch, RequestError(500, "internal_error", "The model failed on this image."))
        else:
            for task, result in zip(batch, results, strict=True):
                self.send({"id": task.number, "info": task.info}, result)

    def _divide(self, batch: Sequence[Task], error: RequestError) -> None:
        """Compute the images of a failed batch one by one, so that one image cannot fail the others."""
        if len(batch) == 1:
            self._fail(batch[0], error)
            return
        for task in batch:
            self._compute([task])


def main() -> None:
    """Load the model that the first message describes, report it, and work until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server decides when its workers end
        signal.signal(number, signal.SIG_IGN)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that a library prints can mix with the messages
    stream = sys.stdin.buffer
    message = frames.read(stream)
    if message is None:
        return
    settings = message[0]
    source = ModelSource(**settings["model"])
    if source.threads is not None:
        import torch

        torch.set_num_threads(source.threads)
    try:
        predictor = load_predictor(source)
        computer = Computer(predictor, reject=settings["reject"])
        worker = Worker(predictor, computer, Limits(**settings["limits"]), output)
        warm_up(worker)
        choose_engine(worker, batch=settings["max_batch"])
        warm_up(worker)  # the engine that was chosen
    except VitralError as error:
        failure = {"failed": {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}}
        output.write(frames.pack(failure))
        output.flush()
        return
    worker.send({"ready": True}, json.dumps(describe_model(predictor, source)).encode())
    decoders = ThreadPoolExecutor(max_workers=settings["decoders"], thread_name_prefix="decode")
    threading.Thread(target=worker.read_tasks, args=(stream, decoders), daemon=True).start()
    worker.compute_batches(max_batch=settings["max_batch"], max_wait=settings["max_wait"] / 1000)
    os._exit(0)  # decoding threads may still run, and nobody waits for them


def warm_up(worker: Worker) -> None:
    """Run the model once per size of batch, so that the first request is as fast as the others."""
    preprocess = worker.predictor.loaded.preprocess
    image = np.zeros((preprocess.channels, *preprocess.size), dtype=np.uint8)
    for size in WARM_UP_SIZES:
        compute_once(worker, [image] * size)


def compute_once(worker: Worker, images: Sequence[np.ndarray]) -> None:
    kind = "predict" if worker.predictor.can_predict else "features"
    worker.computer.tasks[kind](images, [{"top_k": 1}] * len(images))


def choose_engine(worker: Worker, *, batch: int) -> None:
    """Measure engines, once per model and machine, unless the network is so small that its own time hardly counts."""
    predictor = worker.predictor
    images = [*example_images(predictor.loaded.preprocess, min(MEASURED_BATCH, batch))]
    start = time.perf_counter()
    compute_once(worker, images)
    seconds = (time.perf_counter() - start) / len(images)
    predictor.choose_engine(images, total=min(MEASURED_IMAGES, int(MEASURED_SECONDS / seconds)))


if __name__ == "__main__":
    main()
