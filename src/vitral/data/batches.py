"""Load batches in a repeatable order: for any number of workers, on any rank, and from any step on.

The images in a batch depend on (seed, epoch, batch number), and the augmentation of an image on (seed, epoch, item).
A resumed run therefore needs to remember two numbers.
"""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from vitral.data.augment import Augment, augment_image, check_augment
from vitral.data.dataset import Item, sample_headers
from vitral.data.decode import decode
from vitral.data.headers import BadImageError, Pixels
from vitral.data.prefetch import load_ahead
from vitral.data.randomness import ORDER_SAMPLE, random_generator
from vitral.data.streaming import find_layout, read_ahead, stream_order
from vitral.data.transforms import preprocess_image
from vitral.errors import check_int
from vitral.preprocess import Preprocess

MAX_WORKERS = 1024
SMALL_IMAGE = 96 * 96
CACHE_BYTES = 2**30
CHUNK_BYTES = 2**24
Job = tuple[int, int] | tuple[int, int, bytes]
"""Epoch, item, and its content if that has been read already."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The whole batch that a process has a part of: everything but the images of the others."""

    start: int
    """The position of the first image of the part."""
    labels: Tensor
    items: Tensor

    @property
    def size(self) -> int:
        return len(self.items)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Images and labels of one step."""

    images: Tensor | list[Tensor]
    """uint8 (B, C, H, W); a list of (C, H, W) if sizes differ (resize=native)."""
    labels: Tensor
    """(B,) class indices; (B, K) of 0 and 1 for multi-label data."""
    items: Tensor
    """(B,) indices of the items."""
    bad: tuple[tuple[int, str], ...] = ()
    """Items that could not be read, with the reason; the other fields do not contain them."""
    share: Share | None = None
    """The whole batch, if several processes train on it."""

    @property
    def whole(self) -> Share:
        """Return the whole batch: this one, unless several processes train on it."""
        return self.share or Share(start=0, labels=self.labels, items=self.items)


class ImageDataset(TorchDataset[tuple[int, Tensor | str]]):
    """Map (epoch, item) to the item and its image, preprocessed and augmented, or the reason if it cannot be read."""

    def __init__(
        self,
        items: Sequence[Item],
        preprocess: Preprocess,
        *,
        augment: Augment | None = None,
        seed: int = 0,
        patch: tuple[int, int] = (1, 1),
    ):
        if augment is not None:
            check_augment(augment, preprocess)
        self.items, self.preprocess, self.augment, self.seed, self.patch = items, preprocess, augment, seed, patch
        sizes = [header.height * header.width for header in sample_headers(items, 16)]
        largest = max(sizes, default=SMALL_IMAGE + 1)
        self.is_cached = largest <= SMALL_IMAGE and largest * preprocess.channels * len(items) <= CACHE_BYTES
        self.cache = PixelCache()
        self.layout = find_layout(items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, job: Job) -> tuple[int, Tensor | str]:
        epoch, index, *contents = job
        try:
            content = self.read(index, contents[0] if contents else b"")
            if self.augment is None:
                image = preprocess_image(content, self.preprocess, patch=self.patch)
                return index, torch.from_numpy(np.ascontiguousarray(image.numpy()))  # torch would start more threads
            random = random_generator(self.seed, epoch, index)
            return index, augment_image(content, self.preprocess, self.augment, random, patch=self.patch)
        except BadImageError as error:
            return index, str(error)

    def read(self, index: int, content: bytes | Pixels = b"") -> bytes | Pixels:
        """Return the content of an item, which may be at hand. Small images are decoded once and cached.

        They are decoded even if the cache is full: its size depends on the number of workers, but the result must not.
        """
        if (cached := self.cache.images.get(index)) is not None:
            return cached
        content = content or self.items[index].source.read()
        if not self.is_cached:
            return content
        pixels = decode(content, self.preprocess.channels, background=self.preprocess.background)
        return self.cache.add(index, pixels)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"cache": PixelCache()}


class PixelCache:
    """Cache decoded images in a few large chunks of memory.

    Single images would fragment the memory between the tensors of the model: CIFAR-10 would take 4 GB more. The
    decision to cache rests on a few headers, so the size of each image is checked again. Workers share the limit.
    """

    def __init__(self) -> None:
        self.images: dict[int, Pixels] = {}
        self.bytes = 0
        self._chunk = np.empty(0, np.uint8)
        self._used = 0
        self._lock = Lock()

    def __reduce__(self) -> tuple[type["PixelCache"], tuple[()]]:
        return PixelCache, ()  # another process starts with an empty one

    def add(self, index: int, image: Pixels) -> Pixels:
        """Return the image, cached if it is small and there is room."""
        worker = get_worker_info()
        room = CACHE_BYTES // (1 if worker is None else worker.num_workers)
        with self._lock:
            return self._add(index, image, room)

    def _add(self, index: int, image: Pixels, room: int) -> Pixels:
        if image.shape[0] * image.shape[1] > SMALL_IMAGE or self.bytes + image.size > room:
            return image
        end = self._used + image.size
        if end > self._chunk.size:
            self._chunk, self._used, end = np.empty(max(CHUNK_BYTES, image.size), np.uint8), 0, image.size
        cached = self._chunk[self._used : end].reshape(image.shape)
        cached[:] = image
        self._used = end
        self.bytes += image.size
        self.images[index] = cached
        return cached


@dataclass
class _Jobs:
    """The batches of an epoch. The images of remote shards are read in this process, in the order of the batches."""

    items: Sequence[Item]
    epoch: int = 0
    batches: list[np.ndarray] = field(default_factory=list)
    is_remote: bool = False

    def __iter__(self) -> Iterator[list[Job]]:
        batches = ([int(index) for index in batch] for batch in self.batches)
        if not self.is_remote:
            for batch in batches:
                yield [(self.epoch, index) for index in batch]
            return
        for batch, contents in read_ahead(batches, self.items):
            yield [(self.epoch, index, content) for index, content in zip(batch, contents, strict=True)]


@dataclass
class _Sampler:
    """The jobs of the current epoch, as a DataLoader takes them."""

    jobs: _Jobs = field(default_factory=lambda: _Jobs(()))

    def __iter__(self) -> Iterator[list[Job]]:
        return iter(self.jobs)


class _WorkerPool(DataLoader[Any]):
    """A DataLoader that does not warn about more workers than cores: their number is the caller's choice."""

    def check_worker_number_rationality(self) -> None:
        pass


def _ignore_interrupts(_: int) -> None:
    """Ignore Ctrl-C in a worker: it reaches every process of a terminal, and the training process finishes its batch.

    SIGTERM keeps its default, because multiprocessing ends its children with it. A training process that stops may
    leave a tensor that a worker is about to hand over, which a thread of multiprocessing would report.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = _report_unless_disconnected


def _report_unless_disconnected(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if not isinstance(error, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, traceback)


@dataclass(kw_only=True)
class BatchLoader:
    """Load the batches of one split, epoch by epoch."""

    images: ImageDataset
    batch_size: int
    """Images per batch, over all ranks."""
    classes: int
    multi_label: bool = False
    shuffle: bool = False
    workers: int = 0
    """Number of worker processes; 0 loads in this process."""
    threads: int = 0
    """Threads of this process that load the next batch meanwhile; without any, a batch is loaded when requested."""
    rank: int = 0
    world: int = 1
    """Number of processes. Each loads its part of a shuffled batch, or every so many of the batches in order."""
    _sampler: _Sampler = field(default_factory=_Sampler, init=False, repr=False)
    """The batches of the current epoch, for worker processes that outlive it."""
    _pool: _WorkerPool | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_int("workers", self.workers, minimum=0, maximum=MAX_WORKERS)
        check_int("batch_size", self.batch_size, minimum=1, maximum=2**31)

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of batches. A shuffled epoch drops the last, smaller batch unless it is the only one."""
        whole, rest = divmod(len(self.images), self.batch_size)
        return max(1, whole) if self.shuffle else whole + (rest > 0)

    def order(self, epoch: int) -> np.ndarray:
        """Return the items of an epoch in order."""
        layout, seed = self.images.layout, self.images.seed
        if layout is not None and self.shuffle:
            return stream_order(layout, batch_size=self.batch_size, seed=seed, epoch=epoch)
        return epoch_order(len(self.images), self.images.seed, epoch, shuffle=self.shuffle)

    def epoch(self, epoch: int = 0, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Yield the batches of an epoch, from batch `start` on, up to batch `stop`."""
        order, size = self.order(epoch), self.batch_size
        numbers = range(self.batches_per_epoch)[start:stop]
        batches = [order[number * size : (number + 1) * size] for number in numbers]
        batches = share_batches(batches, self.rank, self.world, split=self.shuffle)
        images = self.images
        jobs = _Jobs(images.items, epoch=epoch, batches=batches, is_remote=images.layout is not None)
        if not self.workers:
            yield from self._load_here(jobs)
            return
        self._sampler.jobs = jobs
        if self._pool is None:
            self._pool = _WorkerPool(
                self.images,
                batch_sampler=self._sampler,  # type: ignore[arg-type]
                num_workers=self.workers,
                collate_fn=self.collate,
                multiprocessing_context="spawn",
                persistent_workers=True,
                worker_init_fn=_ignore_interrupts,
            )
        yield from self._pool

    def _load_here(self, jobs: _Jobs) -> Iterator[Batch]:
        """Yield the batches, loaded in this process: each when it is requested, or one ahead by threads."""
        every = (job for batch in jobs for job in batch)
        threads = self.threads if sum(map(len, jobs.batches)) > 1 else 0
        with closing(load_ahead(every, self.images.__getitem__, threads=threads, ahead=self.batch_size)) as loaded:
            for batch in jobs.batches:
                yield self.collate([image for _, image in islice(loaded, len(batch))])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pool": None, "_sampler": _Sampler()}

    def collate(self, loaded: list[tuple[int, Tensor | str]]) -> Batch:
        """Combine loaded images into a batch, and list those that could not be read."""
        indices = [index for index, image in loaded if isinstance(image, Tensor)]
        images = [image for _, image in loaded if isinstance(image, Tensor)]
        have_one_size = len({image.shape for image in images}) == 1
        return Batch(
            images=torch.stack(images) if have_one_size else images,
            labels=label_tensor([self.images.items[index] for index in indices], self.classes, self.multi_label),
            items=torch.tensor(indices, dtype=torch.long),
            bad=tuple((index, reason) for index, reason in loaded if isinstance(reason, str)),
        )


Indices = TypeVar("Indices", np.ndarray, Tensor)


def share_batches(batches: list[Indices], rank: int, world: int, *, split: bool) -> list[Indices]:
    """Return what a process loads: its part of every batch, or whole batches in turn, as many as every other process.

    A part is a run of images in a row, as micro-batches are.
    """
    if split:
        return [batch[rank * len(batch) // world : (rank + 1) * len(batch) // world] for batch in batches]
    mine = batches[rank::world]
    return mine + [batches[0][:0]] * (-(-len(batches) // world) - len(mine))


def epoch_order(images: int, seed: int, epoch: int, *, shuffle: bool) -> np.ndarray:
    """Return the order of the images in an epoch."""
    return random_generator(seed, epoch, ORDER_SAMPLE).permutation(images) if shuffle else np.arange(images)


def label_tensor(items: Sequence[Item], classes: int, multi_label: bool) -> Tensor:
    """Return (B,) class indices, or (B, K) of 0 and 1 for multi-label data."""
    if not multi_label:
        return torch.tensor([item.label for item in items], dtype=torch.long)
    table = torch.zeros(len(items), classes)
    for row, item in enumerate(items):
        table[row, list(item.labels)] = 1
    return table
