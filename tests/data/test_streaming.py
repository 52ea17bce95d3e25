"""Remote shards are streamed: each image once per epoch, in one order for any number of processes and workers."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.images import encoded, photo, write_shard
from tests.data.stores import WebServer, serve_folder
from vitral import Preprocess
from vitral.data import remote, streaming
from vitral.data.augment import Augment
from vitral.data.batches import Batch, BatchLoader, ImageDataset
from vitral.data.dataset import Item
from vitral.data.remote import RemoteSource
from vitral.data.sources import open_dataset
from vitral.data.streaming import Layout, find_layout, plan_ranges, stream_order
from vitral.errors import DataError

UNEQUAL = (1, 40, 3, 17, 29, 6)
BATCH = 8


def make_layout(shards: list[int], size: int = 1000) -> Layout:
    numbers = np.repeat(np.arange(len(shards)), shards)
    offsets = np.concatenate([np.arange(count) * size for count in shards])
    return Layout(shards=numbers, offsets=offsets, sizes=np.full(len(numbers), size))


@given(
    shards=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    batch_size=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([10, 10**5, 10**8]),
)
@settings(max_examples=60, deadline=None)
def test_each_image_has_one_place(shards: list[int], batch_size: int, seed: int, size: int) -> None:
    layout = make_layout(shards, size)
    orders = [stream_order(layout, batch_size=batch_size, seed=seed, epoch=epoch) for epoch in (0, 0, 1)]
    assert sorted(orders[0].tolist()) == list(range(sum(shards)))
    assert orders[0].tolist() == orders[1].tolist()
    if sum(shards) > 20:
        assert orders[0].tolist() != orders[2].tolist()


def test_a_batch_has_images_of_the_whole_dataset() -> None:
    """A dataset that is sorted by class is mixed: a batch of 256 out of 20 shards has images of nearly all of them."""
    layout = make_layout([500] * 20, size=10**5)
    order = stream_order(layout, batch_size=256, seed=1, epoch=0)
    batches = [order[start : start + 256] for start in range(0, 9984, 256)]
    assert min(len(set(layout.shards[batch].tolist())) for batch in batches) >= 18
    neighbors = layout.shards[order[1:]] == layout.shards[order[:-1]]
    assert neighbors.mean() < 0.3  # a group of four lanes is mixed


@pytest.mark.parametrize("world", [1, 2, 4, 16])
def test_a_process_reads_long_ranges(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 images of 100 kB: a process reads what it needs and little else, in ranges of half a megabyte or more."""
    monkeypatch.undo()  # the sizes of real use
    items = [
        Item(str(number), 0, RemoteSource(f"s3://x/{number // 5000}.tar", number % 5000 * 102_400 + 512, 101_000, b""))
        for number in range(100_000)
    ]
    layout = find_layout(items)
    assert layout is not None
    order, batch = stream_order(layout, batch_size=1024, seed=0, epoch=0), 1024
    wanted, requested, requests = 0, 0, 0
    mine = [order[start : start + batch][: batch // world].tolist() for start in range(0, 40 * batch, batch)]
    for window in streaming._windows(mine, items):
        ranges = plan_ranges({index for part in window.batches for index in part}, items)
        wanted += sum(map(len, window.batches)) * 101_000
        requested += sum(span.end - span.start for span in ranges)
        requests += len(ranges)
    assert requested < 1.3 * wanted
    assert requested / requests > 5e5


# ---- over a real server ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 96 images to shards of unequal length; the third image of each is damaged."""
    folder, number = tmp_path_factory.mktemp("streaming"), 0
    for shard, count in enumerate(UNEQUAL):
        members = []
        for position in range(count):
            content = encoded(photo(seed=number, height=20, width=24), "PNG")
            content = content[:60] if position == 2 else content
            members += [(f"{number:03d}.png", content), (f"{number:03d}.cls", b"%d" % (number % 3))]
            number += 1
        write_shard(folder / f"train-{shard}.tar", members)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[WebServer]:
    with serve_folder(folder) as server:
        yield server


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "WINDOW_BYTES", 20_000)
    monkeypatch.setattr(streaming, "MAX_GAP", 1024)
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)


def make(server: WebServer, *, workers: int = 0, rank: int = 0, world: int = 1, batch_size: int = BATCH) -> BatchLoader:
    items = open_dataset(f"{server.url}/train-{{0..5}}.tar").splits["train"]
    images = ImageDataset(items, Preprocess(size=(16, 16)), augment=Augment(crop="resized", flip=0.5), seed=3)
    return BatchLoader(
        images=images, batch_size=batch_size, classes=3, shuffle=True, workers=workers, rank=rank, world=world
    )


def join(parts: tuple[Batch, ...]) -> dict[int, bytes]:
    """Return the pixels of each image of a batch; a damaged image has none."""
    content: dict[int, bytes] = {}
    for part in parts:
        images = part.images if isinstance(part.images, torch.Tensor) else list(part.images)
        content |= {int(index): image.numpy().tobytes() for index, image in zip(part.items, images, strict=True)}
        content |= {index: b"" for index, _ in part.bad}
    return content


def epoch_of(
    server: WebServer, *, world: int, workers: int = 0, epoch: int = 0, start: int = 0, stop: int | None = None
) -> list[dict[int, bytes]]:
    """Return the batches of an epoch, each joined from the parts of all ranks."""
    ranks = [make(server, workers=workers, rank=rank, world=world).epoch(epoch, start, stop) for rank in range(world)]
    return [join(parts) for parts in zip(*ranks, strict=True)]


def check_epoch(batches: list[dict[int, bytes]], expected: list[dict[int, bytes]]) -> None:
    counts = Counter(index for batch in batches for index in batch)
    assert counts == dict.fromkeys(range(sum(UNEQUAL)), 1)
    assert batches == expected


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_image_once_per_epoch(server: WebServer, world: int) -> None:
    for epoch in (0, 1):
        check_epoch(epoch_of(server, world=world, epoch=epoch), epoch_of(server, world=1, epoch=epoch))


def test_workers(server: WebServer) -> None:
    loader = make(server, workers=2)
    for epoch in (0, 1):  # the workers outlive the first epoch
        check_epoch([join((batch,)) for batch in loader.epoch(epoch)], epoch_of(server, world=1, epoch=epoch))


@pytest.mark.soak
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_and_workers(server: WebServer, world: int, workers: int) -> None:
    check_epoch(epoch_of(server, world=world, workers=workers), epoch_of(server, world=1))


@pytest.mark.parametrize("worlds", [(2, 3), (3, 1), (1, 2)])
def test_the_number_of_ranks_changes_in_an_epoch(server: WebServer, worlds: tuple[int, int]) -> None:
    before = epoch_of(server, world=worlds[0], stop=5)
    after = epoch_of(server, world=worlds[1], start=5)
    check_epoch(before + after, epoch_of(server, world=1))


def test_evaluation_reads_in_order(server: WebServer) -> None:
    ranks = [replace(make(server, rank=rank, world=2, batch_size=7), shuffle=False) for rank in range(2)]
    counts = Counter(
        index
        for loader in ranks
        for batch in loader.epoch()
        for index in [*batch.items.tolist(), *(i for i, _ in batch.bad)]
    )
    assert counts == dict.fromkeys(range(sum(UNEQUAL)), 1)


def test_reading_ahead_is_bounded(server: WebServer) -> None:
    """At most two windows are requested before the first batch is used."""
    loader = make(server)
    sizes = [getattr(item.source, "size", 0) for item in loader.images.items]
    server.ranges.clear()
    next(loader.epoch())
    largest = max(sizes) * BATCH
    read = sum(int(span.rpartition("-")[2]) - int(span[6:].partition("-")[0]) + 1 for _, span in server.ranges)
    assert 0 < read < 2 * (20_000 + largest) + 1024 * 6 * BATCH  # and the gaps between images
    assert read < sum(sizes)


def test_a_lost_network_ends_the_epoch_with_an_error(server: WebServer) -> None:
    loader = make(server)
    server.failure, server.failures = "503", 10**6
    try:
        with pytest.raises(DataError, match="5 attempts"):
            list(loader.epoch())
        server.failures = 3
        assert len(list(loader.epoch())) == 12  # a few failures are repeated
    finally:
        server.failures = 0
