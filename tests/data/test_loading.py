"""`vitral.data.Dataset` and `vitral.data.loader`, for training loops of your own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import vitral
from tests.conftest import small_model
from tests.data.images import class_folders
from vitral.data.batches import BatchLoader, ImageDataset
from vitral.data.headers import BadImageError
from vitral.data.sources import open_dataset
from vitral.data.splits import choose_splits
from vitral.data.transforms import normalize

PREPROCESS = vitral.Preprocess(size=(16, 16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("data"), {"a": 30, "b": 30}, size=(20, 24))


def test_a_dataset_is_a_sequence_of_images_and_labels(folder: Path) -> None:
    dataset = vitral.data.Dataset(folder, "all")
    assert len(dataset) == len(dataset.items) == 60
    assert dataset.classes == ("a", "b")
    assert not dataset.multi_label
    image, label = dataset[0]
    assert (image.shape, image.dtype, label) == ((3, 20, 24), torch.uint8, 0)
    assert dataset[-1][1] == 1
    with pytest.raises(IndexError):
        dataset[60]
    assert [label for _, label in dataset] == [0] * 30 + [1] * 30  # type: ignore[attr-defined]


def test_digits_are_gray() -> None:
    train, test = (vitral.data.Dataset("builtin:digits", split) for split in ("train", "test"))
    assert (len(train), len(test)) == (4000, 1000)
    assert train[0][0].shape == (1, 28, 28)
    assert vitral.data.Dataset("builtin:digits", channels=3)[0][0].shape == (3, 28, 28)


def test_splits_are_disjoint_and_those_of_training(folder: Path) -> None:
    train, test = (vitral.data.Dataset(folder, split).items for split in ("train", "test"))
    assert set(train).isdisjoint(test)
    assert len(train) + len(test) == 60
    chosen = choose_splits(open_dataset(folder))
    for split in ("train", "validation", "test"):
        assert vitral.data.Dataset(folder, split, val_fraction=0.1).items == getattr(chosen, split)
    with pytest.raises(vitral.DataError, match=r"no validation split .*val_fraction=0\.1"):
        vitral.data.Dataset(folder, "validation")
    with pytest.raises(vitral.ConfigError, match="got 'dev'"):
        vitral.data.Dataset(folder, "dev")  # type: ignore[arg-type]


def test_the_splits_of_the_dataset_are_used_as_they_are(tmp_path: Path) -> None:
    for split, count in (("train", 5), ("val", 3), ("test", 2)):
        class_folders(tmp_path, {"a": count, "b": count}, split=split)
    sizes = [len(vitral.data.Dataset(tmp_path, split)) for split in ("train", "validation", "test", "all")]
    assert sizes == [10, 6, 4, 20]


def test_transform_and_a_plain_data_loader(folder: Path) -> None:
    dataset = vitral.data.Dataset(folder, transform=lambda image: image[:, :16, :16] / 255)
    images, labels = next(iter(DataLoader(dataset, batch_size=8, shuffle=True)))
    assert (images.shape, images.dtype, labels.shape) == ((8, 3, 16, 16), torch.float32, (8,))
    assert 0 <= images.min() <= images.max() <= 1


def test_multi_label_data(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 2})
    (tmp_path / "x.csv").write_text("image,labels\na/000.png,cat|dog\na/001.png,\n")
    dataset = vitral.data.Dataset(tmp_path / "x.csv", "all")
    assert dataset.multi_label
    assert [label.tolist() for _, label in (dataset[0], dataset[1])] == [[1, 1], [0, 0]]  # type: ignore[union-attr]
    ((_, labels),) = vitral.data.loader(tmp_path / "x.csv", "all", preprocess=PREPROCESS)
    assert labels.tolist() == [[1, 1], [0, 0]]


def test_a_bad_image_raises_in_the_dataset_and_is_skipped_by_the_loader(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 4, "b": 4})
    (tmp_path / "a" / "002.png").write_bytes(b"")
    dataset = vitral.data.Dataset(tmp_path, "all")
    with pytest.raises(BadImageError, match="a/002.png") as caught:
        dataset[2]
    assert caught.value.reason == "empty"
    loader = vitral.data.loader(tmp_path, "all", preprocess=PREPROCESS, batch_size=3)
    assert [len(labels) for _, labels in loader] == [2, 3, 2]
    assert loader.skipped == {"a/002.png": "empty"}
    alone = vitral.data.loader(tmp_path, "all", preprocess=PREPROCESS, batch_size=1)
    assert [len(labels) for _, labels in alone] == [1] * 7  # a batch without images is not yielded


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_yields_the_batches_of_training(folder: Path, workers: int) -> None:
    augment = vitral.data.Augment(crop="resized", flip=0.5, randaugment=2, erase=0.5)
    images = ImageDataset(choose_splits(open_dataset(folder)).train, PREPROCESS, augment=augment, seed=5)
    expected = BatchLoader(images=images, batch_size=8, classes=2, shuffle=True)
    loader = vitral.data.loader(
        folder, preprocess=PREPROCESS, batch_size=8, augment=augment, seed=5, workers=workers, val_fraction=0.1
    )
    assert len(loader) == expected.batches_per_epoch
    for epoch in range(3):  # each iteration is the next epoch
        for (images_of_loader, labels), batch in zip(loader, expected.epoch(epoch), strict=True):
            assert isinstance(batch.images, torch.Tensor)
            assert torch.equal(images_of_loader, normalize(batch.images, PREPROCESS))
            assert torch.equal(labels, batch.labels)


def test_order_of_other_splits(folder: Path) -> None:
    labels = torch.cat([labels for _, labels in vitral.data.loader(folder, "all", preprocess=PREPROCESS)])
    assert labels.tolist() == [0] * 30 + [1] * 30
    shuffled = vitral.data.loader(folder, "all", preprocess=PREPROCESS, batch_size=60, shuffle=True)
    first, second = (next(iter(shuffled))[1] for _ in range(2))
    assert first.tolist() != second.tolist()
    assert sorted(first.tolist()) == labels.tolist()


def test_native_sizes_are_lists(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 2}, size=(32, 16))
    class_folders(tmp_path, {"b": 2}, size=(16, 16))
    preprocess = vitral.Preprocess(size=(32, 32), resize="native")
    ((images, _),) = vitral.data.loader(tmp_path, "all", preprocess=preprocess, patch=(8, 8))
    assert [tuple(image.shape) for image in images] == [(3, 32, 16)] * 2 + [(3, 16, 16)] * 2


def test_a_training_loop_learns(folder: Path) -> None:
    torch.manual_seed(0)
    model = small_model(image_size=16, patch_size=8, num_classes=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = vitral.data.loader(folder, preprocess=PREPROCESS, batch_size=8)
    losses = []
    for _ in range(8):
        total = 0.0
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / len(loader))
    assert losses[-1] < losses[0] / 2
    assert loader.epoch == 8


def test_preprocess_and_augment_are_checked(folder: Path) -> None:
    with pytest.raises(vitral.ConfigError, match=r"preprocess must be a Preprocess \(got None\)"):
        vitral.data.loader(folder, preprocess=None)  # type: ignore[arg-type]
    preprocess = vitral.Preprocess(size=(16, 16))
    with pytest.raises(vitral.ConfigError, match=r"augment must be a Augment .*got True.*Augment\(flip"):
        vitral.data.loader(folder, preprocess=preprocess, augment=True)  # type: ignore[arg-type]


def test_importing_the_package_is_cheap() -> None:
    check = "import sys, vitral.data; assert 'torch' not in sys.modules and 'PIL' not in sys.modules; dir(vitral.data)"
    subprocess.run([sys.executable, "-c", check], check=True)
    assert set(vitral.data.__all__) == {"Augment", "Dataset", "loader"}
    assert callable(vitral.data.loader)
    with pytest.raises(AttributeError, match="Loader"):
        vitral.data.Loader  # type: ignore[attr-defined] # noqa: B018
