"""Stream remote shards: an order that is read in long ranges, and the ranges ahead of their use.

The order of an epoch is a function of the seed and the epoch. Shards are put in a random order, one after the other,
and this row is cut into lanes of equal length. Images are shuffled within a stretch of each lane (the buffer), and
batches take images from all lanes in turn. Each lane is therefore read from its start to its end, whoever reads it: the
images of a process are those of some lanes, unless there are more processes than groups of lanes.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vitral.data.dataset import Item
from vitral.data.headers import MAX_BYTES
from vitral.data.randomness import ORDER_SAMPLE, random_generator
from vitral.data.remote import RemoteSource, read_range

LANES = 64
GROUPS = 16
"""Lanes next to each other form a group. A process has whole groups if 16 is a multiple of the processes."""
BUFFER_BYTES = 2**25
"""Size of the images that are shuffled with each other, over all lanes."""
WINDOW_BYTES = 2**26
"""Size of the images that a process requests at once. Two windows are in memory: one in use, the next on its way."""
MAX_GAP = 2**17
"""Ranges with at most as many bytes between them are requested together."""
MAX_RANGE = 2**24
THREADS = 8
"""Requests at the same time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The positions of the images of a split in its shards."""

    shards: np.ndarray
    """(N,): the number of the shard of each image."""
    offsets: np.ndarray
    sizes: np.ndarray


def find_layout(items: Sequence[Item]) -> Layout | None:
    """Return the layout of images in remote shards, or None if they are elsewhere."""
    sources = [item.source for item in items if isinstance(item.source, RemoteSource)]
    if not items or len(sources) < len(items):
        return None
    numbers: dict[str, int] = {}
    return Layout(
        shards=np.array([numbers.setdefault(source.url, len(numbers)) for source in sources]),
        offsets=np.array([source.offset for source in sources]),
        sizes=np.array([source.size for source in sources]),
    )


def stream_order(layout: Layout, *, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the images in an epoch."""
    random = random_generator(seed, epoch, ORDER_SAMPLE)
    count = len(layout.sizes)
    lanes = min(LANES, count)
    rank = random.permutation(int(layout.shards.max()) + 1)[layout.shards]
    row = np.roll(np.lexsort((layout.offsets, rank)), int(random.integers(count)))
    starts = np.arange(lanes + 1) * count // lanes
    lane = np.searchsorted(starts, np.arange(count), side="right") - 1
    turn = np.arange(count) - starts[lane]
    stretch = max(1, int(BUFFER_BYTES / max(1.0, layout.sizes.mean()) / lanes))
    row = row[np.lexsort((random.random(count), turn // stretch, lane))]
    lane = random.permutation(lanes)[lane]
    dealt = np.lexsort((lane, turn))  # an image from each lane, then the next from each
    group = lane[dealt] * GROUPS // lanes
    return row[dealt[np.lexsort((random.random(count), group, np.arange(count) // batch_size))]]


# ---- reading ahead ----


@dataclass(frozen=True, kw_only=True)
class _Range:
    """Bytes of a shard that are requested together, and the images in them."""

    url: str
    start: int
    end: int
    members: list[int]


@dataclass(kw_only=True)
class _Window:
    """Batches whose images are requested together."""

    batches: list[Sequence[int]]
    contents: dict[int, bytes] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, items: Sequence[Item]) -> None:
        """Request the images in threads, which end with the process: a store that hangs must not keep it."""
        ranges = iter(plan_ranges(sorted({index for batch in self.batches for index in batch}), items))
        lock = threading.Lock()
        self.threads = [
            threading.Thread(target=self._fetch, args=(ranges, items, lock), daemon=True) for _ in range(THREADS)
        ]
        for thread in self.threads:
            thread.start()

    def _fetch(self, ranges: Iterator[_Range], items: Sequence[Item], lock: threading.Lock) -> None:
        while not self.errors:
            with lock:
                span = next(ranges, None)
            if span is None:
                return
            try:
                content = read_range(span.url, span.start, span.end)
                for index in span.members:
                    source = items[index].source
                    assert isinstance(source, RemoteSource)
                    start = source.offset - span.start
                    self.contents[index] = source.verify(content[start : start + source.size])
            except BaseException as error:  # raised where the batch is awaited
                self.errors.append(error)

    def wait(self) -> None:
        """Wait for the images. Raise DataError if a request failed."""
        for thread in self.threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


def read_ahead(batches: Iterable[Sequence[int]], items: Sequence[Item]) -> Iterator[tuple[Sequence[int], list[bytes]]]:
    """Yield each batch of indices with the contents of its images, while the next ones are on their way.

    The content of an image that is too large to be read is empty; `Source.read` reports it.
    """
    waiting: list[_Window] = []
    for window in _windows(batches, items):
        window.start(items)
        waiting.append(window)
        if len(waiting) > 1:
            yield from _contents(waiting.pop(0))
    for window in waiting:
        yield from _contents(window)


def read_in_order(items: Sequence[Item], *, batch_size: int = 64) -> Iterator[bytes]:
    """Yield the content of each image of remote shards, read ahead, or b"" for images that are elsewhere."""
    if find_layout(items) is None:
        yield from (b"" for _ in items)
        return
    batches = (range(start, min(start + batch_size, len(items))) for start in range(0, len(items), batch_size))
    for _, contents in read_ahead(batches, items):
        yield from contents


def _contents(window: _Window) -> Iterator[tuple[Sequence[int], list[bytes]]]:
    window.wait()
    while window.batches:
        batch = window.batches.pop(0)
        yield batch, [window.contents.pop(index, b"") for index in batch]


def _windows(batches: Iterable[Sequence[int]], items: Sequence[Item]) -> Iterator[_Window]:
    """Yield the batches in groups of about `WINDOW_BYTES`."""
    window, size = _Window(batches=[]), 0
    for batch in batches:
        window.batches.append(batch)
        size += sum(getattr(items[index].source, "size", 0) for index in batch)
        if size >= WINDOW_BYTES:
            yield window
            window, size = _Window(batches=[]), 0
    if window.batches:
        yield window


def plan_ranges(indices: Iterable[int], items: Sequence[Item]) -> list[_Range]:
    """Return the ranges that contain the images. Neighbors are requested together."""
    sources: list[tuple[str, int, int, int]] = []
    for index in indices:
        source = items[index].source
        if isinstance(source, RemoteSource) and source.size <= MAX_BYTES:
            sources.append((source.url, source.offset, source.offset + source.size, index))
    ranges: list[_Range] = []
    for url, start, end, index in sorted(sources):
        last = ranges[-1] if ranges else None
        if last and last.url == url and start - last.end <= MAX_GAP and end - last.start <= MAX_RANGE:
            end = max(end, last.end)
            ranges[-1] = _Range(url=url, start=last.start, end=end, members=[*last.members, index])
        else:
            ranges.append(_Range(url=url, start=start, end=end, members=[index]))
    return ranges
