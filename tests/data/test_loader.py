"""The stream of batches is the same bytes for any number of workers, and from any batch on."""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import vitral
from tests.data.pictures import class_folders, encoded, photo
from vitral import Preprocess
from vitral.data.augment import Augment, augment, inception_box, random_generator, resized_box, squashed_box
from vitral.data.batches import BatchLoader, ImageDataset, Kept
from vitral.data.sources import open_dataset

EVERYTHING = Augment(
    crop="resized", flip=0.5, rotate=10, zoom=0.1, shift=0.1, randaugment=2, jitter=0.3, erase=0.5, crop_area=(0.3, 1.0)
)


def make(
    folder: Path, workers: int = 0, rank: int = 0, world: int = 1, how: Augment | None = EVERYTHING
) -> BatchLoader:
    items = open_dataset(folder).splits["train"]
    pictures = ImageDataset(items, Preprocess(size=(24, 24)), how=how, seed=3)
    return BatchLoader(
        pictures=pictures, batch_size=8, classes=3, shuffle=True, workers=workers, rank=rank, world=world
    )


def digest(batches: Any) -> str:
    found = hashlib.sha256()
    for batch in batches:
        for part in (batch.images, batch.labels, batch.items):
            found.update(part.numpy().tobytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("data"), {"a": 15, "b": 15, "c": 14}, size=(40, 30))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers(folder: Path, workers: int) -> None:
    assert digest(make(folder, workers).epoch(1)) == digest(make(folder).epoch(1))


def test_from_any_batch_on(folder: Path) -> None:
    whole = list(make(folder).epoch(2))
    assert len(whole) == 5
    for start in range(1, 5):
        assert digest(make(folder).epoch(2, start=start)) == digest(whole[start:])


def test_epochs_and_seeds_differ_and_repeat(folder: Path) -> None:
    loader = make(folder)
    assert digest(loader.epoch(0)) != digest(loader.epoch(1))
    assert digest(loader.epoch(1)) == digest(make(folder).epoch(1))
    loader.pictures.seed = 4
    assert digest(loader.epoch(1)) != digest(make(folder).epoch(1))


def test_every_picture_once(folder: Path) -> None:
    items = torch.cat([batch.items for batch in make(folder).epoch(0)])
    assert len(items) == len(set(items.tolist())) == 40
    plain = make(folder)
    plain.shuffle = False
    assert torch.cat([batch.items for batch in plain.epoch(0)]).tolist() == list(range(44))


def test_ranks_share_a_batch(folder: Path) -> None:
    whole = list(make(folder).epoch(0))
    parts = [list(make(folder, rank=rank, world=2).epoch(0)) for rank in range(2)]
    for batch, first, second in zip(whole, *parts, strict=True):
        assert set(batch.items.tolist()) == set(first.items.tolist()) | set(second.items.tolist())


def test_bad_pictures_are_left_out_and_named(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 6, "b": 6})
    (tmp_path / "a" / "000.png").write_bytes(b"")
    (tmp_path / "b" / "003.png").write_bytes((tmp_path / "b" / "003.png").read_bytes()[:60])
    found = list(make(tmp_path).epoch(0))
    bad = [reason for batch in found for _, reason in batch.bad]
    assert len(bad) == sum(8 - len(batch.items) for batch in found)
    plain = make(tmp_path)
    plain.shuffle = False
    reasons = sorted(reason for batch in plain.epoch() for _, reason in batch.bad)
    assert reasons[0].startswith("empty")
    assert reasons[1].startswith("truncated")


def test_native_sizes_come_as_a_list(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 2}, size=(32, 16))
    class_folders(tmp_path, {"b": 2}, size=(16, 16))
    pictures = ImageDataset(
        open_dataset(tmp_path).splits["train"], Preprocess(size=(32, 32), resize="native"), patch=(8, 8)
    )
    (batch,) = BatchLoader(pictures=pictures, batch_size=4, classes=2).epoch()
    assert isinstance(batch.images, list)
    assert {tuple(image.shape) for image in batch.images} == {(3, 32, 16), (3, 16, 16)}


def test_multi_label_tables() -> None:
    from vitral.data.dataset import DigitsSource, Item

    items = (Item("x", (0, 2), DigitsSource("train", 0)), Item("y", (), DigitsSource("train", 1)))
    pictures = ImageDataset(items, Preprocess(size=(28, 28)).with_channels(1))
    (batch,) = BatchLoader(pictures=pictures, batch_size=2, classes=3, multi_label=True).epoch()
    assert batch.labels.tolist() == [[1, 0, 1], [0, 0, 0]]


# ---- augmentation ----


def test_boxes_follow_their_laws() -> None:
    for law, area in ((resized_box, (0.08, 1.0)), (inception_box, (0.05, 1.0))):
        parts, ratios = [], []
        for sample in range(3000):
            top, left, h, w = law(300, 400, area, (0.75, 4 / 3), random_generator(0, 0, sample))
            assert 0 <= top <= 300 - h
            assert 0 <= left <= 400 - w
            parts.append(h * w / 120_000)
            ratios.append(w / h)
        assert min(parts) > area[0] * 0.95
        assert max(parts) <= 1
        assert min(ratios) > 0.7
        assert max(ratios) < 1.4
    torchvision = [
        np.prod(resized_box(300, 300, (0.08, 1.0), (0.75, 4 / 3), random_generator(0, 0, i))[2:]) for i in range(3000)
    ]
    assert abs(np.mean(torchvision) / 90_000 - 0.5) < 0.06  # area is uniform, but wide parts of large area do not fit


@pytest.mark.parametrize(("height", "width"), [(300, 400), (480, 640), (640, 100), (7, 5), (1, 300), (512, 512)])
def test_a_part_of_the_squashed_picture_has_its_shape(height: int, width: int) -> None:
    """The BiT-HyperRule: squash to 512 x 512, cut 480 x 480 out of it anywhere."""
    area = (480 / 512) ** 2
    tops, lefts = set(), set()
    for sample in range(2000):
        box = squashed_box(height, width, (area, area), (1.0, 1.0), random_generator(0, 0, sample))
        assert box[2:] == (max(1, round(height * 480 / 512)), max(1, round(width * 480 / 512)))
        tops.add(box[0])
        lefts.add(box[1])
        assert 0 <= box[0] <= height - box[2]
        assert 0 <= box[1] <= width - box[3]
    assert max(tops) == height - box[2]
    assert max(lefts) == width - box[3]
    assert min(tops) == min(lefts) == 0


@pytest.mark.parametrize(
    "how",
    [
        Augment(flip=1.0),
        Augment(crop="shift", crop_shift=3),
        Augment(rotate=20),
        Augment(randaugment=2),
        Augment(jitter=0.4),
        Augment(erase=1.0),
        Augment(crop="inception", crop_area=(0.05, 1.0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("channels", [1, 3])
def test_each_augmentation_keeps_the_shape_and_repeats(how: Augment, channels: int) -> None:
    pixels = np.asarray(photo(32, 32))[..., :channels]
    preprocess = Preprocess(size=(32, 32)).with_channels(channels)
    first = augment(pixels, preprocess, how, random_generator(1, 2, 3))
    assert first.shape == (channels, 32, 32)
    assert first.dtype == torch.uint8
    assert torch.equal(first, augment(pixels, preprocess, how, random_generator(1, 2, 3)))
    others = [augment(pixels, preprocess, how, random_generator(1, 2, i)) for i in range(4, 14)]
    plain = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    assert any(not torch.equal(plain, other) for other in others)


def test_a_flip_is_a_flip() -> None:
    pixels = np.asarray(photo(16, 16))
    flipped = augment(pixels, Preprocess(size=(16, 16)), Augment(flip=1.0), random_generator(0, 0, 0))
    assert np.array_equal(flipped.permute(1, 2, 0).numpy(), pixels[:, ::-1])


def test_turning_by_nothing_changes_nothing() -> None:
    pixels = np.asarray(photo(16, 16))
    same = augment(pixels, Preprocess(size=(16, 16)), Augment(rotate=1e-9), random_generator(0, 0, 0))
    assert np.abs(same.permute(1, 2, 0).numpy().astype(int) - pixels).max() <= 1


def test_large_jpegs_in_a_random_crop() -> None:
    content = encoded(photo(900, 1200), "JPEG", quality=95)
    image = augment(content, Preprocess(size=(64, 64)), Augment(crop="resized"), random_generator(0, 0, 1))
    assert image.shape == (3, 64, 64)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            dict(crop="zoom"),
            dict(flip=2.0),
            dict(flip=True),
            dict(rotate=-1),
            dict(shear=90),
            dict(zoom=5),
            dict(zoom=1),
        ),
        *(dict(crop_area=area) for area in [(0.5, 0.1), (0.5, 9), (2, 9), (0, 1), (NAN, 1), (0.5,), 0.5, "ab"]),
        *(dict(crop_aspect=aspect) for aspect in [(0.5, INF), (NAN, 1), (0, 1), (1e-320, 1)]),
        *(dict(randaugment_magnitude=100), dict(randaugment=1.5), dict(crop_shift="4"), dict(crop_shift=NAN)),
        *(
            {name: value}
            for name in ("flip", "rotate", "shift", "jitter", "erase", "zoom")
            for value in (INF, NAN, -0.1)
        ),
    ],
)
def test_augmentation_that_cannot_be(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(vitral.ConfigError) as caught:
        Augment(**wrong)
    assert str(caught.value).startswith(f"{name}={value!r} must be ")


def test_the_strongest_augmentation_that_is_allowed() -> None:
    strongest = Augment(
        rotate=180, shear=89, zoom=0.99, shift=1, randaugment=16, randaugment_magnitude=20, jitter=10, erase=1
    )
    for sample in range(20):
        image = augment(np.asarray(photo(16, 16)), Preprocess(size=(16, 16)), strongest, random_generator(0, 0, sample))
        assert image.shape == (3, 16, 16)


def test_every_key_has_its_own_randomness(recwarn: pytest.WarningsRecorder) -> None:
    keys = [(seed, epoch, 5) for seed in (-2, -1, 0, 1, 2**63, 2**63 + 1) for epoch in (0, 1, 2**23, 2**23 + 1)]
    assert len({random_generator(*key).random() for key in keys}) == len(keys)
    assert not recwarn.list
    assert random_generator(3, 2, 1).random() == np.random.Generator(np.random.Philox(key=[3, (2 << 40) | 1])).random()


def test_kept_pictures_lie_together_and_keep_their_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitral.data.batches.PIECE", 1000)
    random = np.random.default_rng(0)
    pictures = [random.integers(0, 256, shape, dtype=np.uint8) for shape in [(8, 6, 3)] * 9 + [(30, 40, 1), (2, 2, 3)]]
    kept = Kept()
    given = [kept.add(number, picture) for number, picture in enumerate(pictures)]
    for number, picture in enumerate(pictures):
        assert np.array_equal(given[number], picture)
        assert np.array_equal(kept.pictures[number], picture)
    assert len({id(picture.base) for picture in given}) == 4  # six of 144 bytes, three, the large one, and the last


def test_only_small_pictures_are_kept(tmp_path: Path) -> None:
    """A few headers cannot speak for all: one of these is large, and is given as it is."""
    class_folders(tmp_path, {"a": 20, "b": 20}, size=(40, 30))
    (tmp_path / "a" / "001.png").write_bytes(encoded(photo(200, 100), "PNG"))
    loader = make(tmp_path)
    assert loader.pictures.keep
    first = digest(loader.epoch(0))
    assert set(loader.pictures.kept.pictures) <= set(range(40)) - {1}
    assert loader.pictures.kept.bytes == len(loader.pictures.kept.pictures) * 40 * 30 * 3 > 0
    assert digest(loader.epoch(0)) == first


@pytest.mark.parametrize(("workers", "number"), [(None, 4), (2, 2), (8, 0)])
def test_what_is_kept_has_a_limit_that_workers_share(
    workers: int | None, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = None if workers is None else SimpleNamespace(num_workers=workers)
    monkeypatch.setattr("vitral.data.batches.get_worker_info", lambda: worker)
    monkeypatch.setattr("vitral.data.batches.CACHE_BYTES", 600)
    kept = Kept()
    pictures = [np.full((8, 6, 3), index, np.uint8) for index in range(6)]
    given = [kept.add(index, picture) for index, picture in enumerate(pictures)]
    assert all(map(np.array_equal, given, pictures))
    assert list(kept.pictures) == list(range(number))
