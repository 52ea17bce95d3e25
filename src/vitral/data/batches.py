"""Batches in an order that can be repeated: for any number of workers, on any rank, and from any step on.

Which pictures are in a batch is a function of (seed, epoch, number of the batch); what happens to a picture is one of
(seed, epoch, picture). So a run that goes on needs to remember two numbers.
"""

import signal
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from vitral.data.augment import Augment, augment, random_generator
from vitral.data.dataset import Item, sample_headers
from vitral.data.decode import BadImageError, Pixels, decode
from vitral.data.transforms import prepare
from vitral.preprocess import Preprocess

SMALL_PICTURE = 96 * 96
CACHE_BYTES = 2**30
PIECE = 2**24
_ORDER = 2**40 - 1  # the "sample" whose randomness is the order of an epoch
Job = tuple[int, int]
"""Epoch and item."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    images: Tensor | list[Tensor]
    """uint8 (B, C, H, W); a list of (C, H, W) for native sizes."""
    labels: Tensor
    """(B,) classes; (B, K) of 0 and 1 for multi-label data."""
    items: Tensor
    """(B,): which items they are."""
    bad: tuple[tuple[int, str], ...] = ()
    """Items that could not be used, and why; they are in none of the others."""


class ImageDataset(TorchDataset[tuple[int, Tensor | str]]):
    """A picture by (epoch, item), prepared, and augmented where that is asked for; the reason for a bad one."""

    def __init__(
        self,
        items: Sequence[Item],
        preprocess: Preprocess,
        *,
        how: Augment | None = None,
        seed: int = 0,
        patch: tuple[int, int] = (1, 1),
    ):
        self.items, self.preprocess, self.how, self.seed, self.patch = items, preprocess, how, seed, patch
        self.keep = _is_worth_keeping(items, preprocess.channels)
        self.kept = Kept()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, job: Job) -> tuple[int, Tensor | str]:
        epoch, index = job
        try:
            content = self.content(index)
            if self.how is None:
                return index, prepare(content, self.preprocess, patch=self.patch).contiguous()
            random = random_generator(self.seed, epoch, index)
            return index, augment(content, self.preprocess, self.how, random, patch=self.patch)
        except BadImageError as error:
            return index, str(error)

    def content(self, index: int) -> bytes | Pixels:
        """Small pictures are decoded once and kept. Where there is no room, they are decoded all the same: what is kept
        depends on the number of workers, and what is learnt must not."""
        if (known := self.kept.pictures.get(index)) is not None:
            return known
        content = self.items[index].source.read()
        if isinstance(content, np.ndarray) and content.shape[2] != self.preprocess.channels:
            content = np.repeat(content[..., :1], self.preprocess.channels, axis=2)
        if self.keep:
            if isinstance(content, bytes):
                content = decode(content, self.preprocess.channels, background=self.preprocess.background)
            content = self.kept.add(index, content)
        return content

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"kept": Kept()}


class Kept:
    """Decoded pictures in a few large pieces of memory. One by one they would come to lie between the tensors of the
    network, whose places could then not be joined again: CIFAR-10 would take 4 GB more.

    Only a few headers said that all are small and fit, so each is looked at once more. Every worker has its own, and
    they share the room."""

    def __init__(self) -> None:
        self.pictures: dict[int, Pixels] = {}
        self.bytes = 0
        self._piece = np.empty(0, np.uint8)
        self._used = 0

    def add(self, index: int, picture: Pixels) -> Pixels:
        """The picture, kept if it is small and there is room."""
        worker = get_worker_info()
        room = CACHE_BYTES // (1 if worker is None else worker.num_workers)
        if picture.shape[0] * picture.shape[1] > SMALL_PICTURE or self.bytes + picture.size > room:
            return picture
        end = self._used + picture.size
        if end > self._piece.size:
            self._piece, self._used, end = np.empty(max(PIECE, picture.size), np.uint8), 0, picture.size
        kept = self._piece[self._used : end].reshape(picture.shape)
        kept[:] = picture
        self._used = end
        self.bytes += picture.size
        self.pictures[index] = kept
        return kept


def _is_worth_keeping(items: Sequence[Item], channels: int) -> bool:
    """Whether the pictures look small, by a few of them, and all together fit."""
    sizes = [header.height * header.width for header in sample_headers(items, 16)]
    return bool(sizes) and max(sizes) <= SMALL_PICTURE and max(sizes) * channels * len(items) <= CACHE_BYTES


@dataclass
class _Jobs:
    """The batches of an epoch, for processes that outlive it."""

    batches: list[list[Job]] = field(default_factory=list)

    def __iter__(self) -> Iterator[list[Job]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _leave_interrupts_to_the_loop(_: int) -> None:
    """Ctrl-C reaches every process of a terminal, and the one that trains wants the rest of its batch. SIGTERM is what
    multiprocessing ends its children by, and stays that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@dataclass(kw_only=True)
class BatchLoader:
    """Batches of one split, epoch by epoch."""

    pictures: ImageDataset
    batch_size: int
    """Of all ranks together."""
    classes: int
    multi_label: bool = False
    shuffle: bool = False
    workers: int = 0
    rank: int = 0
    world: int = 1
    _jobs: _Jobs = field(default_factory=_Jobs, init=False, repr=False)
    _processes: DataLoader[Batch] | None = field(default=None, init=False, repr=False)

    @property
    def batches(self) -> int:
        """In an epoch: without the remainder when shuffled, unless there is nothing else."""
        whole, rest = divmod(len(self.pictures), self.batch_size)
        return max(1, whole) if self.shuffle else whole + (rest > 0)

    def order(self, epoch: int) -> np.ndarray:
        count = len(self.pictures)
        if not self.shuffle:
            return np.arange(count)
        return random_generator(self.pictures.seed, epoch, _ORDER).permutation(count)

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from one of them on."""
        order = self.order(epoch)
        jobs: list[list[Job]] = []
        for number in range(start, self.batches):
            whole = order[number * self.batch_size : (number + 1) * self.batch_size]
            jobs.append([(epoch, int(index)) for index in whole[self.rank :: self.world]])
        if not self.workers:
            yield from (self.collate([self.pictures[job] for job in batch]) for batch in jobs)
            return
        self._jobs.batches = jobs
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more workers than cores are somebody's choice
            if self._processes is None:
                self._processes = self._start()
            batches = iter(self._processes)
        yield from batches

    def _start(self) -> DataLoader[Batch]:
        """Processes that stay from epoch to epoch; which pictures come next is in ``_jobs``."""
        return DataLoader(
            self.pictures,
            batch_sampler=self._jobs,  # type: ignore[arg-type]
            num_workers=self.workers,
            collate_fn=self.collate,
            multiprocessing_context="spawn",
            persistent_workers=True,
            worker_init_fn=_leave_interrupts_to_the_loop,
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_processes": None, "_jobs": _Jobs()}

    def collate(self, found: list[tuple[int, Tensor | str]]) -> Batch:
        good = [(index, image) for index, image in found if isinstance(image, Tensor)]
        images = [image for _, image in good]
        same = len({image.shape for image in images}) == 1
        return Batch(
            images=torch.stack(images) if same else images,
            labels=self.labels([index for index, _ in good]),
            items=torch.tensor([index for index, _ in good], dtype=torch.long),
            bad=tuple((index, reason) for index, reason in found if isinstance(reason, str)),
        )

    def labels(self, indices: list[int]) -> Tensor:
        labels = [self.pictures.items[index].label for index in indices]
        if not self.multi_label:
            return torch.tensor(labels, dtype=torch.long)
        table = torch.zeros(len(labels), self.classes)
        for row, classes in enumerate(labels):
            table[row, list(classes) if isinstance(classes, tuple) else [classes]] = 1
        return table
