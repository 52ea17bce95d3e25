"""The stream of batches is the same bytes for any number of workers, and from any batch on."""

import hashlib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import vitral
from tests.data.images import class_folders, encoded, photo
from tests.faults.figures import record
from vitral import Preprocess
from vitral.data.augment import Augment
from vitral.data.batches import MAX_WORKERS, BatchLoader, ImageDataset, PixelCache
from vitral.data.sources import open_dataset

EVERYTHING = Augment(
    crop="resized", flip=0.5, rotate=10, zoom=0.1, shift=0.1, randaugment=2, jitter=0.3, erase=0.5, crop_area=(0.3, 1.0)
)


def make(
    folder: Path, workers: int = 0, rank: int = 0, world: int = 1, augment: Augment | None = EVERYTHING
) -> BatchLoader:
    items = open_dataset(folder).splits["train"]
    images = ImageDataset(items, Preprocess(size=(24, 24)), augment=augment, seed=3)
    return BatchLoader(images=images, batch_size=8, classes=3, shuffle=True, workers=workers, rank=rank, world=world)


def digest(batches: Any) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        for tensor in (batch.images, batch.labels, batch.items):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("data"), {"a": 15, "b": 15, "c": 14}, size=(40, 30))


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers(folder: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More workers than cores do not warn either: a warning would be an error here."""
    loader, expected = make(folder, workers), digest(make(folder).epoch(1))
    filters = list(warnings.filters)
    with monkeypatch.context() as patch:
        patch.setattr("os.sched_getaffinity", lambda process: {0}, raising=False)
        patch.setattr("os.cpu_count", lambda: 1)
        assert digest(loader.epoch(1)) == expected
    assert warnings.filters == filters


def test_from_any_batch_on(folder: Path) -> None:
    whole = list(make(folder).epoch(2))
    assert len(whole) == 5
    for start in range(1, 5):
        assert digest(make(folder).epoch(2, start=start)) == digest(whole[start:])


@pytest.mark.soak
def test_workers_and_resumes(folder: Path) -> None:
    """Every number of workers yields the same bytes, from every batch on."""
    whole, all_workers = list(make(folder).epoch(2)), (0, 1, 2, 4)
    for workers in all_workers:
        for start in range(5):
            assert digest(make(folder, workers).epoch(2, start=start)) == digest(whole[start:])
    record(
        "Order and augmentation with 0, 1, 2 and 4 workers and after a resume",
        "byte-identical",
        f"byte-identical, resumed at each of {len(whole)} batches",
    )


def test_epochs_and_seeds_differ_and_repeat(folder: Path) -> None:
    loader = make(folder)
    assert digest(loader.epoch(0)) != digest(loader.epoch(1))
    assert digest(loader.epoch(1)) == digest(make(folder).epoch(1))
    loader.images.seed = 4
    assert digest(loader.epoch(1)) != digest(make(folder).epoch(1))


def test_every_image_once(folder: Path) -> None:
    items = torch.cat([batch.items for batch in make(folder).epoch(0)])
    assert len(items) == len(set(items.tolist())) == 40
    plain = make(folder)
    plain.shuffle = False
    assert torch.cat([batch.items for batch in plain.epoch(0)]).tolist() == list(range(44))


def test_ranks_share_a_batch(folder: Path) -> None:
    whole = list(make(folder).epoch(0))
    shares = [list(make(folder, rank=rank, world=2).epoch(0)) for rank in range(2)]
    for batch, first, second in zip(whole, *shares, strict=True):
        assert set(batch.items.tolist()) == set(first.items.tolist()) | set(second.items.tolist())


def test_bad_images_are_skipped_and_listed(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 6, "b": 6})
    (tmp_path / "a" / "000.png").write_bytes(b"")
    (tmp_path / "b" / "003.png").write_bytes((tmp_path / "b" / "003.png").read_bytes()[:60])
    batches = list(make(tmp_path).epoch(0))
    bad = [reason for batch in batches for _, reason in batch.bad]
    assert len(bad) == sum(8 - len(batch.items) for batch in batches)
    plain = make(tmp_path)
    plain.shuffle = False
    reasons = sorted(reason for batch in plain.epoch() for _, reason in batch.bad)
    assert reasons[0].startswith("empty")
    assert reasons[1].startswith("truncated")


def test_native_sizes_come_as_a_list(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 2}, size=(32, 16))
    class_folders(tmp_path, {"b": 2}, size=(16, 16))
    images = ImageDataset(
        open_dataset(tmp_path).splits["train"], Preprocess(size=(32, 32), resize="native"), patch=(8, 8)
    )
    (batch,) = BatchLoader(images=images, batch_size=4, classes=2).epoch()
    assert isinstance(batch.images, list)
    assert {tuple(image.shape) for image in batch.images} == {(3, 32, 16), (3, 16, 16)}


def test_multi_label_tables() -> None:
    from vitral.data.dataset import DigitsSource, Item

    items = (Item("x", (0, 2), DigitsSource("train", 0)), Item("y", (), DigitsSource("train", 1)))
    images = ImageDataset(items, Preprocess(size=(28, 28)).with_channels(1))
    (batch,) = BatchLoader(images=images, batch_size=2, classes=3, multi_label=True).epoch()
    assert batch.labels.tolist() == [[1, 0, 1], [0, 0, 0]]


def test_cached_images_share_chunks_and_keep_their_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitral.data.batches.CHUNK_BYTES", 1000)
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, shape, dtype=np.uint8) for shape in [(8, 6, 3)] * 9 + [(30, 40, 1), (2, 2, 3)]]
    cache = PixelCache()
    added = [cache.add(number, image) for number, image in enumerate(images)]
    for number, image in enumerate(images):
        assert np.array_equal(added[number], image)
        assert np.array_equal(cache.images[number], image)
    assert len({id(image.base) for image in added}) == 4  # six of 144 bytes, three, the large one, and the last


def test_only_small_images_are_cached(tmp_path: Path) -> None:
    """A few headers decide for all images, but one of these is large and is not cached."""
    class_folders(tmp_path, {"a": 20, "b": 20}, size=(40, 30))
    (tmp_path / "a" / "001.png").write_bytes(encoded(photo(200, 100), "PNG"))
    loader = make(tmp_path)
    assert loader.images.is_cached
    first = digest(loader.epoch(0))
    assert set(loader.images.cache.images) <= set(range(40)) - {1}
    assert loader.images.cache.bytes == len(loader.images.cache.images) * 40 * 30 * 3 > 0
    assert digest(loader.epoch(0)) == first


@pytest.mark.parametrize(("workers", "number"), [(None, 4), (2, 2), (8, 0)])
def test_workers_share_the_limit_of_the_cache(
    workers: int | None, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = None if workers is None else SimpleNamespace(num_workers=workers)
    monkeypatch.setattr("vitral.data.batches.get_worker_info", lambda: worker)
    monkeypatch.setattr("vitral.data.batches.CACHE_BYTES", 600)
    cache = PixelCache()
    images = [np.full((8, 6, 3), index, np.uint8) for index in range(6)]
    added = [cache.add(index, image) for index, image in enumerate(images)]
    assert all(map(np.array_equal, added, images))
    assert list(cache.images) == list(range(number))


@pytest.mark.parametrize("workers", [-1, 5000, 2**63, 1.5])
def test_the_number_of_workers_is_bounded(folder: Path, workers: Any) -> None:
    with pytest.raises(vitral.ConfigError, match=f"workers .*{MAX_WORKERS}"):
        make(folder, workers)


def test_settings_that_would_be_ignored_are_refused(folder: Path) -> None:
    items = open_dataset(folder).splits["train"]
    with pytest.raises(vitral.ConfigError, match="native"):
        ImageDataset(items, Preprocess(size=(24, 24), resize="native"), augment=Augment(crop="resized"))
    with pytest.raises(vitral.ConfigError, match="5 channels"):
        ImageDataset(items, Preprocess(size=(24, 24)).with_channels(5), augment=Augment(jitter=0.1))
